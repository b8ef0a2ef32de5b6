"""Train steps of several configurations one after another in one process, and print their speed.

    python kernels/bench/steps.py [--trace OUT] CASE...

A CASE is SHAPE:FORMAT[:KEY=VALUE,...], such as `1b:bf16` or `8b:bf16:kernels.linear=reference`.
`first_touch.py` starts each configuration as a user would, which takes 20 seconds; here the second
one takes 5, so that a short lease of a GPU compares many. It needs the variables of a launcher
(RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR MASTER_PORT).

Each case prints one line of JSON: tokens a second, the median step, peak memory, the first losses.
With `--trace` the kernels of one more step, longest first, go to OUT, and the line tells the time
in which the device worked.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from first_touch_results import Walk
from first_touch_train import SHAPES, gaps_of, words_of

WARM = 3
STEPS = 7
KERNELS = 80
"""The longest kernels of a trace that are listed."""


def measured(case: str, install: Callable[[Any], None], trace: Path | None) -> dict[str, Any]:
    """Train `WARM` steps, time `STEPS` more, and trace one where a folder is given."""
    from mtrain.api import load

    shape, form, *more = case.split(":")
    words = words_of(Walk(dry=False), SHAPES[shape], form, "triton")
    changed = more[0].split(",") if more else []
    keys = {word.partition("=")[0] for word in changed}
    words = [word for word in words if word.partition("=")[0] not in keys] + changed
    run = load(words).run
    install(run)
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        step = functools.partial(train_step, parts, stop_requested=False)
        losses = [step().loss for _ in range(WARM)]
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(STEPS):
            world.device.synchronize()
            begin = time.perf_counter()
            step()
            world.device.synchronize()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times)
        found = {
            "case": case,
            "tokens_per_s": round(run.data.seq_length * run.trainer.batch / seconds),
            "step_s": round(seconds, 4),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            "losses": losses,
        }
        if trace is not None:
            found |= _traced(
                step, world.device.synchronize, trace / f"{case.replace(':', '_')}.txt"
            )
        parts.close()
    return found


def _traced(step: Callable[[], Any], synchronize: Callable[[], None], to: Path) -> dict[str, Any]:
    with torch.profiler.profile() as profiler:
        step()
        synchronize()
    file = to.with_suffix(".json")
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    longest: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in on_device:
        longest[event["name"]] += event["dur"]
        times[event["name"]] += 1
    rows = (
        f"{us / 1e3:10.3f} ms {times[name]:6d} x {name}"
        for name, us in longest.most_common(KERNELS)
    )
    to.write_text("\n".join(rows) + "\n")
    said = gaps_of(events)
    busy = said["busy_share"] * said["step_us"] / 1e6
    return {"device_s": round(busy, 4), "kernels": len(on_device), "longest": str(to)}


def main() -> None:
    """Measure each case; one that fails prints its error and leaves the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a folder for the kernels of one more step")
    parser.add_argument("cases", nargs="+", help="SHAPE:FORMAT[:KEY=VALUE,...]")
    given = parser.parse_args()
    if given.trace is not None:
        given.trace.mkdir(parents=True, exist_ok=True)
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    @functools.cache
    def once(device: str) -> None:
        adapter.install(registry.get(device))

    for case in given.cases:
        try:
            found = measured(case, lambda run: once(run.cluster.device), given.trace)
        except Exception as error:
            found = {"case": case, "error": repr(error)[:500]}
        print(json.dumps(found), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
