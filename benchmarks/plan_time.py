"""The fit of the time model's efficiencies to published throughput, and its error on models left
out.

    python benchmarks/plan_time.py [FILE.csv] [--write]

For each row, print the published rate and the errors of four fits: on all rows, on the other
models, on the other devices, on the other software. Then print the median and 95th percentile of
the errors, and the share of pairs of rows (one model, equally many devices) that are ranked as
published. Rows that describe no valid configuration are listed with the reason. Rows of one
configuration that contradict each other are predicted but not fitted, and errors are printed
without and with them. `--write` saves the fit on all other rows and its errors, which `plan`,
`tune` and `plan --scale` print. With a FILE, that fit predicts its rows.

plan_time_software.py describes what each software overlaps, fuses and launches. One factor of each
remains, on the speed of its device work, which is held near 1. If a row of Megatron-Bridge does not
state graphs, recomputation, dispatcher or overlap, they come from the recipe of its release, in
data/bridge_recipes.csv. Rows of data/published_throughput_unfitted.csv are never fitted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import plan_time_rows as published
import yaml
from plan_time_software import described

from mtrain.plan.time import report
from mtrain.plan.time.device import Device, device_of
from mtrain.plan.time.efficiencies import FILE, Efficiencies
from mtrain.plan.time.step import StepTime, StepWork, priced, step_work

Theta = dict[str, float]
SOFTWARE = "megatron-core 0.16 with TransformerEngine, by rows of Megatron-Bridge 26.02 and near it"
HEAD = """# Shares of stated rates that kernels, links and hosts reach; fitted on published
# throughput by benchmarks/plan_time.py, which reports the errors.
"""
ACCURACY_HEAD = """# Relative errors of predicted throughput on published runs of models that
# the fit did not see; measured by benchmarks/plan_time.py.
"""
PRIORS: dict[str, tuple[float, float]] = {
    # name: the expected value, and the standard deviation of its logarithm
    "products.bf16": (0.75, 0.07),
    "products.tensorwise": (0.95, 0.15),
    "products.mxfp8": (0.95, 0.07),
    "products.nvfp4": (0.45, 0.2),
    "grouped": (0.9, 0.1),
    "grouped_low": (0.9, 0.1),
    "fixed": (0.4, 0.4),
    "attention": (0.9, 0.1),
    "softmax": (0.8, 0.3),
    "memory": (0.75, 0.05),
    "fast_link": (0.75, 0.15),
    "network": (0.75, 0.15),
    "waves_lost": (0.3, 0.5),
    "tile_us": (1.1, 0.5),
    "launch_us": (8.0, 0.4),
    "call_us": (10.0, 0.5),
    "pass_us": (150.0, 0.7),
    "routing_us": (2500.0, 0.5),
    "graphed": (0.4, 0.4),
    "power": (1.0, 0.3),
    "blackwell": (0.85, 0.1),
    "flash2": (0.55, 0.1),
    "triton_hopper": (0.2, 0.4),
    "triton_ampere": (0.55, 0.3),
    "unfused_routing": (1.5, 0.4),
    "unfused_clamp": (1.1, 0.15),
    "exposed.tp": (0.5, 0.25),
    "exposed.ep": (0.5, 0.25),
    "exposed.dp": (0.15, 0.25),
    "exposed.pp": (0.5, 0.25),
}
LAYERS = {"attn", "mamba"}
"""Modules that graphs of layers capture in addition to routers; a router is half of a mixture's
host work.
"""
BACKWARD = 0.7
"""Speed of attention's backward relative to its forward: FlashAttention-3 and cuDNN, H100."""
FAMILY = 0.05
"""Standard deviation of what is left of a software's speed when it is described."""
BASE = "bridge 26.02"
MEGATRON = "core 0.8"
FAMILIES = ("core 0.8", "nemo 24", "torchtitan", "automodel", "llm-foundry")
HOPPER = 90


@dataclass
class Case:
    """A row, and the work of its step."""

    measured: published.Measured
    work: StepWork
    device: Device


def names(cases: Sequence[Case]) -> list[str]:
    """Return the names of all parameters."""
    found = list(PRIORS)
    there = {family(case) for case in cases}
    return found + [f"speed:{name}" for name in FAMILIES if name in there]


def efficiencies(
    theta: Theta,
    software: str,
    *,
    graphs: Set[str] = frozenset(),
    overlaps: bool = False,
    experts: bool = False,
    hopper: bool = True,
    clamped: bool = False,
) -> Efficiencies:
    """Return the efficiencies, from logarithms of their ratios to the priors."""
    v = {name: prior * np.exp(theta.get(name, 0.0)) for name, (prior, _) in PRIORS.items()}
    what = described(software)
    speed = float(np.exp(theta.get(f"speed:{what.family}", 0.0)))
    v["products.tensorwise"] *= v["products.bf16"]
    if graphs & LAYERS:
        left_of_routing = v["graphed"]
    else:
        left_of_routing = (1 + v["graphed"]) / 2 if "router" in graphs else 1.0
    kernels = {
        ("flash2", True): v["flash2"],
        ("triton", True): v["triton_hopper"],
        ("triton", False): v["triton_ampere"],
    }
    attention = float(v["attention"] * kernels.get((what.attention, hopper), 1.0))
    routing = 1.0 if what.fused_routing else v["unfused_routing"]
    slow_clamp = clamped and what.family == "bridge" and "whole" not in graphs
    products = {
        "bf16": v["products.bf16"],
        "fp16": v["products.bf16"],
        "fp32": v["products.bf16"],
        **dict.fromkeys(("delayed", "tensorwise"), v["products.tensorwise"]),
        "blockwise": v["products.tensorwise"] * 0.9,
        "mxfp8": v["products.mxfp8"] * v["products.tensorwise"],
        "nvfp4": v["products.nvfp4"],
    }
    return Efficiencies(
        software=software,
        products={k: float(x) for k, x in products.items()},
        grouped=float(v["grouped"]),
        grouped_low=float(v["grouped_low"]),
        fixed=float(v["fixed"]),
        attention=attention,
        attention_backward=attention * BACKWARD,
        softmax=float(v["softmax"]),
        memory=float(v["memory"]),
        fast_link=float(v["fast_link"]),
        network=float(v["network"]),
        waves_lost=float(v["waves_lost"]),
        tile_us=float(v["tile_us"]),
        launch_us=float(v["launch_us"] * (v["graphed"] if graphs & LAYERS else 1.0)),
        call_us=float(v["call_us"]),
        pass_us=float(v["pass_us"] * routing) * ("whole" not in graphs),
        routing_us=float(v["routing_us"] * left_of_routing * routing),
        graphed=float("whole" not in graphs),
        latency_us=8.0,
        overlapped={
            **{
                axis: max(0.0, 1 - float(v[f"exposed.{axis}"])) for axis in ("tp", "ep", "dp", "pp")
            },
            "cp": 0.8,
            **({} if overlaps else {"tp": 0.0}),
            **({} if experts else {"ep": 0.0}),
        },
        power=float(v["power"]),
        blackwell=float(v["blackwell"]),
        mixtures=float(1 / v["unfused_clamp"]) if slow_clamp else 1.0,
        speed=speed,
    )


def predicted(case: Case, theta: Theta) -> float:
    """Return tokens per second and device."""
    return timed(case, theta).tokens_per_second_per_device


def timed(case: Case, theta: Theta) -> StepTime:
    """Return the planned step of a row."""
    m = case.measured
    row = m.row
    return priced(
        case.work,
        case.device,
        efficiencies(
            theta,
            m.software,
            graphs=published.graphed(row),
            overlaps=published.overlapped(row),
            experts=published.experts_overlapped(row),
            hopper=(m.run.cluster.sm or 0) >= HOPPER,
            clamped=m.run.model.activation_func_clamp_value is not None,
        ),
    )


def prior(theta: Theta) -> list[float]:
    """Return the distances of parameters from their priors, in standard deviations."""
    found = [theta.get(name, 0.0) / spread for name, (_, spread) in PRIORS.items()]
    return found + [theta.get(f"speed:{name}", 0.0) / FAMILY for name in FAMILIES]


NOISE = 0.06
"""Relative spread of published repetitions of one configuration."""
STEP = 0.01
"""Step in a logarithm, for a derivative."""
LINEAR_STEPS = 5


@dataclass
class Slopes:
    """Residuals of cases at some parameters, and their derivatives."""

    keys: list[str]
    x: np.ndarray
    errors: np.ndarray
    slopes: np.ndarray
    """Case and parameter."""

    @classmethod
    def at(cls, cases: Sequence[Case], keys: list[str], x: np.ndarray) -> Slopes:
        """Return those at parameters `x`."""
        e = residuals(cases, keys, x)
        found = np.zeros((len(cases), len(keys)))
        for i, key in enumerate(keys):
            of = key.partition(":")[2]  # a software, whose factor changes only its own rows
            rows = [row for row, c in enumerate(cases) if of in ("", family(c))]
            more = x + STEP * np.eye(len(keys))[i]
            found[rows, i] = (residuals([cases[row] for row in rows], keys, more) - e[rows]) / STEP
        return cls(keys, x, e, found)

    def moved(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return a step of Gauss and Newton from `x`, for some of the rows, as if residuals were
        linear.
        """
        e = (self.errors + self.slopes @ (x - self.x))[rows]
        jac = self.slopes[rows]
        w = 1 / np.sqrt(1 + e**2)
        known = priors(self.keys, np.zeros(len(self.keys)))
        pj = np.stack([priors(self.keys, column) - known for column in np.eye(len(x))], axis=1)
        a = jac.T @ (w[:, None] * jac) + pj.T @ pj
        b = jac.T @ (w * e) + pj.T @ priors(self.keys, x)
        return -np.linalg.solve(a, b)


def residuals(cases: Sequence[Case], keys: Sequence[str], x: np.ndarray) -> np.ndarray:
    """Return the logarithms of predicted over published rates, in deviations of repetitions."""
    theta = dict(zip(keys, x, strict=True))
    return np.array([np.log(predicted(c, theta) / c.measured.tokens) / NOISE for c in cases])


def priors(keys: Sequence[str], x: np.ndarray) -> np.ndarray:
    """Return the distances of parameters from their priors."""
    return np.array(prior(dict(zip(keys, x, strict=True))))


def fit(cases: Sequence[Case], start: Theta | None = None, rounds: int = 6) -> Theta:
    """Fit the parameters by least squares of logarithms with less weight for outliers.

    The method is Gauss-Newton with a halved step where the full one would not improve the fit.
    """
    keys = names(cases)
    x = np.array([(start or {}).get(key, 0.0) for key in keys])
    every = np.arange(len(cases))

    def cost(e: np.ndarray, q: np.ndarray) -> float:
        return float(np.sum(np.sqrt(1 + e**2) - 1) * 2 + np.sum(q**2))

    for _ in range(rounds):
        here = Slopes.at(cases, keys, x)
        move = here.moved(x, every)
        now = cost(here.errors, priors(keys, x))
        scale = 1.0
        while scale > 0.05:
            new = x + scale * move
            after = cost(residuals(cases, keys, new), priors(keys, new))
            if after < now:
                break
            scale /= 2
        else:
            break
        x = new
        if now - after < 1e-3 * now:
            break
    return {key: float(value) for key, value in zip(keys, x, strict=True)}


def without(
    cases: Sequence[Case], theta: Theta, what: Callable[[Case], str], apart: Sequence[Case] = ()
) -> list[float]:
    """Return the error of each case, and of those `apart`, by fits without cases of its `what`.

    Each begins where all cases led, and takes its steps with the slopes there, which hardly change
    so near: predictions of cases left out are exact.
    """
    every = [*cases, *apart]
    out = [0.0] * len(every)
    keys = names(cases)
    here = Slopes.at(cases, keys, np.array([theta[key] for key in keys]))
    for left in sorted({what(case) for case in every}):
        rows = np.array([i for i, case in enumerate(cases) if what(case) != left])
        x = here.x
        for _ in range(LINEAR_STEPS):
            x = x + here.moved(x, rows)
        rest = dict(zip(keys, x, strict=True))
        for index, case in enumerate(every):
            if what(case) == left:
                out[index] = error(case, rest)
    return out


def family(case: Case) -> str:
    """Return the software of a case, without its release."""
    return described(case.measured.software).family


def error(case: Case, theta: Theta) -> float:
    """Return the relative error of the predicted throughput."""
    return predicted(case, theta) / case.measured.tokens - 1


def pairs(cases: Sequence[Case], errors: Sequence[float]) -> tuple[int, int]:
    """Return how many pairs of rows are ranked as published, and how many there are.

    A pair is of one model on as many devices, and differs by more than repetitions do.
    """
    right = number = 0
    for (one, e1), (two, e2) in combinations(list(zip(cases, errors, strict=True)), 2):
        a = one.measured
        b = two.measured
        same = all(a.row[key] == b.row[key] for key in ("model", "gpu", "gpus", "seq"))
        if not same or abs(np.log(a.tokens / b.tokens)) < NOISE:
            continue
        number += 1
        right += (a.tokens > b.tokens) == (a.tokens * (1 + e1) > b.tokens * (1 + e2))
    return right, number


def print_errors(what: str, errors: Sequence[float]) -> dict[str, float]:
    """Print and return the median, the 95th percentile and the largest of errors."""
    size = np.abs(errors)
    found = {
        "median": float(np.median(size)),
        "p95": float(np.quantile(size, 0.95)),
        "worst": float(size.max()),
    }
    print(f"{what}: " + ", ".join(f"{name} {value:.1%}" for name, value in found.items()))
    return found


def read(path: Path) -> list[Case]:
    """Return the rows of a file that are configurations, and print the others with the reason."""
    cases: list[Case] = []
    for row in published.rows(path):
        found = published.measured(row)
        if isinstance(found, str):
            print(
                f"left out: {row['model']} {row['gpu']} {row['gpus']} {row['precision']}: {found}"
            )
        else:
            cases.append(Case(found, step_work(found.run), device_of(found.run.cluster)))
    return cases


def agreeing(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Return the cases to fit, and those that contradict another row; print the latter."""
    found = published.disagreeing([case.measured for case in cases])
    for index, why in found.items():
        print(
            f"not fitted: {cases[index].measured.label()} {cases[index].measured.tokens:.0f}: {why}"
        )
    return [case for i, case in enumerate(cases) if i not in found], [cases[i] for i in found]


def saved(theta: Theta) -> dict[str, Any]:
    """Return the efficiencies of mtrain, which captures no graphs and overlaps neither tensor- nor
    expert-parallel sends.
    """
    found = asdict(efficiencies(theta, BASE)) | {"software": SOFTWARE}
    return {key: _rounded(value) for key, value in found.items()}


def kinds_in(cases: Sequence[Case], errors: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Return the error bars of kinds of configurations: of published runs whose software was left
    out of the fit, as mtrain is not in it, and of mtrain's own.
    """
    found: dict[str, dict[str, Any]] = {}
    own = json.loads((published.ROOT / "benchmarks/results/plan_host.json").read_text())["rows"]
    apart = [abs(row["left_out_error"]) for row in own if row["device_s"] is not None]
    by_kind = {"one device": ("runs of mtrain, each left out of the fit", apart)}
    of = "published runs of software that no fit saw"
    for case, wrong in zip(cases, errors, strict=True):
        kind = report.kind_of(case.measured.run)
        if kind != "one device":
            # of seconds, not of rates
            by_kind.setdefault(kind, (of, []))[1].append(abs(1 / (1 + wrong) - 1))
    for kind, (words, sizes) in sorted(by_kind.items()):
        found[kind] = {
            "of": words,
            "rows": len(sizes),
            "median": round(float(np.median(sizes)), 3),
            "p95": round(float(np.quantile(sizes, 0.95)), 3),
        }
    return found


def accuracy_in(results: dict[str, Any]) -> dict[str, Any]:
    """Return the errors that the package reports for its time model."""
    off = {name: round(results["model_left_out"][name], 4) for name in ("median", "p95")}
    pairs_ = {
        "pairs": results["pairs"]["of"],
        "pairs_right": results["pairs"]["right"],
        "apart": NOISE,
    }
    return {"rows": results["rows"], **off, **pairs_, "kinds": results["kinds"]}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> int:
    """Fit, compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", help="rows that are predicted and not fitted")
    parser.add_argument(
        "--write", action="store_true", help="save the efficiencies and the results"
    )
    options = parser.parse_args()
    first = read(published.FILE)
    cases, apart = agreeing([*first, *read(published.OTHER)])
    theta = fit(cases)
    if options.file is not None:
        others = read(options.file)
        for case in others:
            print(
                f"{case.measured.label()} {case.measured.tokens:8.0f} {predicted(case, theta):8.0f}"
                f" {error(case, theta):+7.1%}"
            )
        print_errors("rows that were not fitted", [error(case, theta) for case in others])
        return 0
    every = [*cases, *apart]
    inside = [error(case, theta) for case in every]
    by_model = without(cases, theta, lambda case: case.measured.model, apart)
    by_device = without(cases, theta, lambda case: case.measured.row["gpu"], apart)
    by_software = without(cases, theta, family, apart)
    print(f"{'':94} published    fitted  model left out  device left out  software left out")
    for case, *errors in zip(every, inside, by_model, by_device, by_software, strict=True):
        print(
            f"{case.measured.label()} {case.measured.tokens:8.0f}", *(f"{e:+14.1%}" for e in errors)
        )
    n = len(cases)
    results: dict[str, Any] = {
        "rows": n,
        "rows_that_disagree": len(apart),
        "fitted": print_errors("fitted", inside[:n]),
    }
    results["model_left_out"] = print_errors("each model left out", by_model[:n])
    results["device_left_out"] = print_errors("each device left out", by_device[:n])
    results["software_left_out"] = print_errors("each software left out", by_software[:n])
    old = {id(case) for case in first}
    results["model_left_out_first_file"] = print_errors(
        f"each model left out, only rows of {published.FILE.name}",
        [e for case, e in zip(cases, by_model[:n], strict=True) if id(case) in old],
    )
    newest = [e for case, e in zip(cases, by_model[:n], strict=True) if family(case) == "bridge"]
    results["model_left_out_megatron_bridge"] = print_errors(
        "each model left out, only rows of Megatron-Bridge", newest
    )
    results["model_left_out_with_all"] = print_errors(
        "each model left out, with rows that disagree", by_model
    )
    results["device_left_out_with_all"] = print_errors(
        "each device left out, with rows that disagree", by_device
    )
    never = read(published.UNFITTED)
    results["unfitted"] = print_errors(
        f"rows of {published.UNFITTED.name}, which are never fitted",
        [error(case, theta) for case in never],
    ) | {"rows": len(never)}
    results["kinds"] = kinds_in(cases, by_software[:n])
    for kind, bar in results["kinds"].items():
        print(f"  {kind:24} {bar['rows']:4} rows, {bar['median']:.1%}, {bar['p95']:.1%}")
    right, number = pairs(every, by_model)
    results["pairs"] = {"right": right, "of": number}
    print(f"pairs of layouts or releases ranked as published: {right} of {number}")
    results["software"] = {
        name: round(float(np.exp(theta.get(f"speed:{name}", 0.0))), 3) for name in FAMILIES
    }
    for name, factor in results["software"].items():
        print(f"  {name:16} speed {factor:.3f}")
    own = efficiencies(theta, MEGATRON, overlaps=True)  # for benchmarks/plan_scale.py
    results["efficiencies"] = {
        MEGATRON: {key: _rounded(value) for key, value in asdict(own).items()}
    }
    if options.write:
        report.ACCURACY_FILE.write_text(
            ACCURACY_HEAD + yaml.safe_dump(accuracy_in(results), sort_keys=False)
        )
        FILE.write_text(HEAD + yaml.safe_dump(saved(theta), sort_keys=False, width=116))
        (published.ROOT / "benchmarks/results/plan_time.json").write_text(
            json.dumps(results, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
