"""The work of the process that compiles a run's kernels while its ranks start; see `warming`.

It is niced, calls no driver, and ends with the process that started it, as its children do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain_kernels.compilations import Launch, compile_ahead

from mtrain.config.machine.devices import CPU
from mtrain.config.schema.run import RunConfig
from mtrain.launching.environment import Place, apply, environment
from mtrain.processes import die_with
from mtrain.train import warm_cache

MOST_PROCESSES = 32
NICE = 10


def compile_kernels(run: RunConfig, stages: Mapping[str, int], count: int, report: str) -> None:
    """Compile what the launches of pipeline stages need, in this process and its children, and
    write a report.

    `stages` has a rank of each stage; `count` ranks share this machine.
    """
    began = time.monotonic()
    os.nice(NICE)
    # Libraries greet at their import, and the compiler prints warnings.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
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
    facts: dict[str, Any] = {"list": "record"}
    launches = warm_cache.known(run, stages, os.environ)
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
    from mtrain.devices import registry

    adapter.install(registry.get(CPU.name))
    import torch

    from mtrain.assembly.kernel_variants import use_named
    from mtrain.train.trace.launches import launches_of

    torch.use_deterministic_algorithms(run.trainer.deterministic)
    use_named(run)
    assert run.cluster.sm is not None
    return launches_of(run, ranks, run.cluster.sm)
