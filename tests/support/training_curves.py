"""Numbers of invented runs, as `metrics.jsonl` has them: healthy ones, and ones with a fault from a
known step on.

Seeds draw noise (its size, its tails, and how alike neighbours are), warm-up, decay, growing
batches, slow first steps, pauses after evaluations, and fp16 with its search for a loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Line = dict[str, Any]
VOCABULARY = 32_000
UNTRAINED = math.log(VOCABULARY)
WINDOW = 200
DEVICE_BYTES = float(80 << 30)
PLANNED_S = 1.0


@dataclass
class Curve:
    """A run that a seed draws."""

    seed: int
    steps: int = 1000
    fine_tuned: bool = False
    """True: it begins with trained weights, so its loss falls little."""
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        r = self.random = np.random.default_rng(self.seed)
        count = self.steps
        self.warmup = int(r.integers(20, 300))
        self.decay = r.choice(["cosine", "wsd", "constant"])
        self.noise = float(r.choice([0.004, 0.01, 0.02, 0.04]))
        self.tails = float(r.choice([5, 8, 30]))
        self.alike = float(r.uniform(0, 0.35))
        self.fp16 = bool(r.random() < 0.25)
        self.eval_interval = int(r.choice([50, 100, 200]))
        self.batch = self._batches()
        self.lr = self._rates()
        self.loss = self._losses()
        self.norm = self._norms()
        self.step_s = self._times()
        self.wait = np.clip(r.exponential(0.01, count), 0, 1)
        self.wait[r.random(count) < 0.005] = r.uniform(0.2, 0.7)
        self.wait[:2] = r.uniform(0, 0.9, 2)
        self.peak = DEVICE_BYTES * float(r.uniform(0.5, 0.93))
        self.scale = np.full(count, 2.0 ** r.integers(12, 17))
        self.skipped = np.zeros(count, bool)
        if self.fp16:
            search = int(r.integers(2, 9))
            self.scale[:search] *= 2.0 ** np.arange(search, 0, -1)
            self.skipped[:search] = True
            self.skipped[r.random(count) < 0.001] = True
            self.norm[self.skipped] = math.nan
        self.valid = self._evaluations()
        load = r.dirichlet(np.full(16, 30.0), (count, 4))
        self.load = load * 4096

    def _batches(self) -> np.ndarray:
        whole = 256
        if self.random.random() < 0.5:
            return np.full(self.steps, whole)
        parts = int(self.random.integers(2, 6))
        ramp = int(self.random.integers(100, 500))
        places = np.minimum(np.arange(self.steps) * parts // ramp, parts)
        return whole * (1 + places) // (1 + parts)

    def _rates(self) -> np.ndarray:
        step = np.arange(1, self.steps + 1)
        rise = np.minimum(1, step / self.warmup)
        done = step / self.steps
        if self.decay == "cosine":
            rise *= 0.1 + 0.45 * (1 + np.cos(np.pi * done))
        elif self.decay == "wsd":
            rise *= np.clip((1 - done) / 0.2, 0.05, 1)
        return 3e-4 * rise

    def _wander(self) -> np.ndarray:
        """Return noise with a standard deviation of about 1, of which neighbours are alike.

        A value beyond 7 would be a spike to anybody who sees it.
        """
        raw = self.random.standard_t(self.tails, self.steps) / math.sqrt(1 + 2 / self.tails)
        out = raw.copy()
        for place in range(1, self.steps):
            out[place] = self.alike * out[place - 1] + math.sqrt(1 - self.alike**2) * raw[place]
        return np.clip(out, -7, 7)

    def _losses(self) -> np.ndarray:
        r = self.random
        learned = np.cumsum(self.lr / 3e-4 * np.sqrt(self.batch / 256))
        floor = float(r.uniform(1.6, 2.6))
        power = float(r.uniform(0.25, 0.5))
        begin = float(r.uniform(3, 30))
        start = 2.9 if self.fine_tuned else UNTRAINED + float(r.uniform(0, 0.4))
        self.mean = floor + (start - floor) * (1 + learned / begin) ** -power
        return self.mean * (1 + self.noise * np.sqrt(256 / self.batch) * self._wander())

    def _norms(self) -> np.ndarray:
        r = self.random
        learned = np.cumsum(self.lr / 3e-4)
        usual = float(r.uniform(0.3, 1.5)) * (1 + 8 * np.exp(-learned / r.uniform(10, 60)))
        wide = float(r.choice([0.08, 0.15, 0.25]))
        return usual * np.exp(wide * self._wander()) * (256 / self.batch) ** 0.3

    def _times(self) -> np.ndarray:
        r = self.random
        whole = PLANNED_S * float(r.uniform(0.8, 1.2))
        steps = whole * (0.2 + 0.8 * self.batch / 256)
        steps = steps * np.exp(float(r.choice([0.005, 0.02, 0.06])) * self._wander())
        steps[r.random(self.steps) < 0.01] *= float(r.uniform(1.5, 4))
        steps[:: self.eval_interval] *= float(r.uniform(1, 3))
        steps[:3] *= r.uniform(3, 50, 3)
        return steps

    def _evaluations(self) -> np.ndarray:
        return self.mean * (1.01 + 0.001 * self.random.standard_normal(self.steps))

    def lines(self) -> Iterator[tuple[int, Line]]:
        """Yield the steps, evaluations and memory samples of the run, in order, each with its
        step.
        """
        for place in range(self.steps):
            step = place + 1
            line: Line = {
                "loss": float(self.loss[place]),
                "grad_norm": float(self.norm[place]),
                "lr": float(self.lr[place]),
                "batch_size": int(self.batch[place]),
                "step_s": float(self.step_s[place]),
                "tokens_per_s": float(4096 * self.batch[place] / self.step_s[place]),
                "data_wait_share": float(self.wait[place]),
                "peak_bytes": self.peak,
            }
            if self.batch[place] == 256:
                line["planned_step_s"] = PLANNED_S
            if self.fp16:
                line["loss_scale"] = float(self.scale[place])
            if self.skipped[place]:
                line["skipped"] = True
            if step % 2 == 0:
                load = self.load[place]
                line["expert_load"] = {
                    f"layers.{layer}": row.tolist() for layer, row in enumerate(load)
                }
                line["rank_load"] = load.sum(0).reshape(4, 4).sum(1).tolist()
            yield step, line
            if step % self.eval_interval == 0:
                yield step, {"valid_loss": float(self.valid[place])}
            if step % 100 == 0:
                yield step, {"ranks": [{"peak_bytes": self.peak, "allocated_bytes": self.peak}]}


Spoil = Callable[[Curve, int], None]


def _at(name: str, first: int, last: int, change: Callable[[Any], Any]) -> Spoil:
    """Return a fault that changes the array `name` from `first` to `last` steps after its mark."""

    def spoil(curve: Curve, mark: int) -> None:
        array = getattr(curve, name)
        array[mark - 1 + first : mark - 1 + last] = change(
            array[mark - 1 + first : mark - 1 + last]
        )

    return spoil


def _rising(per_step: float) -> Spoil:
    def spoil(curve: Curve, mark: int) -> None:
        begin = mark - 1
        noise = curve.loss[begin:] / curve.mean[begin:]
        risen = per_step * np.arange(curve.steps - begin)
        curve.loss[begin:] = noise * (curve.mean[begin] + risen)

    return spoil


def _slower(factor: float, over: int = 1) -> Spoil:
    def spoil(curve: Curve, mark: int) -> None:
        grown = np.minimum(1, (1 + np.arange(curve.steps - mark + 1)) / over)
        curve.step_s[mark - 1 :] *= 1 + (factor - 1) * grown

    return spoil


def _planned_less(curve: Curve, mark: int) -> None:
    curve.step_s *= 2.5 / (0.2 + 0.8 * curve.batch / 256)
    curve.batch[:] = 256


def _worse(*shares: float) -> Spoil:
    """Return a fault of evaluations, of which the last one is at the mark."""

    def spoil(curve: Curve, mark: int) -> None:
        every = curve.eval_interval
        first = mark - 1 - (len(shares) - 1) * every
        best = curve.valid[every - 1 : first : every].min()
        for number, share in enumerate(shares):
            curve.valid[first + number * every] = best * (1 + share)

    return spoil


def _full(curve: Curve, mark: int) -> None:
    curve.peak = 0.97 * DEVICE_BYTES


def _floor(curve: Curve, mark: int) -> None:
    curve.fp16 = True
    curve.scale[mark - 1 :] = 1.0
    curve.skipped[mark - 1 :: 3] = True


def _dead(curve: Curve, mark: int) -> None:
    curve.load[mark - 1 :, 2, 5] = 0


def _crowded(curve: Curve, mark: int) -> None:
    curve.load[mark - 1 :, :, 4:8] *= 4


@dataclass(frozen=True)
class Fault:
    """A fault of a curve."""

    alerts: tuple[str, ...]
    """Names of alerts of which each finds it."""
    mark: int
    """The step from which on it can be seen."""
    spoil: Spoil
    noise: float | None = None
    """The most noise of the loss; None: as the seed draws it."""
    after: int = 0
    """Steps from the mark after which it is a fact."""


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda values: values * factor


SPIKE = ("loss_spike",)
NORM = ("grad_norm_spike",)
# A loss that rises fast is a spike first.
RISING = ("loss_rising", "loss_spike")
NAN = ("non_finite",)
FAULTS = (
    *(Fault(SPIKE, mark, _at("loss", 0, 1, _times(2.0))) for mark in (60, 300, 900)),
    *(Fault(SPIKE, mark, _at("loss", 0, 6, _times(1.3)), 0.02) for mark in (45, 250, 700)),
    *(Fault(SPIKE, mark, _at("loss", 0, 40, _times(1.15)), 0.01) for mark in (150, 500)),
    *(Fault(NORM, mark, _at("norm", 0, 1, _times(30.0))) for mark in (70, 400, 950)),
    *(Fault(NORM, mark, _at("norm", 0, 4, _times(8.0))) for mark in (200, 600)),
    *(Fault(RISING, mark, _rising(0.02), 0.01) for mark in (500, 800)),
    *(Fault(RISING, mark, _rising(0.05), 0.02) for mark in (350, 650)),
    *(Fault(("loss_flat",), 1, _rising(0.0), noise, WINDOW) for noise in (0.01, 0.02)),
    *(Fault(("loss_flat",), mark, _rising(0.0), 0.004, WINDOW) for mark in (420, 500)),
    *(Fault(("slow",), mark, _slower(2.0)) for mark in (50, 350, 700)),
    *(Fault(("slow",), mark, _slower(1.8, over=8)) for mark in (450, 850)),
    Fault(("below_plan",), 1, _planned_less),
    *(Fault(("data_wait",), mark, _at("wait", 0, 60, lambda w: w + 0.4)) for mark in (40, 500)),
    Fault(("data_wait",), 800, _at("wait", 0, 200, lambda w: w + 0.25)),
    Fault(("memory",), 1, _full),
    Fault(("dead_expert",), 300, _dead),
    Fault(("overloaded_rank",), 400, _crowded),
    *(Fault(("loss_scale",), mark, _floor) for mark in (120, 640)),
    Fault(("worse_evaluation",), 400, _worse(0.05)),
    Fault(("worse_evaluation",), 600, _worse(0.012, 0.015)),
    Fault(NAN, 333, _at("norm", 0, 1, lambda n: n * math.inf)),
    Fault(NAN, 555, _at("loss", 0, 1, lambda n: n * math.nan)),
    Fault(NAN, 600, _at("valid", 0, 1, lambda n: n * math.nan)),
)


def healthy(seed: int) -> Curve:
    """Return a run without a fault; every fourth one begins with trained weights."""
    return Curve(seed, steps=1000 + 100 * (seed % 3), fine_tuned=seed % 4 == 3)


def faulty(fault: Fault, seed: int) -> Curve:
    """Return a run with a fault, up to 100 steps after its mark."""
    curve = Curve(seed, steps=1200)
    if fault.noise is not None and fault.noise < curve.noise:
        factor = curve.loss / curve.mean
        curve.loss = curve.mean * (1 + (factor - 1) * fault.noise / curve.noise)
        curve.noise = fault.noise
    fault.spoil(curve, fault.mark)
    return curve
