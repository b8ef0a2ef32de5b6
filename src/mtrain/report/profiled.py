"""The last profile of a run folder: the parts of its step on each rank, and the schedule of its
pipeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mtrain.errors import CorruptData
from mtrain.plan.timeline import Block, Timeline
from mtrain.views.profiles import (
    DEVICE,
    FACTS,
    FOLDER,
    Piece,
    Profiled,
    measure,
    pieces,
    trace_file,
    traces,
)

MOST_TRACES = 64 << 20
"""Bytes of compressed traces that a page reads; of a larger profile it says nothing."""


@dataclass(frozen=True)
class Profile:
    """A profile whose ranks are measured."""

    folder: Path
    step: int
    """The step whose parts are measured: its last one."""
    ranks: Sequence[Profiled]

    @property
    def on_device(self) -> bool:
        """Return whether it has the kernels of a device."""
        return any(event.get("cat") in DEVICE for one in self.ranks for event in one.events)

    @cached_property
    def stages(self) -> dict[int, list[Profiled]]:
        """Return the ranks by pipeline stage."""
        found: dict[int, list[Profiled]] = {}
        for one in self.ranks:
            found.setdefault(one.coords.get("pp", 0), []).append(one)
        return dict(sorted(found.items()))

    @cached_property
    def schedule(self) -> Timeline | None:
        """Return the forwards and backwards of the first rank of each stage, on one clock, in
        seconds; None: not all are known. The host launches those of a device earlier.
        """
        found = [pieces(ranks[0].events) for ranks in self.stages.values()]
        micro = {sum(piece.forward for piece in one) for one in found}
        if self.on_device or len(micro) != 1 or {len(one) for one in found} != {2 * max(micro)}:
            return None
        first = min(one[0].begin for one in found)
        blocks = tuple(tuple(_blocks(stage, one, first)) for stage, one in enumerate(found))
        return Timeline(blocks, max(micro), max(micro))

    def mean(self, *parts: str) -> float:
        """Return the seconds of some parts together, the mean of the ranks."""
        spent = sum(one.parts[part] for one in self.ranks for part in parts)
        return spent / len(self.ranks) / 1e6


def _blocks(stage: int, found: Sequence[Piece], first: float) -> Iterator[Block]:
    """Number the forwards and the backwards of a stage."""
    seen = {True: 0, False: 0}
    for piece in found:
        number = seen[piece.forward]
        yield Block(stage, 0, number, piece.forward, piece.begin - first, piece.end - first)
        seen[piece.forward] += 1


def last_profile(home: Path) -> Profile | None:
    """Return the last whole profile that can be read; None: there is none, or it is too large."""
    for file in sorted((home / FOLDER).glob(f"step_*/{FACTS}"), reverse=True):
        folder = file.parent
        with suppress(OSError, CorruptData, ValueError, TypeError, KeyError, AttributeError):
            facts = json.loads(file.read_text())
            sizes = [trace_file(folder, rank).stat().st_size for rank in facts["ranks"]]
            if not sizes or sum(sizes) > MOST_TRACES:
                continue
            ranks = traces(folder)
            measure(ranks)
            return Profile(folder, int(facts["last"]), ranks)
    return None
