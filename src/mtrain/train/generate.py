"""Text from a model in any layout: the same pipeline schedule as training, forward only, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mtrain.config.run import RunConfig
from mtrain.mcore import api as mcore
from mtrain.world.beats import beat
from mtrain.world.init import World


@dataclass(frozen=True)
class Sampler:
    """This rank's chunks of a model, to sample tokens from together with all other ranks."""

    run: RunConfig
    world: World
    chunks: list[Any]

    @torch.no_grad()
    def generate(self, prompt: list[int], tokens: int, *, temperature: float) -> list[int]:
        """`prompt` followed by `tokens` sampled token ids, the same on every rank.

        A temperature of 0 takes the most likely token. The context is the last `data.seq_length` tokens. Sampling
        has a generator of its own, from `trainer.seed`, so the training state is left as it was.
        """
        generator = torch.Generator().manual_seed(self.run.trainer.seed)
        grid, ids = self.world.grid, list(prompt)
        for chunk in self.chunks:
            chunk.eval()
        for _ in range(tokens):
            beat("generation")
            logits = self._next_logits(ids[-self.run.data.seq_length :])
            choice = torch.zeros(1, dtype=torch.int64, device=self.world.torch_device)
            if logits is not None:
                known = logits[: self.run.model.vocab_size].float().cpu()
                choice[0] = _sample(known, temperature, generator)
            # Every rank of the last stage has drawn; the first of them is believed.
            dist.broadcast(choice, src=grid.rank_of(pp=grid.pp - 1))
            ids.append(int(choice.item()))
        for chunk in self.chunks:
            chunk.train()
        return ids

    def _next_logits(self, ids: list[int]) -> torch.Tensor | None:
        """Logits `[padded vocabulary]` after the last id on ranks of the last stage, None elsewhere.

        The sequence is padded on the right to a multiple of the tensor-parallel size, which sequence parallelism cuts
        it by; causal attention keeps the padding from being seen.
        """
        grid, device = self.world.grid, self.world.torch_device
        length = -(-len(ids) // grid.tp) * grid.tp
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
