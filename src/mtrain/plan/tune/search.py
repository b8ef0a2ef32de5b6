"""The best layouts of a run: best first, by what each takes at least, until no other can be better.

A layout is chosen axis by axis. What is chosen so far bounds the time from below, so what is
planned in full is little more than what is shown, and nothing better is passed over.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

from mtrain.config.messages.problem import value_at
from mtrain.config.rules import Answers, findings
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.plan.fits import SPARE
from mtrain.plan.rank import StageMemory, worst_stage
from mtrain.plan.time import StepTime, step_time
from mtrain.plan.tune.costs import Costs, Flow
from mtrain.plan.tune.space import AXES, Change, Space, changed

# Families that the page lists.
BEST = 10
# The search ends where the lower bound of all that is left is so many times the fastest step.
FAR = 1.5
# Layouts of one family cut the model alike. They differ in micro-batch, virtual stages,
# recomputation and sharding of the state, mostly by less than the error of the planned time.
FAMILY = ("parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep")
# The full plan of a layout may be so far below the sum of its parts, which bounds it.
SLACK = 0.995
STATE = tuple(AXES).index("state")
Resolve = Callable[[UnresolvedRun], RunConfig]


@dataclass(frozen=True)
class Layout:
    """One that keeps all rules, planned."""

    run: RunConfig
    """Resolved."""
    change: Mapping[str, Any]
    """The keys that were chosen."""
    time: StepTime
    memory: StageMemory
    """Memory of the rank that needs the most."""

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.time.seconds

    @property
    def words(self) -> str:
        """Return the layout in one line."""
        p = self.run.parallel
        again = self.run.parallel.recompute
        axes = [f"{k}{n}" for k in ("tp", "pp", "vpp", "cp", "ep") if (n := getattr(p, k)) > 1]
        axes += [f"etp{p.etp}"] if p.etp not in (None, p.tp) else []
        out = ["".join([*axes, f"dp{p.dp}"]), f"micro-batch {self.run.trainer.micro}"]
        out += ["no sequence parallelism"] if p.tp > 1 and not p.sequence_parallel else []
        out += [p.fsdp] if p.fsdp != "none" else []
        if p.fsdp == "none" and not p.distributed_optimizer and p.dp * p.cp > 1:
            out.append("whole optimizer")
        if again.granularity == "selective":
            out.append(f"recompute {'+'.join(again.modules or ('core_attn',))}")
        elif again.granularity == "full":
            which = str(again.num_layers) if again.method == "block" else "all"
            out.append(f"recompute {which} layers")
        out += ["offloaded optimizer"] if self.run.optim.cpu_offload else []
        out += ["uneven stages"] if p.layers_per_stage is not None else []
        return ", ".join(out)


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: tuple[Layout, ...]
    """The fastest first."""
    planned: int
    """Layouts that were planned in full."""
    looked_at: int
    """Layouts and beginnings of layouts whose cost was bounded."""
    wrong: bool = False
    """A rule is broken that no layout decides."""
    nearest: Layout | None = None
    """The layout that needs the least memory of those examined, if nothing fits."""


@dataclass(frozen=True)
class Task:
    """The space and the goal of a search."""

    raw: UnresolvedRun
    """The run before it was resolved, with only those of the searched keys set that were set."""
    resolve: Resolve
    said: Mapping[str, Any]
    holds: int | None
    """Bytes of a device; None: nobody knows."""
    answers: Answers = field(default_factory=Answers)
    """Findings of the rules that read files, which hardly a layout changes."""

    def room(self) -> float:
        """Return the bytes that a layout may use."""
        return inf if self.holds is None else self.holds * (1 - SPARE)

    def planned(self, change: Mapping[str, Any]) -> Layout | None:
        """Return the planned layout of a change; None where a rule refuses it."""
        run = self.resolve(changed(self.raw, change))
        if any(found.severity == "error" for found in findings(run, self.answers)):
            return None
        return Layout(run, change, step_time(run), worst_stage(run))


class _Ways:
    """The ways to recompute in a pipeline, the fastest first; each is counted when it is first
    needed.
    """

    def __init__(self, costs: Costs, run: RunConfig, changes: tuple[Change, ...]) -> None:
        self.changes = changes
        self._costs = costs
        self._run = run
        self._flows: dict[int, Flow] = {}

    def flow(self, number: int) -> Flow:
        """Return the flow of micro-batches, with the way of that number."""
        if number not in self._flows:
            self._flows[number] = self._costs.flow(changed(self._run, self.changes[number]))
        return self._flows[number]


@dataclass(eq=False)
class _Node:
    """A layout as far as it is chosen."""

    before: RunConfig
    """The run with all choices before `more`."""
    chosen: Change
    more: Change
    """The last choice."""
    axis: int
    """Number of axes that are chosen."""
    bounded: bool = False
    """True for a pipeline that rules accept, and whose bound is that of its own stages."""
    ways: _Ways | None = None
    way: int = 0
    """Index of the next of them to try; those before it did not fit."""
    planned: Layout | None = None

    @cached_property
    def run(self) -> RunConfig:
        """Return the run with all that is chosen."""
        return changed(self.before, self.more)

    @property
    def change(self) -> Change:
        """Return the changes of all that is chosen."""
        return {**self.chosen, **self.more}


class Search:
    """One search."""

    def __init__(self, task: Task, run: RunConfig) -> None:
        self.task = task
        self.costs = Costs(run)
        self.space = Space(run, task.said, self.costs.ends)
        self.looked_at = self.planned = 0
        self.heap: list[tuple[float, int, _Node]] = []
        self._evens: dict[object, tuple[Flow, float]] = {}
        self._families: set[tuple[Any, ...]] = set()
        """Those whose best layout is known."""
        self._standing: dict[tuple[object, ...], list[Change]] = {}
        """Of weights sharded so, over pipelines of so many ranks: how the state may be sharded."""
        self.least: tuple[float, dict[str, Any]] | None = None
        """The fewest bytes of what did not fit, and of which layout."""

    def best(self, number: int = BEST) -> Found:
        """Return the fastest layouts that fit, one of each family; where every key of a family is
        set, all that differ in more than recomputation.
        """
        if not self.space.wrong:
            # Bounds are those of the largest micro-batch, whose products are the fastest.
            micro = next(iter(self.space.options("micro", self.space.run)), {})
            self._push(0.0, _Node(changed(self.space.run, micro), {}, {}, 0))
        best: list[Layout] = []
        while (
            self.heap
            and len(best) < number
            and not (best and self.heap[0][0] > FAR * best[0].seconds)
        ):
            node = heapq.heappop(self.heap)[2]
            if node.axis >= STATE and self._family(node.run) in self._families:
                continue
            if node.planned is None:
                self._go_on(node)
            elif not any(_same(node.planned, other) for other in best):
                best.append(node.planned)
                self._families |= {self._family(node.run)} - {()}
        nearest = None
        if not best and self.least is not None:
            nearest = self.task.planned(self.least[1])
        # Bounds may be slightly off, so the order may be, too.
        best.sort(key=lambda layout: layout.seconds)
        return Found(tuple(best), self.planned, self.looked_at, self.space.wrong, nearest)

    def _family(self, run: RunConfig) -> tuple[Any, ...]:
        """Return a key of how the model is cut; empty where no such choice is left, and every
        layout is a family of its own.
        """
        degrees = {key: value_at(run, key) for key in FAMILY}
        said = self.task.said.keys() | ({"parallel.ep"} if run.model.moe is None else set())
        return () if said >= degrees.keys() else tuple(degrees.values())

    def _push(self, seconds: float, node: _Node) -> None:
        self.looked_at += 1
        heapq.heappush(self.heap, (seconds, self.looked_at, node))

    def _push_bound(self, seconds: float, node: _Node) -> None:
        # The seconds between steps are exact. Without them in the bound, the layouts of a small
        # model, whose steps hardly differ, would all be planned in full.
        self._push(SLACK * seconds + self.costs.between, node)

    def _go_on(self, node: _Node) -> None:
        """Choose the next axis, or plan a complete choice."""
        if node.axis == len(AXES):
            self._plan(node)
        elif node.axis == STATE:
            (self._choose_state if node.bounded else self._bound)(node)
        else:
            axis = tuple(AXES)[node.axis]
            for more in self.space.options(axis, node.run):
                child = _Node(node.run, node.change, more, node.axis + 1)
                if axis == "pipeline":
                    self._push_bound(
                        self._even(node.run, more["parallel.pp"], more["parallel.vpp"]), child
                    )
                elif not self.space.broken(axis, child.run):
                    bound = self._begun if axis == "micro" else self.costs.ideal
                    self._push_bound(bound(child.run), child)

    def _begun(self, run: RunConfig) -> float:
        """Return a lower bound of the seconds of a step, in any pipeline."""
        return min(
            (self._even(run, pp, max(vpp)) for pp, vpp in self.space.pipelines(run)), default=inf
        )

    def _even(self, run: RunConfig, pp: int, vpp: int) -> float:
        """Return a lower bound of the seconds of a step in any pipeline of `pp` ranks with so many
        virtual stages.
        """
        key = self.costs.key(run), pp
        if key not in self._evens:
            flow = self.costs.even(run, pp)
            self._evens[key] = flow, self._once(changed(run, {"parallel.pp": pp}), flow)
        flow, once = self._evens[key]
        return flow.seconds + flow.micro * (pp - 1) / vpp + once

    def _once(self, run: RunConfig, flow: Flow) -> float:
        """Return the seconds of the state where it is gathered for each micro-batch or is in host
        memory, because it does not fit otherwise.
        """
        p = run.parallel
        # There is no such grid, which a rule reports.
        if p.ranks % (p.tp * p.cp * p.pp) or p.ranks % ((p.etp or p.tp) * p.ep * p.pp):
            return inf
        key = p.tp, p.sequence_parallel, p.ep, p.etp, p.pp
        if key not in self._standing:
            self._standing[key] = [state for state, _ in self._fitting(run, flow)]
        states = self._standing[key]
        plain = {"parallel.fsdp": "none", "optim.cpu_offload": 0.0}
        if any(plain.items() <= state.items() for state in states):
            return 0.0
        return min((self.costs.once(changed(run, state), flow) for state in states), default=inf)

    def _fitting(self, run: RunConfig, flow: Flow) -> Iterator[tuple[Change, RunConfig]]:
        """Yield the ways to shard the state that may fit with some saved tensors on top of them."""
        for state in self.space.options("state", run):
            sharded = changed(run, state)
            if self._fits(self.costs.standing(sharded, flow)):
                yield state, sharded

    def _bound(self, node: _Node) -> None:
        """Push a pipeline again, with the time of its own stages and the least that a fitting state
        takes once a step; after all others where no state fits.
        """
        if self.space.broken("pipeline", node.run):
            return
        flow = self.costs.flow(node.run)
        node.bounded = True
        once = min(
            (self.costs.once(run, flow) for _, run in self._fitting(node.run, flow)), default=inf
        )
        self._push_bound(flow.seconds + once, node)

    def _choose_state(self, node: _Node) -> None:
        """Push each way to shard the state, with the recomputation that makes it fit."""
        ways = _Ways(self.costs, node.run, self._ways(node.run))
        last = len(ways.changes) - 1
        most = ways.flow(0)
        least = ways.flow(last)
        enough = set[object]()
        for state in self.space.options("state", node.run):
            kind = state["parallel.fsdp"], state["parallel.distributed_optimizer"]
            # It fits without an offload, which would only be slower.
            if kind in enough:
                continue
            child = _Node(node.run, node.change, state, len(AXES), ways=ways)
            if not self._fits(self.costs.bytes(child.run, most)):
                size = self.costs.bytes(child.run, least)
                self._note(size, {**child.change, **ways.changes[last]})
                if self._fits(size):
                    self._push_next(child)
                continue
            enough |= set() if state["optim.cpu_offload"] else {kind}
            self._push_bound(self.costs.seconds(changed(child.run, ways.changes[0])), child)

    def _ways(self, run: RunConfig) -> tuple[Change, ...]:
        """Return the ways to recompute: a slower one saves less memory for the backward."""
        rows: list[tuple[float, float, Change]] = []
        p = run.parallel
        layers = run.model.num_layers
        ways = list(self.space.options("recompute", run))
        for way, (seconds, size) in zip(ways, self.costs.taken(run, ways), strict=True):
            cut = way["parallel.recompute.num_layers"]
            if rows and way["parallel.recompute.method"] == "block" and cut:
                share = min(1.0, cut * p.pp * p.vpp / layers)
                seconds, size = (
                    a + share * (b - a) for a, b in zip(rows[0][:2], (seconds, size), strict=True)
                )
            rows.append((seconds, size, way))
        out: list[tuple[float, float, Change]] = []
        for row in sorted(rows, key=lambda row: row[:2]):
            if not out or row[1] < out[-1][1]:
                out.append(row)
        return tuple(way for *_, way in out)

    def _push_next(self, node: _Node) -> None:
        """Push the next way to recompute: the fastest that fits by the counted pieces."""
        ways = node.ways
        assert ways is not None
        for number in range(node.way + 1, len(ways.changes)):
            if self._fits(self.costs.bytes(node.run, ways.flow(number))):
                ahead = _Node(node.before, node.chosen, node.more, len(AXES), ways=ways, way=number)
                self._push_bound(self.costs.seconds(changed(node.run, ways.changes[number])), ahead)
                return

    def _fits(self, size: float) -> bool:
        return SLACK * size <= self.task.room()

    def _note(self, size: float, change: Mapping[str, Any]) -> None:
        if self.least is None or size < self.least[0]:
            self.least = size, dict(change)

    def _plan(self, node: _Node) -> None:
        """Plan the layout in full; where it does not fit after all, the next way to recompute
        follows.
        """
        self.planned += 1
        assert node.ways is not None
        change = {**node.change, **node.ways.changes[node.way]}
        layout = self.task.planned(change)
        if layout is not None and layout.memory.peak <= self.task.room():
            self._push(layout.seconds, _Node(node.run, change, {}, node.axis, planned=layout))
            return
        if layout is not None:
            self._note(layout.memory.peak, change)
        self._push_next(node)


def _same(one: Layout, other: Layout) -> bool:
    """Return whether two layouts are equal to the plan: as fast, with as much memory, on the same
    grid.
    """
    close = abs(one.seconds / other.seconds - 1) < 1e-9 and one.memory.peak == other.memory.peak
    a = one.run.parallel
    b = other.run.parallel
    return close and all(
        getattr(a, k) == getattr(b, k) for k in ("tp", "pp", "vpp", "cp", "ep", "etp")
    )
