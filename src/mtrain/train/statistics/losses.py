"""Loss by position, source and kind of token, and of each further token that is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mtrain.config.resolve.batches import size_after
from mtrain.data.batch import FURTHER
from mtrain.data.samples.origin import sources_of
from mtrain.mcore.layers.context import context_positions
from mtrain.mcore.models.language_model import OutputLayer
from mtrain.mcore.state.local_params import unwrap
from mtrain.train.loop.context import TrainContext
from mtrain.train.objectives import Batch
from mtrain.train.statistics.part import Part

LOSSES = "losses"
COLUMNS = ("loss", "tokens")
"""Mean loss of the tokens of a row, in nats, and their number."""
LEARNED = "tokens learned"
SPECIAL = "tokens special"
UNLEARNED = "tokens unlearned"


class LossStatistics(Part):
    """Sums of the losses that the model made of each token, taken where the objective adds them.

    Rows count tokens that are learned, each once, whatever its weight. Tensor-parallel ranks have
    the same losses, of which one counts.
    """

    def __init__(self, context: TrainContext, special: Sequence[int] = ()) -> None:
        """Describe a run whose tokens of the ids `special` have a row of their own."""
        run = context.run
        device = context.world.torch_device
        self.context = context
        self.depths = run.model.mtp_num_layers or 0
        # Documents that are dealt out over ranks no longer tell their samples.
        dealt = run.parallel.hybrid_context_parallel
        self.sources = [] if dealt else sources_of(context.train_data.samples)
        edges = [1 << n for n in range(max(1, run.data.length - 1).bit_length())]
        self.edges = torch.tensor(edges, device=device)
        self.special = torch.tensor(special, dtype=torch.int64, device=device)
        last = run.data.length - 1
        bounds = zip([0, *edges], [*(edge - 1 for edge in edges), last], strict=True)
        self.names = [f"position {a}-{b}" if a < b else f"position {a}" for a, b in bounds]
        self.first_kind = len(self.names)
        self.names += [LEARNED, SPECIAL, UNLEARNED]
        self.first_depth = len(self.names)
        self.names += [f"token {2 + depth} ahead" for depth in range(self.depths)]
        self.first_source = len(self.names)
        self.names += [f"source {name}" for name in self.sources]
        self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)
        self.maxima = self.sums.new_zeros(0)
        roots = [unwrap(chunk) for chunk in context.state.chunks]
        layers = (getattr(root, "output_layer", None) for root in roots)
        self.layers = [layer for layer in layers if isinstance(layer, OutputLayer)]
        self.reported: list[torch.Tensor] = []
        """Losses of the tokens of a micro-batch, [b, s] each: further ones, and the next one."""
        self.parts: torch.Tensor | None = None
        """The source of each sample, [micro-batches, rows]."""

    def watch(self) -> None:
        """Begin a step, whose samples say their sources."""
        self.sums.zero_()
        if not self.layers:
            return
        self.number = 0
        self.reported = []
        for layer in self.layers:
            layer.on_losses = self.reported.append
        objective = self.context.objective
        made = objective.loss

        def loss(output: torch.Tensor, batch: Batch) -> Any:
            self._add(batch)
            return made(output, batch)

        objective.__dict__["loss"] = loss
        if self.sources:
            self.parts = self._sources_of_samples()

    def _sources_of_samples(self) -> torch.Tensor:
        """Return the source of each sample of the step on this rank, [micro-batches, rows]."""
        data = self.context.train_data
        consumed = self.context.state.consumed_samples
        numbers = data.numbers(consumed, size_after(self.context.batch_sizes, consumed))
        part, _ = data.samples.places(numbers.ravel())  # type: ignore[attr-defined]
        parts = torch.from_numpy(part).view(numbers.shape)
        return parts.to(self.sums.device, non_blocking=True)

    def leave(self) -> None:
        """Listen no more."""
        for layer in self.layers:
            layer.on_losses = None
        self.context.objective.__dict__.pop("loss", None)

    @torch.no_grad()
    def _add(self, batch: Batch) -> None:
        """Add a micro-batch whose losses the model has just made."""
        reported = list(self.reported)
        self.reported.clear()
        number = self.number
        self.number += 1
        mask = batch["loss_mask"]
        # An objective that reads logits makes losses of its own.
        if not reported or reported[-1].shape != mask.shape or self.context.world.coords["tp"] != 0:
            return
        losses = reported[-1]
        learned = mask > 0
        places = batch["position_ids"]
        if places.shape == mask.shape:
            self._sum(losses, learned, torch.bucketize(places, self.edges, right=True))
        self._sum_row(self.first_kind, losses, learned)
        special = torch.isin(batch["labels"], self.special)
        self._sum_row(self.first_kind + 1, losses, learned & special)
        self._sum_row(self.first_kind + 2, losses, ~learned & self._followed(batch))
        for depth in range(min(self.depths, len(reported) - 1)):
            counts = batch[FURTHER][..., depth] > 0
            self._sum_row(self.first_depth + depth, reported[depth - 1 - self.depths], counts)
        if self.parts is not None:
            self._sum(losses, learned, self.first_source + self._source(batch, self.parts[number]))

    def _sum(self, losses: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor) -> None:
        """Add losses [b, s] to their rows [b, s], where they count."""
        both = torch.stack([torch.where(counts, losses, 0.0), counts.to(losses)], -1)
        self.sums.index_add_(0, rows.flatten(), both.double().flatten(0, 1))

    def _sum_row(self, row: int, losses: torch.Tensor, counts: torch.Tensor) -> None:
        total = torch.where(counts, losses, 0.0).sum(dtype=torch.float64)
        self.sums[row] += torch.stack([total, counts.sum(dtype=torch.float64)])

    def _followed(self, batch: Batch) -> torch.Tensor:
        """Return which positions [b, s] hold a token that another one of its document follows."""
        follows = torch.ones_like(batch["loss_mask"], dtype=torch.bool)
        padding = batch.get("padding")
        if padding is not None:
            # Behind the last token of a sample, the label is 0 in place of a token.
            follows = ~padding & (batch["labels"] != 0)
        bounds = batch.get("cu_seqlens")
        if bounds is not None:
            ends = torch.isin(self._places(batch), bounds[1:].long() - 1)
            follows = follows & ~ends
        return follows

    def _places(self, batch: Batch) -> torch.Tensor:
        """Return the places [1, s] of packed tokens among those of all context-parallel ranks."""
        world = self.context.world
        tokens = batch["labels"].shape[1] * world.grid.cp
        bounds = batch["cu_seqlens"]
        every = context_positions(tokens, world.grid.cp, bounds, bounds.device)
        return every[world.coords["cp"]][None]

    def _source(self, batch: Batch, parts: torch.Tensor) -> torch.Tensor:
        """Return the source of each token [b, s], from those of the samples of the micro-batch."""
        shape = batch["loss_mask"].shape
        if "cu_seqlens" not in batch:
            return parts[:, None].expand(shape)
        return parts[self._places(batch) // self.context.run.data.length]

    def events(self, sums: Sequence[float], maxima: Sequence[float]) -> Iterator[dict[str, Any]]:
        """Yield `COLUMNS` by row; rows without a token are left out."""
        pairs = zip(self.names, sums[::2], sums[1::2], strict=True)
        rows = {name: [total / tokens, tokens] for name, total, tokens in pairs if tokens}
        if rows:
            yield {"of": LOSSES, "columns": COLUMNS, "rows": rows}
