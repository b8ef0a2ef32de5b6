"""Host time and launches of a layer and micro-batch, forward and backward, without a GPU.

    python benchmarks/host_cost.py [--quick] [--only dense,moe] [--layers N] [--json FILE]

mtrain's kernels are compiled for sm_90 and launched by a driver that launches nothing
(`host_cost_driver.py`), so what is left of a step on tiny CPU tensors is the work of the host.
Next to mtrain, transformers and layers of megatron-core alone train the same shapes in the same
process. Their kernels and all GEMMs really compute, on shapes where that takes as long as a call
of cuBLAS takes the host.

Time is the CPU time of the one thread that trains. A step has four micro-batches; contenders take
turns, one step each, in an order that alternates; a figure is the median over rounds and
micro-batches. The begin of a layer is marked in the forward, and in the backward the arrival of
the gradient of what it reads: between the marks of the second layer and of the last lie whole
layers, and neither embedding, loss nor optimizer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import host_cost_driver
import host_cost_models
import host_cost_profile
from host_cost_marks import BACKWARD, FORWARD, Timer, between, observed
from host_cost_models import KINDS, Contender

WARM = 4
"""Steps of each contender before the first that counts."""
PROFILED = 10
"""Steps of each profile."""


def main() -> int:
    """Measure the chosen kinds of layers, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer layers and rounds, for CI")
    parser.add_argument("--only", help="kinds of layers, separated by commas: " + ", ".join(KINDS))
    parser.add_argument("--layers", type=int, help="layers of a model, at least 4 (default 8)")
    parser.add_argument("--rounds", type=int, help="steps of each contender (default 30)")
    parser.add_argument("--json", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", help="keys of mtrain's configuration")
    parser.add_argument(
        "--profile", action="store_true", help="also where the time goes, by package and op"
    )
    options = parser.parse_args()
    layers = options.layers or (4 if options.quick else 8)
    rounds = options.rounds or (6 if options.quick else 30)
    kinds = options.only.split(",") if options.only else list(KINDS)
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or layers < 4:
        parser.error(f"no kind {', '.join(unknown)}" if unknown else "--layers must be at least 4")
    prepare()
    result: dict[str, Any] = {}
    for kind in kinds:
        result[kind] = measured(kind, layers, rounds, options.overrides, options.profile)
        print(table(kind, result[kind]), flush=True)
        for name, found in result[kind].get("profile", {}).items():
            host_cost_profile.as_text(name, found)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def prepare() -> None:
    """Set up one thread and the null driver, before anything imports `mtrain_kernels`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    host_cost_driver.install()
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get("cpu"))


def measured(
    kind: str, layers: int, rounds: int, overrides: list[str], profile: bool
) -> dict[str, Any]:
    """Return the figures of all contenders of a kind of layers."""
    with host_cost_models.contenders(KINDS[kind], layers, overrides) as contenders:
        for _ in range(WARM):
            for contender in contenders:
                contender.step()
        found = timed(contenders, rounds)
        result: dict[str, Any] = {
            "layers": len(contenders[0].layers),
            "contenders": {one.name: figures(*found[one.name]) for one in contenders},
        }
        if profile:
            result["profile"] = {
                one.name: host_cost_profile.tables(one, PROFILED) for one in contenders
            }
        return result


def timed(contenders: list[Contender], rounds: int) -> dict[str, tuple[Timer, list[float]]]:
    """Return the time of layers, and seconds of a step, of each contender in rounds in turn."""
    found: dict[str, tuple[Timer, list[float]]] = {
        one.name: (Timer(len(between(one.layers, one.period))), []) for one in contenders
    }
    for i in range(rounds):
        for contender in contenders[:: 1 - 2 * (i % 2)]:
            timer, steps = found[contender.name]
            gc.collect()
            gc.disable()
            with observed(contender.layers, contender.period, timer):
                begin = time.thread_time()
                contender.step()
                steps.append(time.thread_time() - begin)
            gc.enable()
    return found


def figures(timer: Timer, steps: list[float]) -> dict[str, Any]:
    """Return microseconds and launches of a layer and micro-batch, and milliseconds of a step."""
    out: dict[str, Any] = {}
    for way, spans in timer.spans.items():
        out[way] = {
            "us": round(statistics.median(span.us for span in spans), 1),
            "launches": round(statistics.median(span.launches for span in spans), 2),
        }
    pairs = zip(timer.spans[FORWARD], timer.spans[BACKWARD], strict=True)
    both = [forward.us + backward.us for forward, backward in pairs]
    out["us"] = round(statistics.median(both), 1)
    out["quartiles_us"] = [round(q, 1) for q in statistics.quantiles(both, n=4)]
    out["step_ms"] = round(1e3 * statistics.median(steps), 3)
    return out


def table(kind: str, result: dict[str, Any]) -> str:
    """Return the figures of a kind of layers as a table in Markdown."""
    rows = [
        f"### {kind}",
        "",
        "| contender | forward us | backward us | both us | of transformers | launches |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    found = result["contenders"]
    theirs = found.get("transformers", {}).get("us")
    for name, one in found.items():
        share = f"{one['us'] / theirs:.2f}" if theirs else ""
        launches = one["forward"]["launches"] + one["backward"]["launches"]
        rows.append(
            f"| {name} | {one['forward']['us']:,.0f} | {one['backward']['us']:,.0f} |"
            f" {one['us']:,.0f} | {share} | {launches:g} |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
