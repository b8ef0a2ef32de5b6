"""The host time of a layer by package, function, op and module.

Each of these instruments slows the host, each in another way, so shares count and sums exceed the
time of `host_cost.py`.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from host_cost_driver import ALLOCATION, LAUNCH, LAUNCHES, traced
from host_cost_marks import BACKWARD, FORWARD, between, observed
from host_cost_models import MICRO_BATCHES, Contender

PACKAGES = (
    # (a part of the path, package), of which the first that fits counts
    ("/host_cost", "this benchmark"),
    ("/mtrain_kernels/", "mtrain_kernels"),
    ("/mtrain/", "mtrain"),
    ("/megatron/", "megatron-core"),
    ("/transformers/", "transformers"),
    ("/triton/", "triton"),
    ("/torch/_library/", "torch._library"),
    ("/torch/_ops.py", "torch._library"),
    ("/torch/nn/modules/module.py", "nn.Module"),
    ("/torch/autograd/", "torch.autograd"),
    ("/torch/", "torch, other"),
)
Row = dict[str, Any]


def package_of(path: str, name: str) -> str:
    """Return the package of a function, by the file that defines it."""
    if path == "~":
        return "built-in functions"
    return next((package for part, package in PACKAGES if part in path), "Python's library")


class _Profiled:
    """cProfile between the marks."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile()

    def begin(self, way: str) -> None:
        """Go on profiling."""
        self.profile.enable()

    def end(self, way: str) -> None:
        """Stop profiling."""
        self.profile.disable()


def by_function(contender: Contender, steps: int) -> tuple[list[Row], list[Row], list[Row]]:
    """Return rows by package (own time), by function (own) and by function (inclusive).

    Each row has microseconds and calls of a layer and micro-batch.
    """
    profiled = _Profiled()
    with observed(contender.layers, contender.period, profiled):
        for _ in range(steps):
            contender.step()
    units = _units(contender, steps)
    packages: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    functions: list[Row] = []
    stats = pstats.Stats(profiled.profile).stats  # type: ignore[attr-defined]
    for (path, line, name), (_, calls, own, inclusive, _) in stats.items():
        package = package_of(path, name)
        packages[package][0] += own
        packages[package][1] += calls
        place = f"{Path(path).name}:{line} " if line else ""
        functions.append(
            {
                "package": package,
                "function": place + name,
                "own_us": round(1e6 * own / units, 1),
                "us": round(1e6 * inclusive / units, 1),
                "calls": round(calls / units, 1),
            }
        )
    rows = [
        {"package": name, "own_us": round(1e6 * own / units, 1), "calls": round(calls / units, 1)}
        for name, (own, calls) in packages.items()
    ]
    return (
        sorted(rows, key=lambda row: -row["own_us"]),
        sorted(functions, key=lambda row: -row["own_us"]),
        sorted(functions, key=lambda row: -row["us"]),
    )


class _Traced:
    """torch.profiler between the marks of each micro-batch."""

    def __init__(self) -> None:
        self._open: Any = None

    def begin(self, way: str) -> None:
        """Open a range of the trace."""
        import torch

        self._open = torch.profiler.record_function(SPAN + way)
        self._open.__enter__()

    def end(self, way: str) -> None:
        """Close the range."""
        self._open.__exit__(None, None, None)


NO_LAUNCH = frozenset(
    """_local_scalar_dense _reshape_alias _unsafe_view alias as_strided chunk contiguous data detach
    detach_ empty empty_like empty_strided expand expand_as flatten is_nonzero item lift_fresh
    movedim narrow new_empty new_empty_strided permute reshape reshape_as resize_ result_type select
    set_ slice split split_with_sizes squeeze t to transpose type_as unbind unflatten unsafe_split
    unsqueeze view view_as""".split()  # noqa: SIM905
)
"""Operations of torch that make or view memory, or are others' names."""
SPAN = "host_cost "
"""Begins the name of what lies between marks in a trace."""
TITLES = (
    "inclusive time by op",
    "own time by module",
    "own time by package",
    "own time by function",
    "inclusive time by function",
)
SHOWN = 20
"""Rows of a table, at most."""


def by_op(contender: Contender, steps: int) -> list[Row]:
    """Return inclusive time, calls and launches by op, those that no other op calls.

    An op is one of torch's dispatcher, an `autograd.Function`, or in the backward a node of
    autograd's graph with its hooks.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for way, event in _traced(contender, steps):
        for child in event.children:
            one = found[way, _plain(child.name)]
            one[0] += child.us
            one[1] += 1
            one[2] += _triton(child)
            one[3] += _torch(child)
    units = _units(contender, steps)
    rows = [
        {
            "op": name,
            "way": way,
            "us": round(us / units, 1),
            "calls": round(calls / units, 2),
            "triton_launches": round(triton / units, 2),
            "torch_launches": round(torchs / units, 2),
        }
        for (way, name), (us, calls, triton, torchs) in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def launches_of_torch(contender: Contender) -> dict[str, float]:
    """Return how many operations of torch a layer and micro-batch launches, by way: those that no
    other of them calls, without those of memory and views.
    """
    found = {FORWARD: 0.0, BACKWARD: 0.0}
    for way, event in _traced(contender, 1):
        found[way] += sum(_torch(child) for child in event.children)
    return {way: count / _units(contender, 1) for way, count in found.items()}


def _traced(contender: Contender, steps: int) -> Iterator[tuple[str, Any]]:
    """Yield the way and the event of each span between the marks in a trace of some steps."""
    import torch

    with (
        observed(contender.layers, contender.period, _Traced()),
        traced(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        for _ in range(steps):
            contender.step()
    # `profiler.events()` returns the same tree, but takes seconds where this takes a tenth.
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    for event in _trees((e.name(), e.start_ns(), e.duration_ns()) for e in results.events()):
        if event.name.startswith(SPAN):
            yield event.name.removeprefix(SPAN), event


@dataclass
class _Event:
    """An event of a trace, and those that it contains."""

    name: str
    begin: int
    end: int
    children: list[_Event] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Return its microseconds."""
        return (self.end - self.begin) / 1000


def _trees(found: Iterable[tuple[str, int, int]]) -> Iterator[_Event]:
    """Yield the events that no other event contains and those between marks, from names, begins and
    nanoseconds of events of one thread.
    """
    stack: list[_Event] = []
    outer: list[_Event] = []
    for name, begin, took in sorted(found, key=lambda each: (each[1], -each[2])):
        event = _Event(name, begin, begin + took)
        while stack and stack[-1].end < event.end:
            stack.pop()
        if stack:
            stack[-1].children.append(event)
        if not stack or name.startswith(SPAN):
            outer.append(event)
        stack.append(event)
    yield from outer


def _plain(name: str) -> str:
    return name.removeprefix("autograd::engine::evaluate_function: ")


def _triton(event: Any) -> int:
    """Return how many kernels of Triton an event launches."""
    own = int(event.name.startswith(LAUNCH))
    return own + sum(_triton(child) for child in event.children)


def _torch(event: Any) -> int:
    """Return how many operations of torch an event launches."""
    if event.name == ALLOCATION:
        return 0
    inside = sum(_torch(child) for child in event.children)
    if inside or not event.name.startswith("aten::"):
        return inside
    return int(event.name.removeprefix("aten::") not in NO_LAUNCH)


@dataclass
class _Part:
    """The time, launches and calls of a module."""

    us: float = 0.0
    launches: int = 0
    calls: int = 0


class _Parts:
    """Own time of modules: what is called or arrived at last owns the time until the next."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], _Part] = defaultdict(_Part)
        self.way: str | None = None
        self._stack: list[str] = []
        self._since = (0.0, 0)

    def begin(self, way: str) -> None:
        """Start with the time of no module."""
        self.way = way
        self._stack = ["between modules"]
        self._since = (time.thread_time(), LAUNCHES.total)

    def end(self, way: str) -> None:
        """Give the rest of the time to the last module."""
        self._settle()
        self.way = None

    def _settle(self) -> None:
        now = time.thread_time()
        if self.way is not None:
            part = self.found[self.way, self._stack[-1]]
            part.us += 1e6 * (now - self._since[0])
            part.launches += LAUNCHES.total - self._since[1]
        self._since = (time.thread_time(), LAUNCHES.total)

    def enter(self, name: str) -> None:
        """Note that a module is called."""
        if self.way == FORWARD:
            self._settle()
            self._stack.append(name)
            self.found[FORWARD, name].calls += 1

    def leave(self) -> None:
        """Note that a module returns."""
        if self.way == FORWARD:
            self._settle()
            self._stack.pop()

    def arrive(self, name: str) -> None:
        """Note that the gradient of a module's output is there."""
        if self.way == BACKWARD:
            self._settle()
            self._stack = [name]
            self.found[BACKWARD, name].calls += 1


def by_module(contender: Contender, steps: int) -> list[Row]:
    """Return own time, calls and launches by module of a layer.

    The forward of a module is without the modules that it calls. Its backward is what happens
    between the arrival of its output's gradient and that of another module's.
    """
    parts = _Parts()
    with observed(contender.layers, contender.period, parts), _watched(contender, parts):
        for _ in range(steps):
            contender.step()
    units = _units(contender, steps)
    rows = [
        {
            "module": name,
            "way": way,
            "us": round(part.us / units, 1),
            "calls": round(part.calls / units, 2),
            "launches": round(part.launches / units, 2),
        }
        for (way, name), part in parts.found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


@contextmanager
def _watched(contender: Contender, parts: _Parts) -> Iterator[None]:
    """Report every module of the layers between the marks while this is open."""
    hooks = []
    for layer in between(contender.layers, contender.period):
        for name, module in layer.named_modules():
            hooks += _hooks(parts, module, name or "layer")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(parts: _Parts, module: Any, name: str) -> list[Any]:
    def enter(*_: Any) -> None:
        parts.enter(name)

    def leave(_: Any, given: Any, out: Any) -> None:
        for each in out if isinstance(out, tuple) else (out,):
            if getattr(each, "grad_fn", None) is not None:
                each.register_hook(lambda _: parts.arrive(name))
        parts.leave()

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


def _units(contender: Contender, steps: int) -> int:
    """Return how many layers of micro-batches lie between the marks of some steps."""
    return len(between(contender.layers, contender.period)) * MICRO_BATCHES * steps


def tables(contender: Contender, steps: int, *, functions: bool) -> dict[str, list[Row]]:
    """Return the first rows of the tables of a contender by their `TITLES`: by op and module, and
    with `functions` those of cProfile.
    """
    found = [by_op(contender, steps), by_module(contender, steps)]
    if functions:
        packages, own, inclusive = by_function(contender, steps)
        found += [packages, own, inclusive]
    return {title: rows[:SHOWN] for title, rows in zip(TITLES, found, strict=False)}


def as_text(name: str, title: str, rows: list[Row]) -> str:
    """Return a table in Markdown."""
    keys = list(rows[0])
    lines = [
        f"#### {name}: {title}, microseconds of a layer and micro-batch",
        "",
        "| " + " | ".join(keys) + " |",
        "|" + "---|" * len(keys),
    ]
    lines += ["| " + " | ".join(str(each) for each in row.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"
