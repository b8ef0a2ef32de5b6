"""Statistics of weights, gradients, updates and moments of the optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist

from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.run import RunConfig
from mtrain.mcore import api as mcore
from mtrain.mcore.state import sharding
from mtrain.mcore.state.local_params import local_params
from mtrain.mcore.state.sharding import TensorShard
from mtrain.models.gpt.torch_dist import VOCABULARY
from mtrain.models.selection import name_of, selects
from mtrain.train.loop.context import TrainContext
from mtrain.train.statistics.table import Row, Table

WEIGHTS = "weights"
GRADIENTS = "gradients"
UPDATES = "updates"
MOMENTS = "moments"
_DIGITS = re.compile(r"(\d+)")


class WeightStatistics:
    """Statistics of the selected weights that the optimizer updates, and of what belongs to each.

    Of tensors that several ranks have, one counts; of the distributed optimizer and FSDP each rank
    describes the range that it owns. Rows of a vocabulary that only pad it do not count: other
    layouts have others.
    """

    def __init__(
        self, context: TrainContext, patterns: Sequence[str], kinds: Sequence[str]
    ) -> None:
        self.context = context
        self.kinds = set(kinds)
        own = {name for name in _names(context) if selects(patterns, name)}
        self.names = of_all_stages(own)
        self._selected = set(self.names)
        self._before: list[tuple[str, torch.Tensor]] = []

    def rows(self) -> list[Row]:
        """Return the rows of a table, the same on every rank."""
        moments = _moments(self.context.run) if MOMENTS in self.kinds else ()
        kinds = [kind for kind in (WEIGHTS, GRADIENTS, UPDATES) if kind in self.kinds]
        return [(kind, name) for kind in (*kinds, *moments) for name in self.names]

    @torch.no_grad()
    def before_update(self, table: Table) -> None:
        """Add weights and gradients, and keep a copy of the weights for `after_update`."""
        state = self.context.state
        if {WEIGHTS, UPDATES} & self.kinds:
            weights = list(self._own(sharding.main_weight_shards(state.chunks, state.optimizer)))
            if WEIGHTS in self.kinds:
                _add(table, WEIGHTS, weights)
            if UPDATES in self.kinds:
                self._before = [(name, x.to(torch.float32, copy=True)) for name, x in weights]
        if GRADIENTS in self.kinds:
            shards = sharding.gradient_shards(state.chunks, state.optimizer)
            _add(table, GRADIENTS, list(self._own(shards)))

    @torch.no_grad()
    def after_update(self, table: Table) -> None:
        """Add updates and moments."""
        state = self.context.state
        if UPDATES in self.kinds:
            weights = self._own(sharding.main_weight_shards(state.chunks, state.optimizer))
            updates = [
                (name, torch.sub(after, before, out=before))
                for (name, before), (_, after) in zip(self._before, weights, strict=True)
            ]
            _add(table, UPDATES, updates)
            self._before = []
        if MOMENTS in self.kinds:
            shards = list(sharding.moment_shards(state.chunks, state.optimizer))
            for moment in dict.fromkeys(moment for moment, _ in shards):
                _add(table, moment, list(self._own(s for m, s in shards if m == moment)))

    def _own(self, shards: Iterable[TensorShard]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values of the selected shards that no other rank counts."""
        for shard in shards:
            name = name_of(shard.weight, shard.offset)
            if shard.primary and name in self._selected:
                yield name, self._without_padding(shard)

    def _without_padding(self, shard: TensorShard) -> torch.Tensor:
        model = self.context.run.model
        values = shard.tensor.reshape(-1)
        if not shard.weight.endswith(VOCABULARY) or not model.mask_padded_vocab:
            return values
        start = 0 if shard.flat is None else shard.flat[0]
        real = max(0, model.vocab_size - shard.offset[0]) * prod(shard.shape[1:])
        return values[: max(0, real - start)]


def _add(table: Table, kind: str, found: Sequence[tuple[str, torch.Tensor]]) -> None:
    table.add([(kind, name) for name, _ in found], [values for _, values in found])


def _moments(run: RunConfig) -> list[str]:
    """Return the names of all moments that the optimizer may keep of a weight."""
    spec = OPTIMIZERS[run.optim.name]
    found = dict.fromkeys(spec.states(run))
    if spec.states_by_name is not None:
        for axes in (1, 2):
            found |= dict.fromkeys(spec.states_by_name(run, "", axes))
    return list(found)


def _names(context: TrainContext) -> Iterator[str]:
    """Yield the names of the trained weights of this rank's stages."""
    for chunk in context.state.chunks:
        for param in local_params(chunk):
            if param.made.requires_grad:
                yield from (name_of(spec.key, spec.offset) for spec in param.specs)


def of_all_stages(own: set[str]) -> list[str]:
    """Return the names that any pipeline stage has, in the order of the layers; every rank calls
    it.
    """
    group = mcore.parallel_state.get_pipeline_model_parallel_group()
    gathered: list[set[str]] = [set()] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return sorted(set().union(*gathered), key=_in_order)


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key by which layer 10 comes after layer 9."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in _DIGITS.split(name)
    ]
