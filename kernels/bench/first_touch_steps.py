"""The stage `steps` of `first_touch.py`: steps of several configurations in one process.

`launch.py` takes 20 seconds to start a configuration as a user would; here the second one takes 5,
so that a short lease of a GPU compares many. As a program of its own it needs the variables of a
launcher (RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR MASTER_PORT):

    python kernels/bench/first_touch_steps.py CASE...

A CASE is SHAPE:FORMAT[:KEY=VALUE,...], such as `1b:bf16` or `8b:bf16:kernels.linear=reference`.
Each prints one line of JSON: tokens a second, the median step, peak memory, the first losses, the
time in which the device worked, and the longest kernels of a step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from first_touch_device import device_here, needs_device
from first_touch_results import Walk
from first_touch_train import SHAPES, TINY, gaps_of, words_of

Units = dict[str, Callable[[], Any]]
WARM = 3
STEPS = 7
KERNELS = 60
"""The longest kernels of a step that are listed."""
GRAPH = "trainer.cuda_graph_impl"
CASES = (
    "1b:bf16",
    "8b:bf16",
    "1b:fp8_tensorwise",
    "8b:fp8_tensorwise",
    "1b:fp8_blockwise",
    "8b:fp8_blockwise",
    f"1b:bf16:{GRAPH}=full_iteration",
    f"1b:fp8_tensorwise:{GRAPH}=full_iteration",
    f"8b:fp8_tensorwise:{GRAPH}=full_iteration",
    f"1b:bf16:{GRAPH}=local",
    "8b:bf16:kernels.linear=reference,kernels.gradient_accumulation_fusion=false",
)
"""Cases, those with a goal first; a graph that cannot be captured may end a device."""


def steps(walk: Walk, folder: Path) -> Units:
    """Return each case by its words; of a dry run, a tiny model in two formats."""
    cases = ("tiny:bf16", "tiny:fp8_tensorwise") if walk.dry else CASES
    return {" ".join(case.split(":")): functools.partial(measured, case, walk) for case in cases}


def measured(case: str, walk: Walk) -> dict[str, Any]:
    """Train `WARM` steps, time `STEPS` more, and trace one."""
    needs_device(walk)
    import torch

    from mtrain.api import load

    shape, form, *more = case.split(":")
    words = words_of(
        walk, TINY if walk.dry else SHAPES[shape], form, "auto" if walk.dry else "triton"
    )
    changed = more[0].split(",") if more else []
    keys = {word.partition("=")[0] for word in changed}
    words = [word for word in words if word.partition("=")[0] not in keys] + changed
    run = load(words).run
    _install(run.cluster.device)
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    on_gpu = device_here().type == "cuda"
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        step = functools.partial(train_step, parts, stop_requested=False)
        losses = [step().loss for _ in range(WARM)]
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(1 if walk.dry else STEPS):
            world.device.synchronize()
            begin = time.perf_counter()
            step()
            world.device.synchronize()
            times.append(time.perf_counter() - begin)
        seconds = statistics.median(times)
        found = {
            "tokens_per_s": round(run.data.seq_length * run.trainer.batch / seconds),
            "step_s": round(seconds, 5),
            "losses": losses,
            **_traced(step, world.device.synchronize, seconds),
        }
        if on_gpu:
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        parts.close()
    del parts, step
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return found


@functools.cache
def _install(device: str) -> None:
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get(device))


def _traced(
    step: Callable[[], Any], synchronize: Callable[[], None], seconds: float
) -> dict[str, Any]:
    """Return how long the device worked in one more step, its share of an untraced one, and the
    longest kernels.
    """
    import torch

    with torch.profiler.profile() as profiler:
        step()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    on_device = [event for event in events if event.get("cat") in kinds]
    if not on_device:
        return {}
    us: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in on_device:
        us[event["name"]] += event["dur"]
        times[event["name"]] += 1
    said = gaps_of(events)
    busy = said["busy_share"] * said["step_us"] / 1e6
    return {
        "device_s": round(busy, 5),
        "busy_share": round(busy / seconds, 4),
        "kernels": len(on_device),
        "longest": [
            {"us": round(all_us, 1), "times": times[name], "name": name[:160]}
            for name, all_us in us.most_common(KERNELS)
        ],
    }


def main() -> None:
    """Measure each case; one that fails prints its error and leaves the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("cases", nargs="+", help="SHAPE:FORMAT[:KEY=VALUE,...]")
    given = parser.parse_args()
    walk = Walk(dry=given.dry_run)
    for case in given.cases:
        try:
            found = measured(case, walk)
        except Exception as error:
            found = {"error": repr(error)[:500]}
        print(json.dumps({"case": case, **found}), flush=True)


if __name__ == "__main__":
    main()
