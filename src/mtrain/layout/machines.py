"""The ranks of each machine, where machines that hold the same stages are neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.layout.grid import RankGrid


@dataclass(frozen=True)
class Machines:
    """Neighbours whose ranks are of the same pipeline stages."""

    first: int
    """Of the machines."""
    number: int
    stages: tuple[int, ...]
    """Pipeline stage of each of its ranks."""


def machines(grid: RankGrid, devices: int) -> list[Machines]:
    """Return the machines of a world that have so many devices each; ranks fill one machine after
    the other.
    """
    each = grid.world // grid.pp  # ranks are numbered by pipeline stage last
    out: list[Machines] = []
    for machine, begin in enumerate(range(0, grid.world, devices)):
        stages = tuple(rank // each for rank in range(begin, min(begin + devices, grid.world)))
        if out and out[-1].stages == stages:
            out[-1] = Machines(out[-1].first, out[-1].number + 1, stages)
        else:
            out.append(Machines(machine, 1, stages))
    return out
