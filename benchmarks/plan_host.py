"""The fit of mtrain's own rates on a GPU, of the host and of the device, to its measured runs.

    python benchmarks/plan_host.py [--since YYYY-MM-DD_DEVICE_COMMIT] [--write]

Read the runs of `first_touch.py` in results/gpu: seconds of a step, the device's seconds of it, and
launches per layer. Fit the cost of a launch, of a module and of a step on the host, and the rates
of the device's kernels; print measured and planned seconds of each run, and of each by a fit that
left it out. `--write` saves the rates in src/mtrain/plan/time/own.yaml, which `plan` uses, and the
errors in results/plan_host.json. `--since` ignores older runs, whose software was slower.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from pathlib import Path
from typing import Any

import yaml

from mtrain.api import load
from mtrain.config.resolve.resolution import Machine
from mtrain.models.graph import Product
from mtrain.plan.time.calibrate import least_squares
from mtrain.plan.time.device import Device, device_of
from mtrain.plan.time.efficiencies import OWN, Efficiencies, own_of
from mtrain.plan.time.kernels import Kernels
from mtrain.plan.time.step import StepTime, StepWork, priced, step_work
from mtrain.plan.time.work import Linear

SINCE = "2026-11-28_nvidia_h200_206611ee"
"""The oldest results of the software that plans are for: an older one cost the host twice as much.
"""
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# What mtrain's own kernels reach on a GPU, and the host's cost of its steps; everything
# else is as in efficiencies.yaml. Fitted by benchmarks/plan_host.py, which says how far off it is.
# host.launches: kernels of an operation, forward and backward, by its kind or its recipe of low
# precision; counted per layer by the stage `host` of kernels/bench/first_touch.py, those of
# `dispatch` from a step of a tiny Mixtral. gradient_bytes: measured; 0 where the GEMM of a weight's
# gradient adds it up itself. Kernels of low precision count as many launches as they cost.
"""
BIG = Machine(cpu_cores=1 << 14, memory_bytes=1 << 60)
ON = [
    *("parallel=single", "data=mock", "cluster=h200", "cluster.devices_per_node=1"),
    *("trainer.sample_tokens=0", "trainer.eval_iters=0", "trainer.eval_interval=0"),
]
SHAPES = {
    "1b": ["model=llama32_1b"],
    "8b": ["model=llama3_8b", "model.num_layers=8"],
}
LENGTHS = ["data.seq_length=4096", "trainer.micro_batch_size=1", "trainer.global_batch_size=4"]
SMALL = ["data.seq_length=256", "trainer.global_batch_size=4"]
PRIORS: dict[str, tuple[float, float]] = {
    # name: the expected value, and the standard deviation of its logarithm
    "products.bf16": (0.85, 0.1),
    "products.tensorwise": (0.8, 0.15),
    "products.blockwise": (0.5, 0.3),
    "attention": (0.71, 0.1),
    "waves_lost": (0.35, 0.3),
    "tile_us": (1.3, 0.3),
    "step_bytes": (100.0, 0.3),
    "launch_us": (60.0, 0.5),
    "low": (1.3, 0.3),
    "module_us": (150.0, 0.7),
    "step_us": (15000.0, 0.5),
    "dispatch": (50.0, 1.0),
}
BACKWARD = 0.7
"""Speed of attention's backward relative to its forward, as in plan_time.py."""
MEMORY = 0.8875
"""Measured on the card of the runs: a copy at 4.26 of 4.8 TB/s."""
PRODUCT = (8192, 792e12)
"""Measured there: the sides of a square product in bf16, and its FLOP/s."""
GRADIENT_BYTES = 18.0
"""Measured where a gradient is added apart: those kernels take 44.6 ms of a step of 8B widths and
18.3 ms of the 1B model, four micro-batches each; 21 and 16 bytes for each element of a linear
weight. The GEMM of a weight in bf16 adds it up by itself since.
"""
LOW = ("tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4")
# A layer of Llama: linear layers, and the other operations that move bytes or multiply.
LINEAR = 4
OTHERS = 8
BF16_LINEAR = (1.0, 2.0)
"""A product; two products, of which one adds to the gradient."""
NOISE = 0.04
SMALL_NOISE = 0.2
"""Noise of runs of tiny models, with other runs at the same time."""
MIXTRAL = (104.0, 34.0)
"""Milliseconds of a step of a tiny Mixtral and a tiny Llama, in the same minutes (2026-11-26)."""


@dataclass(frozen=True)
class Row:
    """A measured run."""

    name: str
    date: str
    step_s: float
    device_s: float | None
    words: Sequence[str]
    noise: float = NOISE

    @cached_property
    def work(self) -> StepWork:
        """Return the work of its configuration."""
        return work_of(self.words)


def work_of(words: Sequence[str]) -> StepWork:
    """Return the work of a configuration on one H200."""
    return step_work(load([*ON, *words], BIG, {}, to_run=False).run)


def rows(since: str) -> list[Row]:
    """Return the runs in results/gpu that are not older, in the order of their folders' names."""
    found = []
    for path in sorted((RESULTS / "gpu").glob("*/steps.json")):
        kept = json.loads(path.read_text())
        commit = path.parent.name.rpartition("_")[2]
        for run in kept["steps"]:
            if path.parent.name < since or run["commit"] != commit:
                continue
            shape, form = run["case"].split(":")
            words = [*SHAPES[shape], *LENGTHS, f"precision={form}", "kernels=triton"]
            row = Row(
                f"{shape} {form} steps",
                kept["date"],
                run["step_s"],
                run.get("device_s"),
                words,
            )
            found.append(row)
    for path in sorted((RESULTS / "gpu").glob("*/summary.json")):
        summary = json.loads(path.read_text())
        if path.parent.name < since:
            continue
        for name, run in summary.get("steps", {}).items():
            if "=" in name:  # one key differs from the plan's shape
                continue
            shape, form = name.split()
            words = [*SHAPES[shape], *LENGTHS, f"precision={form}", "kernels=triton"]
            row = f"{name} steps", summary["date"], run["step_s"], run.get("device_s")
            found.append(Row(*row, words))
        for name, run in summary["train"].items():
            shape, form, kernels = name.split()
            if kernels == "te":
                continue
            words = [*SHAPES[shape], *LENGTHS, f"precision={form}", f"kernels={kernels}"]
            device = run.get("device_s", _busy(summary["profile"].get(name, {})))
            found.append(Row(name, summary["date"], run["step_s"], device, words))
        gate = summary["gate"].get("launch.py", {}).get("step_s")
        if gate is not None:
            words = ["model=llama_tiny", *SMALL]
            found.append(Row("llama_tiny", summary["date"], gate, None, words, SMALL_NOISE))
    return found


def _busy(profile: Mapping[str, Any]) -> float | None:
    """Return the seconds of kernels in a profiled step."""
    if "step_us" not in profile:
        return None
    return float(profile["busy_share"] * profile["step_us"] / 1e6)


def launches() -> dict[str, tuple[float, float]]:
    """Return the launches by kind of operation, forward and backward, as the newest run counted
    them per layer.
    """
    counted: dict[str, Any] = {}
    for folder in sorted((RESULTS / "gpu").iterdir()):
        for name, section in (("summary.json", "host"), ("steps.json", "launches")):
            if (folder / name).exists():
                kept = json.loads((folder / name).read_text())[section]
                counted |= {key: unit.get("count", unit) for key, unit in kept.items()}
    wide = counted["1b bf16"]
    low = counted["1b fp8_tensorwise"]
    forward, backward = BF16_LINEAR
    other = (
        (wide["forward"] - LINEAR * forward) / OTHERS,
        (wide["backward"] - LINEAR * backward) / OTHERS,
    )
    tensorwise = (
        (low["forward"] - OTHERS * other[0]) / LINEAR,
        (low["backward"] - OTHERS * other[1]) / LINEAR,
    )
    # not counted yet: as many as tensorwise
    more = dict.fromkeys(LOW, tensorwise)
    return {"linear": BF16_LINEAR, "experts": BF16_LINEAR, "other": other, **more}


def values_of(
    theta: Mapping[str, float], counts: Mapping[str, tuple[float, float]], source: str
) -> dict[str, Any]:
    """Return the contents of own.yaml, from logarithms of ratios to the priors."""
    v = {name: prior * exp(theta.get(name, 0.0)) for name, (prior, _) in PRIORS.items()}
    low = v["products.tensorwise"]
    return {
        "software": "mtrain's own kernels and host cost",
        "products": {
            "bf16": v["products.bf16"],
            "fp16": v["products.bf16"],
            "delayed": low,
            "tensorwise": low,
            "blockwise": v["products.blockwise"],
        },
        "attention": v["attention"],
        "attention_backward": v["attention"] * BACKWARD,
        "memory": MEMORY,
        "waves_lost": v["waves_lost"],
        "tile_us": v["tile_us"],
        "host": {
            "source": source,
            **{name: v[name] for name in ("launch_us", "module_us", "step_us")},
            "launches": {
                # One of a product in low precision costs more than another: it is ours, in Triton.
                **{
                    kind: [each * (v["low"] if kind in LOW else 1.0) for each in pair]
                    for kind, pair in counts.items()
                },
                "dispatch": [v["dispatch"], v["dispatch"]],
            },
            "waits": [],
            "gradient_bytes": GRADIENT_BYTES,
            "step_bytes": v["step_bytes"],
        },
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


class Fit:
    """The least squares of the rows."""

    def __init__(self, every: Sequence[Row], counts: Mapping[str, tuple[float, float]]) -> None:
        self.every = every
        self.counts = counts
        self.device: Device = device_of(every[0].work.run.cluster)
        self.tiny = work_of(["model=llama_tiny", *SMALL])
        self.mixtral = work_of(["model=mixtral_tiny", *SMALL])

    def reached(self, theta: Mapping[str, float]) -> Efficiencies:
        """Return the efficiencies of some parameters."""
        return own_of(values_of(theta, self.counts, ""))

    def step(self, work: StepWork, theta: Mapping[str, float]) -> StepTime:
        """Return the planned step."""
        return priced(work, self.device, self.reached(theta))

    def product(self, theta: Mapping[str, float]) -> float:
        """Return the FLOP/s of the square product."""
        side = PRODUCT[0]
        kernels = Kernels(self.device, self.reached(theta), "bf16", "bf16", "bf16", 2)
        one = Linear(Product(side, side, side), low=False, grouped=False)
        return one.product.flops / kernels.linear(one)

    def fitted(self, some: Sequence[Row]) -> dict[str, float]:
        """Return the parameters that explain some of the rows best."""
        names = list(PRIORS)

        def residuals(x: list[float]) -> list[float]:
            theta = dict(zip(names, x, strict=True))
            found = [value / PRIORS[name][1] for name, value in theta.items()]
            for row in some:
                step = self.step(row.work, theta)
                found.append(log(step.seconds / row.step_s) / row.noise)
                if row.device_s is not None:
                    found.append(log(computed(step) / row.device_s) / row.noise)
            found.append(log(self.product(theta) / PRODUCT[1]) / NOISE)
            ratio = self.step(self.mixtral, theta).seconds / self.step(self.tiny, theta).seconds
            found.append(log(ratio / (MIXTRAL[0] / MIXTRAL[1])) / SMALL_NOISE)
            return found

        return dict(zip(names, least_squares(residuals, [0.0] * len(names)), strict=True))


def kind_of(row: Row) -> str:
    """Return the shape and format of a run, without its kernels."""
    return row.name.rpartition(" ")[0] or row.name


def computed(step: StepTime) -> float:
    """Return the seconds of the device in a step."""
    return step.seconds - step.parts["host"]


def names_of(every: Sequence[Row]) -> str:
    """Return the source of a fit."""
    dates = sorted({row.date for row in every})
    return f"benchmarks/results/gpu, one H200, {' and '.join(dates)}, {len(every)} runs"


def main() -> int:
    """Fit, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--since", default=SINCE, help="the oldest folder of results/gpu that counts"
    )
    parser.add_argument("--write", action="store_true", help="save the rates and the errors")
    options = parser.parse_args()
    every = rows(options.since)
    fit = Fit(every, launches())
    theta = fit.fitted(every)
    values = _rounded(values_of(theta, fit.counts, names_of(every)))
    fit_reached = own_of(values)
    print(f"{'':24} {'date':10}  measured  planned          left out   device  planned")
    results = []
    for row in every:
        rest = fit.fitted([one for one in every if kind_of(one) != kind_of(row)])
        step = priced(row.work, fit.device, fit_reached)
        without = fit.step(row.work, rest)
        found = {
            "name": row.name,
            "date": row.date,
            "step_s": row.step_s,
            "planned_s": round(step.seconds, 4),
            "error": round(step.seconds / row.step_s - 1, 4),
            "left_out_error": round(without.seconds / row.step_s - 1, 4),
            "device_s": row.device_s,
            "planned_device_s": round(computed(step), 4),
        }
        results.append(found)
        device = "        " if row.device_s is None else f"{row.device_s:8.3f}"
        print(
            f"{row.name:24} {row.date}  {row.step_s:8.3f} {step.seconds:8.3f}"
            f" {found['error']:+7.1%} {found['left_out_error']:+9.1%} {device}"
            f" {computed(step):8.3f}"
        )
    text = yaml.safe_dump(values, sort_keys=False, width=100, default_flow_style=None)
    print(text)
    if options.write:
        OWN.write_text(
            HEAD + yaml.safe_dump(values, sort_keys=False, width=100, default_flow_style=None)
        )
        (RESULTS / "plan_host.json").write_text(json.dumps({"rows": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
