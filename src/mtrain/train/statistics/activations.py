"""Statistics of activations: the residual stream, outputs of attention and MLP, logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mtrain.mcore.state.local_params import unwrap
from mtrain.models.selection import OUTPUTS, selects
from mtrain.train.loop.context import TrainContext
from mtrain.train.statistics.part import Handles, recomputes
from mtrain.train.statistics.table import Row, Table
from mtrain.train.statistics.weights import of_all_stages
from mtrain.train.trace.activations import global_names

ACTIVATIONS = "activations"
LOGITS = "output_layer"


class ActivationStatistics:
    """Hooks on the selected modules, which are there only in the steps that are described.

    The tokens of a step are distributed over ranks, and each rank describes its own. What
    tensor-parallel ranks all have, as they do without sequence parallelism, one of them describes.
    """

    def __init__(self, context: TrainContext, patterns: Sequence[str]) -> None:
        self.context = context
        self._watched = [
            (name, module) for name, module in _outputs(context) if selects(patterns, name)
        ]
        self.names = of_all_stages({name for name, _ in self._watched})
        self._handles = Handles()

    def rows(self) -> list[Row]:
        """Return the rows of a table, the same on every rank."""
        return [(ACTIVATIONS, name) for name in self.names]

    def watch(self, table: Table) -> None:
        """Add the outputs of all forwards to a table, until `leave`."""
        for name, module in self._watched:
            self._handles.add(module.register_forward_hook(self._hook(table, name)))

    def leave(self) -> None:
        """Remove the hooks."""
        self._handles.remove()

    def _hook(self, table: Table, name: str) -> Any:
        def leave(module: Any, args: Any, output: Any) -> None:
            if recomputes():
                return
            own = self._own(name, output[0] if isinstance(output, tuple) else output)
            if own is not None:
                table.add([(ACTIVATIONS, name)], [own.detach()])

        return leave

    def _own(self, name: str, x: Any) -> torch.Tensor | None:
        """Return the part of an output that this rank describes; None: nothing."""
        run = self.context.run
        rank = self.context.world.coords["tp"]
        # A layer that computes the loss as well returns losses, and never has all logits.
        if not torch.is_tensor(x) or x.dim() != 3:
            return None
        if name != LOGITS:
            return x if run.parallel.sequence_parallel or rank == 0 else None
        columns = x.shape[-1]
        return x[..., : max(0, run.model.vocab_size - rank * columns)]


def _outputs(context: TrainContext) -> Iterator[tuple[str, Any]]:
    """Yield the modules of this rank whose outputs can be described, by their names."""
    for chunk in context.state.chunks:
        root = unwrap(chunk)
        names = global_names(root)
        for path, module in root.named_modules():
            name = names[path]
            # A layer without a part has an identity in its place; tied logits have no weight.
            computes = name == LOGITS or any(True for _ in module.parameters())
            if OUTPUTS.fullmatch(name) and computes:
                yield name, module
