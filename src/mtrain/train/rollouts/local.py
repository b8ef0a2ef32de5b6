"""Rollouts from the trained shards themselves, in the layout of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain.ckpt.state import generators_kept
from mtrain.config.schema.run import RunConfig
from mtrain.mcore import api as mcore
from mtrain.mcore.state.sharding import gathered
from mtrain.train.generate.request import ENDINGS, LENGTH, Sampling
from mtrain.train.generate.sampler import Sampler, evaluated
from mtrain.train.rollouts.engine import Prompt, Rollout
from mtrain.world.heartbeat import begin_phase
from mtrain.world.init import World


@dataclass
class LocalEngine:
    """An engine that samples with this rank's chunks, together with all other ranks."""

    run: RunConfig
    world: World
    chunks: list[Any]
    rows: int = 8
    ending: Callable[[list[int]], str] = lambda ids: LENGTH
    stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.run, self.world, self.chunks, blocks=False)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout] | None:
        out: list[Rollout] = []
        with gathered(self.chunks), evaluated(self.chunks), generators_kept(self.world):
            for first in range(0, len(prompts), self.rows):
                found = self._group(prompts[first : first + self.rows], sampling)
                if found is None:
                    return None
                out += found
        return out

    def _group(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout] | None:
        seed = self.run.trainer.seed if sampling.seed is None else sampling.seed
        dice = [
            torch.Generator().manual_seed(
                int(np.random.SeedSequence((seed, p.number)).generate_state(1, np.uint64)[0] >> 1)
            )
            for p in prompts
        ]
        texts = [list(p.ids) for p in prompts]
        logs: list[list[float]] = [[] for _ in prompts]
        ended = ["" for _ in prompts]
        sampler = self.sampler
        multiple = sampler.multiple
        device = self.world.torch_device
        vocabulary = self.run.model.vocab_size
        while going := [i for i, e in enumerate(ended) if not e]:
            begin_phase("generation")
            longest = max(len(texts[i]) for i in going)
            length = -(-longest // multiple) * multiple
            rows = torch.tensor([(t + [0] * length)[:length] for t in texts], device=device)
            places = torch.tensor([min(len(t), length) - 1 for t in texts], device=device)

            def take(logits: torch.Tensor, places: torch.Tensor = places) -> torch.Tensor:
                whole = mcore.gather_from_tensor_model_parallel_region(logits)
                return whole[torch.arange(len(texts)), places, :vocabulary]

            positions = torch.arange(length, device=device).clamp(max=sampler.context - 1)
            lengths = [min(len(t), length) for t in texts]
            logits = sampler.forward(rows, positions, take, {}, lengths)
            sent = torch.zeros((len(texts), 2), dtype=torch.float64, device=device)
            stops = torch.zeros((), dtype=torch.float64, device=device) + float(self.stop())
            if logits is not None and self.world.rank == sampler.grid.rank_of(
                pp=sampler.grid.pp - 1
            ):
                values = (logits.float().cpu() / sampling.temperature).log_softmax(-1)
                for i in going:
                    choice = int(torch.multinomial(values[i].exp(), 1, generator=dice[i]))
                    sent[i, 0] = choice
                    sent[i, 1] = float(values[i, choice])
            if self.world.size > 1:
                dist.all_reduce(sent)
                dist.all_reduce(stops)
            if float(stops):
                return None
            for i, (choice, value) in enumerate(sent.tolist()):
                if ended[i]:
                    continue
                texts[i].append(int(choice))
                logs[i].append(value)
                own = texts[i][len(prompts[i].ids) :]
                kind = self.ending(own)
                if kind != LENGTH or len(own) == sampling.tokens:
                    ended[i] = kind
        assert all(e in ENDINGS for e in ended)
        return [
            Rollout(p, tuple(t[len(p.ids) :]), tuple(v), e)
            for p, t, v, e in zip(prompts, texts, logs, ended, strict=True)
        ]

    def push(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Do nothing: the weights are those that are trained."""

    def pause(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
