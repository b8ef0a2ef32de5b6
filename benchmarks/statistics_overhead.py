"""The cost of `log.statistics` on a CPU: a run that describes every tenth or hundredth step, next
to one that describes none.

    python benchmarks/statistics_overhead.py [--steps 100] [--out FILE] [OVERRIDES ...]

All train in this process, on one rank with one thread, from the same weights and samples, a step of
each in turn. The cost at an interval is that of a described step, by the medians, divided by the
interval; next to it stands the ratio of all CPU seconds of the two runs, which needs many steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from step_overhead import DEFAULTS, circumstances

INTERVALS = (10, 100)


def main() -> int:
    """Run the comparison and print it; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", help="keys of the configuration")
    options = parser.parse_args()
    result = measured(DEFAULTS + options.overrides, options.steps)
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measured(words: list[str], steps: int) -> dict[str, Any]:
    """Return the median CPU seconds of usual and of described steps, and the cost by interval."""
    from mtrain import mcore as adapter
    from mtrain.api import load
    from mtrain.devices import registry
    from mtrain.world.init import joined

    os.environ["OMP_NUM_THREADS"] = "1"
    adapter.install(registry.get("cpu"))
    run = load(words).run
    with joined(run) as world, tempfile.TemporaryDirectory() as folder:
        made = {n: run_of(run, world, Path(folder), n) for n in (None, *INTERVALS)}
        spent: dict[int | None, list[float]] = {interval: [] for interval in made}
        losses: dict[int | None, float] = {}
        for number in range(1, steps + 1):
            for interval in sorted(made, key=str, reverse=number % 2 == 0):
                begin = time.process_time()
                losses[interval] = made[interval]()
                spent[interval].append(time.process_time() - begin)
            assert len(set(losses.values())) == 1, f"they train differently: {losses}"
    described = [s for at, s in enumerate(spent[10], 1) if at % 10 == 0]
    usual = statistics.median(spent[None])
    more = statistics.median(described) - usual
    return {
        "usual_step_s": usual,
        "described_step_s": statistics.median(described),
        "cost_percent": {str(n): 100 * more / n / usual for n in INTERVALS},
        "total_cpu_percent": {
            str(n): 100 * (sum(spent[n]) / sum(spent[None]) - 1) for n in INTERVALS
        },
        "steps": steps,
        "tokens_of_a_step": run.trainer.batch * run.data.length,
        **circumstances(),
    }


def run_of(run: Any, world: Any, folder: Path, interval: int | None) -> Callable[[], float]:
    """Return one step of a training run that describes every `interval` steps."""
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.hooks.base import Hook, HookList
    from mtrain.train.hooks.metrics import Metrics
    from mtrain.train.hooks.statistics import Statistics
    from mtrain.train.loop.step import train_step
    from mtrain.train.loop.trainer import report_step

    log = run.log.statistics.model_copy(update={"interval": interval})
    run = run.model_copy(update={"log": run.log.model_copy(update={"statistics": log})})
    parts = assemble(run, world, splits_of(run))
    home = folder / str(interval)
    home.mkdir()
    metrics = Metrics(home)
    described: list[Hook] = [] if interval is None else [Statistics(run, metrics)]
    parts.hooks = HookList([metrics, *described])
    parts.hooks.call("start", parts)
    parts.meter.loaded(0)

    def step() -> float:
        parts.hooks.before_step(parts)
        result = train_step(parts, stop_requested=False)
        parts.meter.stepped(result.step, parts.prefetcher.waited_s)
        report_step(parts, result)
        return result.loss

    return step


if __name__ == "__main__":
    raise SystemExit(main())
