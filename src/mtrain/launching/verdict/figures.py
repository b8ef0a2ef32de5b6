"""The figures of a resume: the bytes that each rank reads, the tensors that are cut anew, and the
memory that the plan expects. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.launching.verdict.regions import Layout, Unknown
from mtrain.plan.fits import is_small
from mtrain.plan.rank import worst_stage
from mtrain.units import GIB

MOST_REGIONS = 200_000
"""Regions that are counted for an answer within a second; of larger runs, fewer ranks are."""
WIDTHS = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Number format as a manifest names it -> bytes of one number."""

Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Reading:
    """The reads of the ranks of a run."""

    by_rank: dict[int, int]
    """Rank -> bytes of the tensors that it reads; empty where they are unknown."""
    resharded: tuple[str, ...]
    """Tensors of which some rank reads other parts than one rank wrote."""
    tensors: int
    """The tensors that are read."""
    unknown: str = ""
    """Reason why only megatron-core knows; empty where the counts are exact."""
    ranks: int = 0
    """The ranks of the run, of which `by_rank` has some where there are very many."""


@dataclass(frozen=True)
class Memory:
    """The memory of the rank that needs the most, by the plan."""

    peak: int | None
    """Bytes; None: unknown."""
    holds: int
    """Bytes of a device, or of this machine for all ranks; 0: unknown."""
    ranks: int
    """The ranks that share it."""
    on_host: bool = False
    """True for the memory of this machine, False for that of a device."""

    @property
    def fits(self) -> bool | None:
        """Return whether it fits; None: unknown."""
        if self.peak is None or not self.holds:
            return None
        return self.peak * self.ranks <= self.holds


def reading(run: RunConfig, manifest: Mapping[str, Any]) -> Reading:
    """Count the reads of a resume from a checkpoint that has every tensor."""
    tensors = manifest["tensors"]
    weights_only = bool(manifest["state"].get("weights_only"))
    ranks = run.parallel.ranks
    try:
        layout = Layout(run)
        widths = {name: WIDTHS.get(entry["dtype"], 0) for name, entry in tensors.items()}
        written = {name: _places(entry) for name, entry in tensors.items()}
        by_rank: dict[int, int] = {}
        anew: set[str] = set()
        seen: set[str] = set()
        left = MOST_REGIONS
        for rank in _spread(ranks):
            if left < 0:
                break
            total = 0
            for read in layout.reads(rank, weights_only=weights_only):
                region = read.region
                total += region.size * widths.get(read.name, 0)
                seen.add(read.name)
                place = (region.offset, region.shape, region.flat or ())
                if place not in written.get(read.name, ()):
                    anew.add(read.name)
                left -= 1
            by_rank[rank] = total
    except Unknown as error:
        return Reading({}, (), len(tensors), str(error), ranks)
    return Reading(dict(sorted(by_rank.items())), tuple(sorted(anew)), len(seen), "", ranks)


def memory(run: RunConfig, machine: Machine) -> Memory:
    """Return the planned and the available memory of a resolved run."""
    peak = None
    if is_small(run):
        try:
            peak = worst_stage(run).peak
        except ValueError:
            peak = None
    held = run.cluster.device_memory_gib
    if held is not None:
        return Memory(peak, int(held * GIB), 1)
    here = facts_of(run.cluster.device).on_host
    return Memory(peak, machine.memory_bytes if here else 0, run.parallel.ranks, on_host=here)


def _places(entry: Mapping[str, Any]) -> set[Place]:
    return {
        (tuple(piece["offset"]), tuple(piece["shape"]), tuple(piece["flat"] or ()))
        for piece in entry["pieces"]
    }


def _spread(ranks: int) -> Iterator[int]:
    """Yield every rank, the first and the last before the others."""
    yield 0
    if ranks > 1:
        yield ranks - 1
    yield from range(1, ranks - 1)


def nbytes(entry: Mapping[str, Any]) -> int:
    """Return the bytes of a tensor of a manifest."""
    return prod(entry["shape"]) * WIDTHS.get(entry["dtype"], 0)
