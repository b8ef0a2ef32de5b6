"""Compilation of a run's kernels while its ranks start, in processes of their own.

The list of kernels is the record of an earlier run like this one; without a record, it comes from a
step on tensors without memory (`mtrain.train.trace.launches`). The processes are niced, call no
driver and end with their parent. A kernel that they do not compile is compiled at its launch.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment
from mtrain.launching.child_process import ChildProcess
from mtrain.launching.environment import Place, apply, environment
from mtrain.layout.grid import RankGrid
from mtrain.train import warm_cache

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
    """True if this process holds connections that a forked process would keep open."""
    report: Path | None = field(default=None, init=False)
    """The file of the report, once something was begun."""
    child: ChildProcess | None = field(default=None, init=False)

    def begin(self, *, prepared: bool) -> None:
        """Begin unless begun, without kernels, or still without `prepared` data they need."""
        if self.report is not None or not _compiles(self.run):
            return
        place = Place.here(self.count)
        given = dict(os.environ)
        apply(environment(self.run, place, given), given)
        known = warm_cache.known(self.run, self.stages(), given)
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


def _compiles(run: RunConfig) -> bool:
    """Return whether kernels of a run are compiled by Triton for a known generation of GPUs."""
    facts = facts_of(run.cluster.device)
    if not facts.triton or facts.on_host or run.cluster.sm is None:
        return False
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return not interpreted and find_spec("triton") is not None
