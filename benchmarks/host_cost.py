"""Host time and launches of a layer and micro-batch, forward and backward, without a GPU.

    python benchmarks/host_cost.py [--quick] [--only dense,moe] [--layers N] [--json FILE]

mtrain's kernels are compiled for sm_90 and launched by a driver that launches nothing
(`host_cost_driver.py`), so what is left of a step on tiny CPU tensors is the work of the host.
Next to mtrain, transformers and plain layers of megatron-core train the same shapes in the same
process. Their kernels and all GEMMs really compute, on shapes where that takes about as long as
the call takes the host on a GPU.

Time is the CPU time of the one thread that trains. A step has four micro-batches; contenders take
turns, one step each, in an order that alternates; a figure is the median over rounds and
micro-batches. Between the marks lie whole layers (`host_cost_marks.py`), and neither embedding,
loss nor optimizer. Launches are those of Triton's kernels and of torch's operations, without
those that only allocate memory or view it.

mtrain has `kernels=triton`, and thus its own attention; on a GPU it calls torch's unless that lacks
something, as it does here with `kernels.attention=torch`. A Mamba mixer scans in plain torch,
because the libraries whose kernels it calls on a GPU do not run on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import host_cost_driver
import host_cost_models
import host_cost_profile
from host_cost_marks import BACKWARD, FORWARD, Timer, between, observed
from host_cost_models import KINDS, Contender

WARM = 3
"""Steps of each contender before the first that counts."""
PROFILED = 10
"""Steps of each profile."""
OURS = "mtrain "
"""Begins the names of mtrain's contenders."""


def main() -> int:
    """Measure the chosen kinds of layers, print tables, and return the exit code."""
    options = _options()
    prepare()
    kinds: dict[str, Any] = {}
    for kind in options.only:
        kinds[kind] = measured(kind, options)
        print(table(kind, kinds[kind]), flush=True)
        for title in host_cost_profile.TITLES:
            for name, found in kinds[kind].get("profile", {}).items():
                if title in found:
                    print(host_cost_profile.as_text(name, title, found[title]), flush=True)
    if options.json:
        result = {"kinds": kinds, **circumstances(options.json)}
        options.json.write_text(as_json(result))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="4 layers, 6 rounds and no tables by op, for CI"
    )
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of layers: %(default)s")
    parser.add_argument("--layers", type=int, help="layers of a model, at least 4 (default 8)")
    parser.add_argument("--rounds", type=int, help="steps of each contender (default 30)")
    parser.add_argument("--json", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also tables by package and function, and those of all contenders",
    )
    parser.add_argument("overrides", nargs="*", help="keys of mtrain's configuration")
    options = parser.parse_args()
    options.layers = options.layers or (4 if options.quick else 8)
    options.rounds = options.rounds or (6 if options.quick else 30)
    options.only = options.only.split(",")
    unknown = sorted(set(options.only) - set(KINDS))
    if unknown:
        parser.error(f"no kind {', '.join(unknown)}; choose from {', '.join(KINDS)}")
    if options.layers < 4:
        parser.error("--layers must be at least 4")
    return options


def prepare() -> None:
    """Set up one thread and the null driver, before anything imports `mtrain_kernels`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["KINETO_LOG_LEVEL"] = "5"  # torch's profiler tells nothing but errors
    import torch

    torch.set_num_threads(1)
    host_cost_driver.install()
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get("cpu"))


def measured(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all contenders of a kind of layers."""
    chosen = KINDS[kind]
    with host_cost_models.contenders(chosen, options.layers, options.overrides) as contenders:
        for _ in range(WARM):
            for contender in contenders:
                contender.step()
        found = timed(contenders, options.rounds)
        result: dict[str, Any] = {
            "about": chosen.about,
            "layers": len(contenders[0].layers),
            "contenders": {one.name: figures(one, *found[one.name]) for one in contenders},
        }
        if chosen.megatron:
            result["no megatron-core"] = chosen.megatron
        if options.profile or not options.quick:
            steps = 1 if options.quick else PROFILED
            result["profile"] = {
                one.name: host_cost_profile.tables(one, steps, functions=options.profile)
                for one in contenders
                if options.profile or one.name.startswith(OURS)
            }
        return result


def timed(contenders: list[Contender], rounds: int) -> dict[str, tuple[Timer, list[float]]]:
    """Return the time of layers, and seconds of a step, of each contender in rounds in turn.

    Python's collector of garbage runs between steps only.
    """
    found: dict[str, tuple[Timer, list[float]]] = {
        one.name: (Timer(len(between(one.layers, one.period))), []) for one in contenders
    }
    gc.collect()
    # What models hold is not garbage: without it a collection takes a millisecond, not 300.
    gc.freeze()
    gc.disable()
    for i in range(rounds):
        for contender in contenders[:: 1 - 2 * (i % 2)]:
            timer, steps = found[contender.name]
            gc.collect()
            with observed(contender.layers, contender.period, timer):
                begin = time.thread_time()
                contender.step()
                steps.append(time.thread_time() - begin)
    gc.enable()
    gc.unfreeze()
    return found


def figures(contender: Contender, timer: Timer, steps: list[float]) -> dict[str, Any]:
    """Return microseconds and launches of a layer and micro-batch, and milliseconds of a step."""
    out: dict[str, Any] = {}
    torchs = host_cost_profile.launches_of_torch(contender)
    for way, spans in timer.spans.items():
        out[way] = {
            "us": round(statistics.median(span.us for span in spans), 1),
            "triton_launches": round(statistics.median(span.launches for span in spans), 2),
            "torch_launches": round(torchs[way], 2),
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
        f"### {kind}: {result['about']}",
        "",
        "| microseconds of a layer and micro-batch | forward | backward | both | of transformers |"
        " Triton launches | torch launches |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    found = result["contenders"]
    theirs = found.get("transformers", {}).get("us")
    for name, one in found.items():
        share = f"{one['us'] / theirs:.2f}" if theirs else ""
        launches = (
            f"{sum(one[way][kind] for way in (FORWARD, BACKWARD)):.4g}"
            for kind in ("triton_launches", "torch_launches")
        )
        times = (one[FORWARD]["us"], one[BACKWARD]["us"], one["us"])
        cells = [name, *(f"{time:,.0f}" for time in times), share, *launches]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def as_json(result: dict[str, Any]) -> str:
    """Return the result as JSON, in which a row of a table has one line."""
    text = json.dumps(result, indent=1) + "\n"
    return re.sub(r"\{[^{}\[\]]*\}", lambda row: " ".join(row[0].split()), text)


def circumstances(file: Path) -> dict[str, Any]:
    """Return the device, load, versions, commit and command of the measurement, which the file is
    for.
    """
    from mtrain.launching.matmul import processor

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "megatron-core", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    words = [file.name if word == str(file) else word for word in sys.argv[1:]]
    return {
        "device": f"cpu ({processor()}), 1 thread",
        "load_at_the_end": round(os.getloadavg()[0], 2),
        "versions": versions,
        "commit": commit,
        "command": " ".join(["python benchmarks/host_cost.py", *words]),
    }


if __name__ == "__main__":
    raise SystemExit(main())
