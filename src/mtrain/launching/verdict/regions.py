"""The part of each tensor of a checkpoint that a rank of a layout reads, without torch.

megatron-core cuts a weight along one axis over tensor-parallel ranks, and both halves of a gated
layer by themselves. The distributed optimizer cuts buckets of weights into equal flat ranges; FSDP2
gives each rank some rows. `plan.states` lays out the same buckets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mtrain.ckpt.folder import MODEL
from mtrain.ckpt.pieces import Region
from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import Box, boxes_from_family
from mtrain.launching.verdict.tensors import elementwise_states, needed
from mtrain.layout.grid import RankGrid, held_stages
from mtrain.models.registry import family_of
from mtrain.models.weights import Weight
from mtrain.plan.states import bucket_size, buckets_of, stage_weights, update_of

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.linear_fc[12]\.(?:weight|bias)(\d+)$")
_GATED = re.compile(r"\.linear_fc1\.(?:weight|bias)\d*$")
TABLE = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


class Unknown(Exception):
    """Only megatron-core knows which part of a tensor a rank reads."""


@dataclass(frozen=True)
class Read:
    """A part of a tensor that a rank reads."""

    name: str
    region: Region


@dataclass(frozen=True)
class _Spec:
    """A part of a whole tensor, in the memory of one weight of a rank."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    """The element of the weight that it begins at."""

    def within(self, lo: int, hi: int) -> Region | None:
        """Return the part of it in elements [lo, hi) of the weight; None: nothing."""
        size = prod(self.shape)
        start = max(lo, self.first) - self.first
        stop = min(hi, self.first + size) - self.first
        if start >= stop:
            return None
        return Region(self.offset, self.shape, None if stop - start == size else (start, stop))


class Layout:
    """The regions of every rank of a resolved run.

    Raises:
        Unknown: its family or its way of sharding is not one of those described here.
    """

    def __init__(self, run: RunConfig) -> None:
        self.run = run
        self.grid = RankGrid.of(run)
        why = _unknown(run)
        if why:
            raise Unknown(why)
        self.boxes = boxes_from_family(run)
        self.stages = held_stages(run)
        self.shapes = needed(run, weights_only=False).shapes

    def reads(self, rank: int, *, weights_only: bool = False) -> Iterator[Read]:
        """Yield the regions of rank `rank`; with `weights_only`, those of the model."""
        at = self.grid.coords(rank)
        for held in self.stages[at["pp"]]:
            weights = stage_weights(self.run, held)
            ranges = {} if weights_only else self._ranges(weights, at)
            for weight in weights:
                box = self.boxes[self._name(weight, held, at)]
                specs = self._specs(weight, box, at)
                yield from _within(f"{MODEL}{box.key}", specs, *self._rows(weight, at))
                for lo, hi in ranges.get(weight.name, ()):
                    for state in elementwise_states(self.run, weight):
                        yield from _within(f"optim/{state}/{box.key}", specs, lo, hi)
            yield from self._buffers(held)

    def _name(self, weight: Weight, held: Stage, at: dict[str, int]) -> str:
        """Return the name of a weight of a stage in the whole model."""
        name = weight.name
        if name == OUTPUT and self.run.model.ties_output:
            return TABLE
        if match := _LAYER.match(name):
            name = f"decoder.layers.{held.layers[int(match[1])]}.{name[match.end() :]}"
        if match := _EXPERT.search(name):
            moe = self.run.model.moe
            assert moe is not None
            each = moe.num_experts // self.run.parallel.ep
            name = f"{name[: match.start(1)]}{at['ep'] * each + int(match[1])}"
        return name

    def _specs(self, weight: Weight, box: Box, at: dict[str, int]) -> list[_Spec]:
        """Return the parts of a tensor that a weight of a rank is, in the order of its memory."""
        axes = [i for i, (n, m) in enumerate(zip(weight.shape, box.shape, strict=True)) if n != m]
        if len(axes) > 1:
            raise Unknown(f"{weight.name} is cut along {len(axes)} axes")
        axis = axes[0] if axes else 0
        along = "etp" if weight.kind == "experts" else "tp"
        place = at[along] if axes else 0
        halves = 2 if self.run.model.gated and _GATED.search(weight.name) else 1
        rows = weight.shape[axis] // halves if weight.shape else 1
        whole = box.shape[axis] // halves if box.shape else 1
        out = []
        for half in range(halves):
            offset = list(box.offset)
            shape = list(weight.shape)
            if shape:
                offset[box.lead + axis] += half * whole + place * rows
                shape[axis] = rows
            spec = _Spec(tuple(offset), (1,) * box.lead + tuple(shape), half * prod(shape))
            out.append(spec)
        return out

    @cached_property
    def _shards(self) -> dict[bool, int]:
        """Return the ranks that share the state of dense weights, and of experts (True)."""
        copies = self.run.parallel.hsdp_replicas
        grid = self.grid
        return {False: max(1, grid.dp * grid.cp // copies), True: max(1, grid.edp // copies)}

    def _index(self, weight: Weight, at: dict[str, int]) -> int:
        """Return the place of a rank among the sharers of a weight's state."""
        every = at["edp"] if weight.expert else at["cp"] + self.grid.cp * at["dp"]
        return every % self._shards[weight.expert]

    def _rows(self, weight: Weight, at: dict[str, int]) -> tuple[int, int]:
        """Return the elements of a weight that a rank keeps between steps."""
        if self.run.parallel.fsdp != "fsdp2":
            return 0, weight.numel
        # as torch.chunk: each rank has the quotient rounded up, the last ones less or nothing
        rows = weight.shape[0]
        each = -(-rows // self._shards[weight.expert])
        first = min(rows, each * self._index(weight, at))
        last = min(rows, first + each)
        row = weight.numel // rows
        return first * row, last * row

    def _ranges(
        self, weights: list[Weight], at: dict[str, int]
    ) -> dict[str, list[tuple[int, int]]]:
        """Return the elements of each trained weight whose state a rank has, by name."""
        run = self.run
        trained = [weight for weight in weights if not weight.frozen]
        if not run.parallel.distributed_optimizer:
            return {weight.name: [self._rows(weight, at)] for weight in trained}
        found: dict[str, list[tuple[int, int]]] = {}
        size = bucket_size(run, self.grid, at["pp"])
        for expert, ranks in self._shards.items():
            chosen = [weight for weight in trained if weight.expert == expert]
            for bucket in buckets_of(run, chosen, ranks, size):
                share = (bucket.end - bucket.start) // ranks
                begin = bucket.start + self._index(chosen[0], at) * share
                for start, weight in bucket.weights:
                    lo = max(begin, start) - start
                    hi = min(begin + share, start + weight.numel) - start
                    if lo < hi:
                        found.setdefault(weight.name, []).append((lo, hi))
        return found

    def _buffers(self, held: Stage) -> Iterator[Read]:
        """Yield the persistent buffers of a stage, which every rank of it has whole."""
        for buffer in family_of(self.run.model).buffers(self.run.model):
            match = _LAYER.match(buffer.name)
            here = int(match[1]) in held.layers if match else bool(held.mtp)
            if here:
                box = self.boxes[buffer.name]
                yield Read(f"{MODEL}{box.key}", Region(box.offset, box.size))


def _within(name: str, specs: list[_Spec], lo: int, hi: int) -> Iterator[Read]:
    for spec in specs:
        region = spec.within(lo, hi)
        if region is not None:
            yield Read(name, region)


def _unknown(run: RunConfig) -> str:
    """Return why the regions of a run are not described here; empty if they are."""
    model = run.model
    p = run.parallel
    if model.family != "gpt" or model.linear_attention is not None:
        return "of this kind of model only megatron-core knows the parts"
    if run.peft.kind is not None:
        return "only megatron-core knows the parts of adapters"
    if p.fsdp == "megatron":
        return "megatron-core's FSDP lays out its buffers itself"
    if update_of(run) is not None:
        return "an update of whole matrices shares them out by their size"
    if model.query_groups < p.tp and model.mla is None:
        return "several ranks hold the same group of keys and values"
    return ""
