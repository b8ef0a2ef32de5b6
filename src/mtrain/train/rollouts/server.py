"""Rollouts from a server that gets the weights after every update. Rank 0 talks to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, TrainingError
from mtrain.train.generate.request import Continuation, Sampling
from mtrain.train.rollouts import weight_folder
from mtrain.train.rollouts.client import Client
from mtrain.train.rollouts.engine import Prompt, Rollout
from mtrain.train.rollouts.exchange import packed, seed_of, unpacked
from mtrain.train.rollouts.http_json import ServerFault
from mtrain.world.heartbeat import waiting
from mtrain.world.init import World


@dataclass
class ServerEngine:
    """An engine that requests answers from a server of vLLM, SGLang or of OpenAI's completions
    with token ids.
    """

    run: RunConfig
    world: World
    client: Client
    """Used by rank 0 only."""
    folder: Path | None = None
    """Folder of a disk that the server reads, too, which gets the weights; None: the server keeps
    its weights.
    """
    base: Path | None = None
    """Hugging Face folder whose JSON files stand next to the weights."""
    probe: tuple[str, Sequence[int]] = ("", ())
    """A text and its ids, which the server has to encode in the same way."""
    stop: Callable[[], bool] = lambda: False
    _known: bool = field(default=False, init=False)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout] | None:
        """Return an answer to each prompt; see `Engine`.

        Raises:
            ConfigError: the server's log-probabilities are not of the distribution drawn from.
            TrainingError: the server fails for too long, or gives wrong answers.
        """
        self._require(sampling)
        texts: list[Continuation] | None = None
        problem = ""
        if self.world.is_rank0:
            # One that fails here is known to all ranks below, before they wait for its answers.
            seeds = [seed_of(self.run, sampling, prompt) for prompt in prompts]
            pairs = [(prompt.ids, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
            try:
                if not self._known:
                    self.client.require_same(*self.probe)
                    self._known = True
                texts = self.client.sampled(pairs, sampling)
            except ServerFault as error:
                problem = f"{self.client.url}: {error}"
        self._agree(problem, "sample answers")
        longest = max((len(text.ids) for text in texts or ()), default=0)
        stops = self.stop() or (self.world.is_rank0 and texts is None)
        facts = torch.tensor([longest, stops], dtype=torch.int64, device=self.world.torch_device)
        with waiting():
            dist.all_reduce(facts, op=dist.ReduceOp.MAX)
        longest, stops = facts.tolist()
        if stops:
            return None
        sent = packed(dict(enumerate(texts or ())), len(prompts), longest)
        sent = sent.to(self.world.torch_device)
        with waiting():
            dist.broadcast(sent, src=0)
        version = self.client.version
        return [
            Rollout(prompt, tuple(text.ids), tuple(text.log_probabilities), text.ended, version)
            for prompt, text in zip(prompts, unpacked(sent), strict=True)
        ]

    def _require(self, sampling: Sampling) -> None:
        limits = sampling.top_k or sampling.top_p < 1 or sampling.min_p
        tempered = self.client.how.tempered and sampling.temperature > 0
        if limits or not (tempered or sampling.temperature == 1):
            key = "rollout.temperature"
            why = f"a server of the kind {self.client.dialect} reports those of temperature 1"
            if self.client.how.tempered:
                why = "a server reports those of all tokens, above temperature 0"
            raise ConfigError.of("MT335", key, sampling.temperature, why, f"{key}=1")

    def push(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Give the server the weights after step `version`; see `Engine`.

        Raises:
            TrainingError: they cannot be written, or the server does not take them.
        """
        problem = ""
        if self.world.is_rank0 and self.folder is not None:
            try:
                self._push(weights, version)
            except (ServerFault, OSError, ValueError) as error:
                problem = f"{self.client.url}: {error}"
        # Ranks make each tensor together.
        for _ in weights:
            pass
        self._agree(problem, "push weights")
        if self.folder is not None:
            self.client.version = version

    def _push(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        assert self.folder is not None
        to = self.folder / f"step_{version:08d}"
        weight_folder.write(weights, to, self.base)
        name = weight_folder.READ_BY[self.client.dialect](self.client, to, f"step {version}")
        self.client.has(version, name)
        for other in self.folder.glob("step_*"):
            if other != to:
                shutil.rmtree(other, ignore_errors=True)

    def _agree(self, problem: str, what: str) -> None:
        problem = self.world.first_problem(problem)
        if problem:
            raise TrainingError(
                f"rollout.url: cannot {what} because the server failed ({problem}). The step was"
                " not made. Restart the server with the weights of the last checkpoint, and resume"
            )

    def pause(self) -> None:
        """Do nothing: no request is in flight between two calls, and `push` pauses the server."""

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def close(self) -> None:
        """Do nothing: each request has a connection of its own."""
