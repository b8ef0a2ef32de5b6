"""The rates of a machine from measured steps and kernels: least squares of logarithms, each rate
held near its expected value. A GPU's data sheet states its rates, so only the reached shares of
them are fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import exp, log, sqrt
from statistics import median
from typing import Any

from mtrain.config.engine.formats import Format
from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.cluster import ClusterConfig, Reached
from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import Product
from mtrain.plan.time.device import GIGA, TERA, device_of
from mtrain.plan.time.efficiencies import WIDE, Efficiencies, powered, reached_by
from mtrain.plan.time.kernels import Kernels
from mtrain.plan.time.step import StepTime, StepWork, priced, step_work
from mtrain.plan.time.work import Linear

Vector = list[float]
# What one thread of a CPU reaches, and ranks that send each other through its memory.
EXPECTED = {
    "peak_tflops": 0.05,
    "memory_gbps": 8.0,
    "operation_us": 10.0,
    "attention": 0.7,
    "fast_link_gbps": 1.0,
    "link_latency_us": 100.0,
}
LINKS = ("fast_link_gbps", "link_latency_us")
# Standard deviations of logarithms: of a measured step, of a kernel measured in isolation
# against the same kernel in a step, and of a rate from its expected value.
NOISE = 0.05
ALONE = 0.2
SPREAD = 5.0
# Rates whose deviation is known to be smaller than SPREAD.
SURE = {"attention": 0.3}
# A fit takes no machine for more times faster or slower than published runs.
MOST = 10.0
ROUNDS = 40
BISECTIONS = 20
# Speeds of the host that are tried on either side of the expected one, and how much one further
# away has to explain.
HOSTS = 20
HELD = 0.01
STEP = 1e-4
DIGITS = 4
# Rows and columns of the large product that kernels are compared with.
SIDE = 8192


@dataclass(frozen=True)
class Measured:
    """A run, and the seconds of its steps in the median."""

    run: RunConfig
    step_s: float
    optimizer_s: float | None = None
    """Share of the update in that, in seconds."""


@dataclass(frozen=True)
class Rates:
    """Rates of kernels that were measured by themselves."""

    format: Format
    products: float
    """Operations a second of a large product."""
    memory: float
    """Bytes a second, read and written."""


@dataclass(frozen=True)
class Fit:
    """The result of a fit."""

    cluster: ClusterConfig
    errors: tuple[float, ...]
    """Relative error of each run's step: predicted over measured, less one."""


def fitted(
    measured: Sequence[Measured], start: ClusterConfig, kernels: Sequence[Rates] = ()
) -> Fit:
    """Return the cluster `start` with the rates that explain the measurements best.

    Raises:
        ValueError: the family of a model does not say what its layers compute.
    """
    works = [step_work(one.run) for one in measured]
    find = _host if facts_of(start.device).on_host else _accelerator
    best = _rounded(find(measured, works, start, kernels))
    steps = [_priced(work, best).seconds for work in works]
    return Fit(
        best, tuple(step / one.step_s - 1 for step, one in zip(steps, measured, strict=True))
    )


def _accelerator(
    measured: Sequence[Measured],
    works: Sequence[StepWork],
    start: ClusterConfig,
    kernels: Sequence[Rates],
) -> ClusterConfig:
    """Return the fitted share of the data sheet that kernels reach, and the relative speed."""
    reached = dict(start.reached)
    for one in kernels:
        if one.format in WIDE:
            reached["products"] = _products_reached(one, start)
        reached["memory"] = one.memory / GIGA / (start.memory_gbps or one.memory / GIGA)
    found = start.model_copy(update={"reached": reached})
    if measured:
        reached |= _host_and_speed(measured, works, found)
    return start.model_copy(
        update={"reached": {name: min(MOST, share) for name, share in reached.items()}}
    )


def _host_and_speed(
    measured: Sequence[Measured], works: Sequence[StepWork], start: ClusterConfig
) -> dict[Reached, float]:
    """Return the speed of the host and of the device that explain the steps best; of one run, whose
    host is as expected, the speed of the device.
    """
    reached = reached_by(start)
    if reached.host is None or len(measured) == 1:
        return {"speed": _speed(measured, works, start, reached)}
    hosts = [MOST ** (step / HOSTS) for step in range(-HOSTS, HOSTS + 1)]
    best = min(hosts, key=lambda host: _missed(host, measured, works, start, reached))
    found = replace(reached, host=replace(reached.host, speed=best))
    return {"host": best, "speed": _speed(measured, works, start, found)}


def _missed(
    host: float,
    measured: Sequence[Measured],
    works: Sequence[StepWork],
    start: ClusterConfig,
    reached: Efficiencies,
) -> float:
    """Return the mean error with such a host, plus its distance from the expected speed."""
    assert reached.host is not None
    device = device_of(start)
    found = replace(reached, host=replace(reached.host, speed=host))
    found = replace(found, speed=_speed(measured, works, start, found))
    errors = (
        abs(log(priced(work, device, found).seconds / one.step_s))
        for work, one in zip(works, measured, strict=True)
    )
    return sum(errors) / len(measured) + HELD * abs(log(host))


def _speed(
    measured: Sequence[Measured],
    works: Sequence[StepWork],
    start: ClusterConfig,
    reached: Efficiencies,
) -> float:
    """Return the speed at which half of the steps are planned too long; by bisection."""
    device = device_of(start)

    def too_long(speed: float) -> bool:
        steps = (priced(work, device, replace(reached, speed=speed)).seconds for work in works)
        return median(step / one.step_s for step, one in zip(steps, measured, strict=True)) > 1

    low = 1 / MOST
    high = MOST
    for _ in range(BISECTIONS):
        middle = sqrt(low * high)
        low, high = (middle, high) if too_long(middle) else (low, middle)
    return sqrt(low * high)


def _products_reached(one: Rates, start: ClusterConfig) -> float:
    """Return the share of the peak that explains the time of a large product with full tiles."""
    reached = reached_by(start)
    form = one.format
    kernels = Kernels(device_of(start), reached, form, form, form, 4 if form == "fp32" else 2)
    product = Linear(Product(SIDE, SIDE, SIDE), low=False, grouped=False)
    share = reached.products[form] * powered(kernels.device, reached, form)
    return share * kernels.linear(product) * one.products / product.product.flops


def _host(
    measured: Sequence[Measured],
    works: Sequence[StepWork],
    start: ClusterConfig,
    kernels: Sequence[Rates],
) -> ClusterConfig:
    ranks = max((one.run.parallel.ranks for one in measured), default=1)
    form = measured[0].run.precision.format if measured else kernels[0].format
    names = [name for name in EXPECTED if ranks > 1 or name not in LINKS]

    def rates(x: Vector) -> dict[str, float]:
        return {name: EXPECTED[name] * exp(value) for name, value in zip(names, x, strict=True)}

    def residuals(x: Vector) -> Vector:
        now = rates(x)
        given = _stated(start, now, form, ranks)
        found = [
            _residuals(one, _priced(work, given)) for one, work in zip(measured, works, strict=True)
        ]
        alone = [_alone(one, now) for one in kernels if one.format == form]
        held = [value / SURE.get(name, SPREAD) for name, value in zip(names, x, strict=True)]
        return [*chain.from_iterable([*found, *alone]), *held]

    return _stated(start, rates(least_squares(residuals, [0.0] * len(names))), form, ranks)


def _alone(one: Rates, now: Mapping[str, float]) -> Vector:
    """Return the residuals of kernels that were measured by themselves, in deviations."""
    products = now["peak_tflops"] * TERA / one.products
    memory = now["memory_gbps"] * GIGA / one.memory
    return [log(products) / ALONE, log(memory) / ALONE]


def _stated(
    start: ClusterConfig, rates: Mapping[str, float], form: str, ranks: int
) -> ClusterConfig:
    update: dict[str, Any] = {name: value for name, value in rates.items() if name != "attention"}
    update["peak_tflops"] = {**start.peak_tflops, form: rates["peak_tflops"]}
    update["reached"] = {**start.reached, "attention": rates["attention"]}
    if ranks > 1:
        update["fast_link_devices"] = ranks
    return start.model_copy(update=update)


def _rounded(cluster: ClusterConfig) -> ClusterConfig:
    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(inner) for name, inner in value.items()}
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    return cluster.model_copy(update={name: short(value) for name, value in cluster})


def _priced(work: StepWork, cluster: ClusterConfig) -> StepTime:
    return priced(work, device_of(cluster), reached_by(cluster))


def _residuals(one: Measured, step: StepTime) -> Vector:
    """Return the residuals of the step, and of its known parts; in deviations."""
    whole = log(step.seconds / one.step_s) / NOISE
    if one.optimizer_s is None or not 0 < one.optimizer_s < one.step_s:
        return [whole]
    return [whole, log(step.parts["optimizer"] / one.optimizer_s) / (4 * NOISE)]


def least_squares(residuals: Callable[[Vector], Vector], x: Vector) -> Vector:
    """Minimise squares by Gauss-Newton, with the steps of Levenberg and Marquardt."""
    damping = 1.0
    now = residuals(x)
    for _ in range(ROUNDS):
        columns = [_slopes(residuals, x, now, index) for index in range(len(x))]
        normal = [[_dot(one, other) for other in columns] for one in columns]
        damped = [
            [v * (1 + damping * (i == j)) for j, v in enumerate(row)]
            for i, row in enumerate(normal)
        ]
        move = _solved(damped, [-_dot(column, now) for column in columns])
        there = [value + step for value, step in zip(x, move, strict=True)]
        after = residuals(there)
        if _dot(after, after) < _dot(now, now):
            x = there
            now = after
            damping = damping / 5
        else:
            damping *= 5
    return x


def _slopes(residuals: Callable[[Vector], Vector], x: Vector, now: Vector, index: int) -> Vector:
    there = [value + STEP * (i == index) for i, value in enumerate(x)]
    return [(after - before) / STEP for after, before in zip(residuals(there), now, strict=True)]


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _solved(matrix: list[Vector], right: Vector) -> Vector:
    """Return the solution of equations with a positive definite matrix, without pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, row in enumerate(rows):
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[:] = [b - factor * a for b, a in zip(below, row, strict=True)]
    out: Vector = []
    for i, row in reversed(list(enumerate(rows))):
        known = _dot(row[i + 1 : -1], out)
        out.insert(0, (row[-1] - known) / row[i])
    return out
