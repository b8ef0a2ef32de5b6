"""Profiles of steps: those that the configuration names, and those that `profile RUN` asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mtrain import strict_json
from mtrain.config.schema.run import RunConfig
from mtrain.errors import warn
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.interruptions import PROFILE
from mtrain.train.loop.result import StepResult
from mtrain.views.profiles import (
    CLOCK,
    FACTS,
    REQUEST,
    Request,
    facts_file,
    folder_of,
    snapshot_file,
    trace_file,
)
from mtrain.world import clocks
from mtrain.world.labels import Labels, Mark

MARKS = 8
MOST_ALLOCATIONS = 100_000
"""Events of the allocator that a snapshot has."""
LOOK_S = 1.0
"""Seconds between two looks for a request."""


class Profile(Hook):
    """Profiles in `profiles/step_N/` of the run folder.

    Rank 0 looks for a request once a second and removes it at once. The other ranks learn of it
    with the report of a step, which is added up over all ranks anyway, and read it from the store.
    """

    def __init__(self, folder: Path, run: RunConfig) -> None:
        self.folder = folder
        self.trainer = run.trainer
        self.asked: Request | None = None
        """The request that this rank knows of."""
        self.asked_for = 0
        """The requests so far, the same on every rank."""
        self.making: _Making | None = None
        self.looked = 0.0

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether a profile begins or ends after this step."""
        return self._due(step + 1) is not None or self._due(step) is not None

    def start(self, context: TrainContext) -> None:
        """Mark profiled steps in the metrics."""
        context.measures.append(_mark)

    def before_step(self, context: TrainContext) -> None:
        """Begin a profile with the step that it begins with."""
        step = context.state.step + 1
        request = self._due(step)
        if request is None or self.making is not None:
            return
        context.profiled = range(request.first, request.last + 1)
        # Clocks of the others are compared with that of rank 0.
        ranks = {0, *request.ranks}
        if context.world.rank in ranks:
            self.making = _Making(self.folder, request, context)

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """End a profile after its last step, and look for a request."""
        if self.making is not None and result.step >= self.making.request.last:
            # Forget it first: if stopping fails, `close` must not stop it again.
            making = self.making
            self.making = None
            making.finish(result.seconds["step"])
        if result.step != context.state.step:
            return
        if context.by_time.now & PROFILE:
            context.by_time.done(PROFILE)
            context.by_time.profile = False
            self._learn(context, result.step)
        elif context.world.is_rank0 and time.monotonic() - self.looked > LOOK_S:
            self.looked = time.monotonic()
            self._look(context)

    def close(self) -> None:
        """Stop a profile that an error cut off."""
        if self.making is not None:
            making = self.making
            self.making = None
            making.stop()

    def _due(self, step: int) -> Request | None:
        """Return the profile that a step belongs to; None: to no profile."""
        asked = self.asked
        if asked is not None and asked.first <= step <= asked.last:
            return asked
        keys = self.trainer
        first = keys.profile_step
        if first is None or step < first:
            return None
        if step > first and (keys.profile_every is None or (step - first) % keys.profile_every):
            return None
        return Request("", step, step, keys.profile_ranks, keys.profile_content)

    def _look(self, context: TrainContext) -> None:
        """Take the request in the run folder, if there is one; on rank 0."""
        file = self.folder / REQUEST
        if not file.is_file():
            return
        text = file.read_text(errors="replace")
        # Also a damaged one, of which each further look would warn again.
        file.unlink()
        try:
            Request.read(text, context.state.step, context.world.size)
        except (ValueError, TypeError, KeyError) as error:
            warn(f"{file}: cannot profile because the request is damaged ({error})")
            return
        context.world.store.set(f"profile/{self.asked_for}", text)
        context.by_time.profile = True

    def _learn(self, context: TrainContext, step: int) -> None:
        text = context.world.store.get(f"profile/{self.asked_for}").decode()
        self.asked_for += 1
        request = Request.read(text, step, context.world.size)
        # A profile that is cut off by the end of the run is written, too.
        last = min(request.last, self.trainer.steps)
        self.asked = Request(request.id, request.first, last, request.ranks, request.content)


class _Making:
    """A profile that is being made on this rank."""

    def __init__(self, home: Path, request: Request, context: TrainContext) -> None:
        self.request = request
        self.rank = context.world.rank
        self.folder = folder_of(home, request.first)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            facts = strict_json.dumps(asdict(request))
            (self.folder / FACTS).write_text(facts)
        world = context.world
        found = clocks.offset_ns(
            world.store, self.rank, request.ranks, f"clock/{request.first}/{request.id}"
        )
        self.facts: dict[str, Any] = {"rank": self.rank, "coords": dict(world.coords)}
        self.facts |= {"offset_ns": found and found[0], "error_ns": found and found[1]}
        self.profiler: Any = None
        self.ended: Callable[[], None] = lambda: None
        self.record: Any = None
        """The function that turns the history of the allocator on and off."""
        self.dump = world.device.dump_memory if "memory" in request.content else None
        if self.rank in request.ranks:
            self._begin(world.device.namespace)

    def _begin(self, namespace: Any) -> None:
        content = self.request.content
        if self.dump is not None:
            with suppress(Exception):  # an interface without promises
                self.record = namespace.memory._record_memory_history
                self.record(max_entries=MOST_ALLOCATIONS)
        marks: list[Callable[[str], Mark]] = []
        if set(content) - {"nsys"}:
            self.profiler = torch.profiler.profile(
                record_shapes="shapes" in content or "flops" in content,
                profile_memory="memory" in content,
                with_stack="stacks" in content,
                with_flops="flops" in content,
            )
            self.profiler.start()
            marks.append(torch.profiler.record_function)
            # The moment on both clocks, that of the trace and that of the machine.
            self.facts |= _marked()
        if "nsys" in content and hasattr(namespace, "nvtx"):
            marks.append(namespace.nvtx.range)
            namespace.cudart().cudaProfilerStart()
            self.ended = namespace.cudart().cudaProfilerStop
        Labels.now = Labels(lambda name: _Together([mark(name) for mark in marks]))

    def stop(self) -> None:
        """Stop without a trace."""
        Labels.now = None
        self.ended()
        if self.record is not None:
            with suppress(Exception):
                self.record(enabled=None)
        if self.profiler is not None:
            profiler = self.profiler
            self.profiler = None
            profiler.stop()

    def finish(self, step_s: float) -> None:
        """Stop, and write the trace and what is known of it; the last step took `step_s`."""
        profiler = self.profiler
        if self.dump is not None and self.rank in self.request.ranks:
            with suppress(Exception):
                self.dump(str(snapshot_file(self.folder, self.rank)))
        self.stop()
        if self.rank not in self.request.ranks:
            return
        facts = strict_json.dumps(self.facts | {"step_s": step_s})
        facts_file(self.folder, self.rank).write_text(facts)
        if profiler is not None:
            trace = trace_file(self.folder, self.rank)
            # A trace that exists is whole.
            draft = trace.with_name(f".{trace.name}")
            profiler.export_chrome_trace(str(draft))
            draft.replace(trace)


def _marked() -> dict[str, int]:
    """Mark a moment in the trace; return its number and its time on this machine's clock.

    The shortest of several marks counts: a process may lose its core in one.
    """
    found = []
    for number in range(MARKS):
        begun = clocks.now_ns()
        with torch.profiler.record_function(f"{CLOCK} {number}"):
            pass
        ended = clocks.now_ns()
        found.append((ended - begun, number, (begun + ended) // 2))
    _, mark, clock_ns = min(found)
    return {"mark": mark, "clock_ns": clock_ns}


class _Together(AbstractContextManager[None]):
    """Several ranges that begin and end together."""

    def __init__(self, marks: list[Mark]) -> None:
        self.marks = marks
        self.stack = ExitStack()

    def __enter__(self) -> None:
        for mark in self.marks:
            self.stack.enter_context(mark)

    def __exit__(self, *error: object) -> None:
        self.stack.close()


def _mark(context: TrainContext, result: StepResult) -> dict[str, Any]:
    return {"profiled": True} if result.step in context.profiled else {}
