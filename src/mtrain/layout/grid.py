"""The rank grid: every process group of a layout as lists of ranks, for the dense and the expert
view, and the transformer layers of each pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from mtrain.config.resolve.stages import Stage, stages
from mtrain.config.schema.run import RunConfig

DENSE_ORDER = ("tp", "cp", "dp", "pp")
EXPERT_ORDER = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class RankGrid:
    """Ranks of a layout, the first axis varying fastest: dense `tp cp dp pp`, expert `etp ep edp
    pp`.

    Both views number the same ranks; a pipeline stage holds the same ranks in both.

    Raises:
        ValueError: the degrees do not divide `world`.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name in ("world", "tp", "cp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.world % (self.tp * self.cp * self.pp):
            raise ValueError(
                f"{self.world} ranks are no multiple of tp {self.tp} * cp {self.cp} * pp {self.pp}"
            )
        if self.world % (self.etp * self.ep * self.pp):
            raise ValueError(
                f"{self.world} ranks are no multiple of etp {self.etp} * ep {self.ep} * pp"
                f" {self.pp}"
            )

    @classmethod
    def of(cls, run: RunConfig) -> RankGrid:
        """Return the grid of a configuration."""
        p = run.parallel
        return cls(p.ranks, p.tp, p.cp, p.pp, p.ep, p.etp or p.tp)

    @property
    def dp(self) -> int:
        """Return the data-parallel size of the dense layers."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def model_ranks(self) -> int:
        """Return the ranks that hold one copy of the model."""
        return self.tp * self.cp * self.pp

    @property
    def edp(self) -> int:
        """Return the data-parallel size of the experts."""
        return self.world // (self.etp * self.ep * self.pp)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the size of every axis of both views."""
        return {
            "tp": self.tp,
            "cp": self.cp,
            "dp": self.dp,
            "pp": self.pp,
            "etp": self.etp,
            "ep": self.ep,
            "edp": self.edp,
        }

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups whose members differ only along `axes`; every rank is in exactly one.

        The axes are of one view: some of `tp cp dp pp`, or some of `etp ep edp pp`.
        """
        # `pp` by itself is in both views, and its groups are the same in both.
        order = DENSE_ORDER if set(axes) <= set(DENSE_ORDER) else EXPERT_ORDER
        unknown = set(axes) - set(order)
        if unknown or not axes:
            raise ValueError(f"axes {axes} are not all of {DENSE_ORDER} or all of {EXPERT_ORDER}")
        strides = self._strides(order)
        inside = [a for a in order if a in axes]
        outside = [a for a in order if a not in axes]
        return [
            [base + offset for offset in self._offsets(inside, strides)]
            for base in self._offsets(outside, strides)
        ]

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """Return the group along `axes` that holds `rank`."""
        return next(group for group in self.groups(*axes) if rank in group)

    def coords(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis of both views."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world}")
        out: dict[str, int] = {}
        for order in (DENSE_ORDER, EXPERT_ORDER):
            rest = rank
            for axis in order:
                rest, out[axis] = divmod(rest, self.sizes[axis])
        return out

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at a position of the dense view."""
        # The first axis varies fastest: tensor-parallel neighbours share a machine and its fast
        # links.
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def embedding_groups(self, stages: Sequence[int] = (0, -1)) -> list[list[int]]:
        """Return the ranks that hold word embeddings: of each pipeline those at `stages`, by
        default the first and the last.
        """
        return [sorted({ranks[stage] for stage in stages}) for ranks in self.groups("pp")]

    def _strides(self, order: Iterable[str]) -> dict[str, int]:
        order = tuple(order)
        return {axis: prod(self.sizes[a] for a in order[:i]) for i, axis in enumerate(order)}

    def _offsets(self, axes: list[str], strides: dict[str, int]) -> list[int]:
        ranges = [range(self.sizes[a]) for a in reversed(axes)]
        steps = [strides[a] for a in reversed(axes)]
        return [sum(i * s for i, s in zip(index, steps, strict=True)) for index in product(*ranges)]

    def __str__(self) -> str:
        names = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "dp": self.dp}
        return " ".join(f"{k}{v}" for k, v in names.items() if v > 1) or "one rank"


@dataclass(frozen=True)
class Machines:
    """Consecutive machines whose ranks belong to the same pipeline stages."""

    first: int
    """Number of the first machine."""
    number: int
    stages: tuple[int, ...]
    """Pipeline stage of each of its ranks."""


def machines(grid: RankGrid, devices: int) -> list[Machines]:
    """Group the machines of a world, filled in rank order with `devices` ranks each, by stages."""
    each = grid.world // grid.pp  # ranks are numbered by pipeline stage last
    out: list[Machines] = []
    for machine, begin in enumerate(range(0, grid.world, devices)):
        stages = tuple(rank // each for rank in range(begin, min(begin + devices, grid.world)))
        if out and out[-1].stages == stages:
            out[-1] = Machines(out[-1].first, out[-1].number + 1, stages)
        else:
            out.append(Machines(machine, 1, stages))
    return out


def owners(works: Sequence[int], ranks: int) -> list[int]:
    """Assign each piece of work to a rank: the longest first, to the rank with the least so far."""
    loads = [0] * ranks
    found = [0] * len(works)
    # The sort is stable, so all ranks come to the same assignment.
    for place in sorted(range(len(works)), key=lambda i: -works[i]):
        found[place] = loads.index(min(loads))
        loads[found[place]] += works[place]
    return found


def embedding_stages(run: RunConfig) -> list[int]:
    """Return the pipeline ranks that share the gradient of the word embedding, in order.

    In megatron-core these are the first and the last. If multi-token prediction is in between, its
    rank looks words up, and the last takes part only if its output layer is tied to the embedding.
    """
    p = run.parallel
    predicting = p.pp - 1
    if p.pipeline_layout is not None:  # elsewhere MTP layers are in the last stage
        predicting = next(
            (i % p.pp for i, stage in enumerate(stages(run)) if stage.mtp), predicting
        )
    last = {p.pp - 1} if run.model.ties_output or predicting == p.pp - 1 else set()
    return sorted({0, predicting} | last)


def held_stages(run: RunConfig) -> list[list[Stage]]:
    """Return the stages of each rank, `out[pp_rank][vpp_index]`; with `vpp` > 1 every pp-th."""
    every = stages(run)
    p = run.parallel
    return [[every[v * p.pp + s] for v in range(p.vpp)] for s in range(p.pp)]
