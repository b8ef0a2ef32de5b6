"""Compilation of a run's kernels while its ranks start, in processes of their own.

The list of kernels is the record of an earlier run like this one; without a record, it comes from a
step on tensors without memory (`mtrain.train.trace.launches`). The processes are niced, call no
driver and end with the one that started them. A kernel that they do not compile is compiled at its
launch.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain_kernels.compilations import Launch

from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment
from mtrain.launching.child_process import ChildProcess
from mtrain.launching.environment import Place, apply, environment
from mtrain.layout.grid import RankGrid
from mtrain.processes import die_with
from mtrain.train import warm_cache

MOST_PROCESSES = 32
NICE = 10
_number = itertools.count()


@dataclass
class Warming:
    """The compilation ahead of the launches of a run's ranks on this machine."""

    run: RunConfig
    first: int = 0
    """The first rank of this machine."""
    count: int = 1
    """Ranks on this machine."""
    apart: bool = False
    """Whether this process holds connections that a forked process would keep open."""
    report: Path | None = field(default=None, init=False)
    """The file of the report, once something was begun."""
    child: ChildProcess | None = field(default=None, init=False)

    def begin(self, *, prepared: bool) -> None:
        """Begin, unless that was done, the run has no kernels to compile, or the list of them needs
        data that is not `prepared` yet.
        """
        if self.report is not None or not _compiles(self.run):
            return
        place = Place.here(self.count)
        given = dict(os.environ)
        apply(environment(self.run, place, given), given)
        known = known_launches(self.run, self.stages(), given)
        if known is None and not prepared and self.run.data.kind != "mock":
            return
        name = f"warmed-{os.getpid()}-{next(_number)}.json"
        self.report = place.scratch / name
        cache = warm_cache.cache_folder(given)
        if known is not None and all(launch.cached(cache) for launch in known):
            facts = {
                "list": "record",
                "kernels": len(known),
                "processes": 0,
                "compiled": 0,
                "cached": len(known),
                "ended": True,
            }
            warm_cache.tell(self.report, facts)
        else:
            ranks = {str(stage): rank for stage, rank in self.stages().items()}
            arguments = {"stages": ranks, "count": self.count, "report": str(self.report)}
            with suppress(BadEnvironment):  # every kernel is compiled at its launch
                self.child = ChildProcess("kernels", self.run, executed=self.apart, **arguments)
        os.environ[warm_cache.VARIABLE] = str(self.report)

    def stages(self) -> dict[int, int]:
        """Return the pipeline stages of this machine, and a rank of each."""
        grid = RankGrid.of(self.run)
        ranks = range(self.first, self.first + self.count)
        return {grid.coords(rank)["pp"]: rank for rank in reversed(ranks)}

    def close(self) -> None:
        """End what still runs, and forget the report."""
        if self.child is not None:
            self.child.abandon()
        if self.report is not None:
            os.environ.pop(warm_cache.VARIABLE, None)
            self.report.unlink(missing_ok=True)


def known_launches(
    run: RunConfig, stages: Mapping[int, int], given: Mapping[str, str]
) -> list[Launch] | None:
    """Return the recorded launches of pipeline stages, without repetitions; None if a record is
    missing or damaged. `given` is the environment of the ranks.
    """
    found: dict[tuple[str, str], Launch] = {}
    for stage in stages:
        record = warm_cache.read(warm_cache.record_file(run, stage, given))
        if record is None:
            return None
        found |= {(one.kernel, one.data): one for one in record}
    return list(found.values())


def compile_kernels(run: RunConfig, stages: Mapping[str, int], count: int, report: str) -> None:
    """Compile what the launches of pipeline stages need, in this process and its children, and
    write a report.

    `stages` has a rank of each stage; `count` ranks share this machine.
    """
    began = time.monotonic()
    os.nice(NICE)
    # Libraries greet at their import, and the compiler prints what it does not like.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    os.dup2(silence, sys.stderr.fileno())
    apply(environment(run, Place.here(count), os.environ), os.environ)
    # Neither threads, which no process survives that is forked, nor a driver.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        facts = _compiled(
            run, {int(stage): rank for stage, rank in stages.items()}, count, Path(report)
        )
    except Exception as error:  # every kernel is compiled at its launch
        facts = {"error": f"{type(error).__name__}: {error}"}
    seconds = round(time.monotonic() - began, 3)
    warm_cache.tell(Path(report), {**facts, "ended": True, "seconds": seconds})


def _compiled(run: RunConfig, stages: dict[int, int], count: int, report: Path) -> dict[str, Any]:
    from mtrain_kernels.compilations import compile_ahead

    facts: dict[str, Any] = {"list": "record"}
    launches = known_launches(run, stages, os.environ)
    if launches is None:
        launches, why = _listed(run, list(stages.values()))
        facts = {"list": "shapes", "incomplete": why} if why else {"list": "shapes"}
    processes = min(MOST_PROCESSES, len(launches), max(1, Place.here(count).cores - count))
    facts |= {"kernels": len(launches), "processes": processes}
    warm_cache.tell(report, {**facts, "ended": False})
    parent = os.getpid()
    assert run.cluster.sm is not None
    return facts | compile_ahead(launches, run.cluster.sm, processes, lambda: die_with(parent))


def _listed(run: RunConfig, ranks: list[int]) -> tuple[list[Launch], str]:
    from mtrain import mcore as adapter
    from mtrain.config.machine.devices import CPU
    from mtrain.devices import registry

    adapter.install(registry.get(CPU.name))
    import torch

    from mtrain.assembly.kernel_variants import use_named
    from mtrain.train.trace.launches import launches_of

    torch.use_deterministic_algorithms(run.trainer.deterministic)
    use_named(run)
    assert run.cluster.sm is not None
    return launches_of(run, ranks, run.cluster.sm)


def _compiles(run: RunConfig) -> bool:
    """Return whether kernels of a run are compiled by Triton for a known generation of GPUs."""
    facts = facts_of(run.cluster.device)
    if not facts.triton or facts.on_host or run.cluster.sm is None:
        return False
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return not interpreted and find_spec("triton") is not None
