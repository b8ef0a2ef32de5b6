"""Text from a model in any layout: the same pipeline schedule as training, forward only, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mtrain.config.rules.quantized import MULTIPLES
from mtrain.config.run import RunConfig
from mtrain.errors import ConfigError, Problem
from mtrain.layout.grid import RankGrid
from mtrain.mcore import api as mcore
from mtrain.world.heartbeat import begin_phase
from mtrain.world.init import World


@dataclass(frozen=True)
class Sampler:
    """This rank's chunks of a model, to sample tokens from together with all other ranks."""

    run: RunConfig
    world: World
    chunks: list[Any]

    @property
    def multiple(self) -> int:
        """What a sequence's length must be a multiple of: sequence parallelism splits it, low-precision products take
        it in blocks.
        """
        recipe = self.run.precision.quantized
        parts = self.grid.tp if self.run.parallel.sequence_parallel else 1
        return parts * (MULTIPLES.get(recipe, 16) if recipe is not None else 1)

    @property
    def context(self) -> int:
        """Tokens that are looked back at: `data.seq_length`, or fewer where learned positions end before.

        Raises:
            ConfigError: there are fewer positions than the shortest sequence that this layout can compute.
        """
        model = self.run.model
        if model.position_embedding_type != "learned_absolute":
            return self.run.data.length
        positions = model.max_position_embeddings
        whole = positions // self.multiple * self.multiple
        if not whole:
            rule = (
                f"sequences of this layout are multiples of {self.multiple} tokens, and {positions} have a position"
            )
            raise ConfigError([Problem("MT508", "model.max_position_embeddings", positions, rule, "parallel=single")])
        return min(self.run.data.length, whole)

    @property
    def grid(self) -> RankGrid:
        """The degrees of the layout."""
        return self.world.grid

    @torch.no_grad()
    def generate(
        self, prompt: list[int], tokens: int, *, temperature: float, stop: Callable[[], bool] = lambda: False
    ) -> list[int] | None:
        """`prompt` followed by `tokens` sampled token ids, the same on every rank; None as soon as a rank's `stop` is
        true.

        A temperature of 0 takes the most likely token. Sampling has a generator of its own, from `trainer.seed`, so
        the training state is left as it was.

        Raises:
            ConfigError: see `context`.
        """
        generator = torch.Generator().manual_seed(self.run.trainer.seed)
        ids, context, rank = list(prompt), self.context, self.world.rank
        for chunk in self.chunks:
            chunk.eval()
        for _ in range(tokens):
            begin_phase("generation")
            logits = self._next_logits(ids[-context:])
            told = torch.zeros(2, dtype=torch.int64, device=self.world.torch_device)
            told[1] = stop()
            if logits is not None:
                known = logits[: self.run.model.vocab_size].float().cpu()
                choice = _sample(known, temperature, generator)
                # Every rank of the last stage has drawn; the first of them is believed.
                told[0] = choice if rank == self.grid.rank_of(pp=self.grid.pp - 1) else 0
            dist.all_reduce(told)
            choice, stops = told.tolist()
            if stops:
                return None
            ids.append(choice)
        for chunk in self.chunks:
            chunk.train()
        return ids

    def _next_logits(self, ids: list[int]) -> torch.Tensor | None:
        """Logits `[padded vocabulary]` after the last id on ranks of the last stage, None elsewhere.

        The sequence is padded on the right to a `multiple`; causal attention keeps the padding from being seen.
        """
        grid, device = self.grid, self.world.torch_device
        length = -(-len(ids) // self.multiple) * self.multiple
        padded = torch.tensor([ids + [0] * (length - len(ids))], device=device)
        positions = torch.arange(length, device=device).unsqueeze(0)

        def forward(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
            output = model(padded, positions, None)
            return output, lambda logits, non_loss_data=True: logits[0, len(ids) - 1]

        interleaved = len(self.chunks) > 1
        found = mcore.get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(()) for _ in self.chunks] if interleaved else iter(()),
            model=self.chunks if interleaved else self.chunks[0],
            num_microbatches=grid.pp if interleaved else 1,
            seq_length=length,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
        return mcore.gather_from_tensor_model_parallel_region(found[0].unsqueeze(0))[0] if found else None


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
