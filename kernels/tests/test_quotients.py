"""Quotients that kernels take on a GPU, in exact arithmetic: the interpreter divides instead."""

from __future__ import annotations

import random
from fractions import Fraction
from types import FunctionType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from mtrain_kernels import runtime
from mtrain_kernels.optimizer import triton


class _Exact:
    """Functions of Triton's language that quotients use, on numbers: sums of products that are
    rounded once.
    """

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Any:
        return _nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b


def _nearest(x: Fraction) -> Any:
    """Return the nearest fp32, ties to even."""
    near = np.float32(float(x))
    around = sorted((np.nextafter(near, np.float32(side)), near) for side in (-np.inf, np.inf))
    every = {value for pair in around for value in pair}
    return min(every, key=lambda value: (abs(Fraction(float(value)) - x), value.view(np.int32) & 1))


@pytest.mark.parametrize("corrected", [True, False])
def test_quotients_round_once_for_constant_divisor(corrected: bool) -> None:
    source = triton.over.fn.__code__
    run = FunctionType(source, {"tl": _Exact, "INTERPRETED": False, "float": float})
    draw = random.Random(0)
    wrong = 0
    for beta in (0.95, 0.999, 1 - 1e-6):
        for step in (1, 7, 400):
            by = np.float32((1 - beta**step) ** 0.5)
            inverse = np.float32(1 / float(by))
            for _ in range(60):
                x = np.float32(draw.uniform(1, 2) * 2.0 ** draw.randint(-60, 30))
                q = (run if corrected else lambda x, by, inverse: x * inverse)(x, by, inverse)
                wrong += q != _nearest(Fraction(float(x)) / Fraction(float(by)))
    assert (wrong == 0) == corrected, wrong


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_quotients_scale_rounds_once_for_any_reciprocal(ulps: int, corrected: bool) -> None:
    """Divide `GREATEST / amax` with the GPU's reciprocal, which is right to one last bit."""

    def reciprocal(y: Any) -> Any:
        exact = np.float32(1 / float(y))
        return (exact.view(np.int32) + np.int32(ulps)).view(np.float32)

    source = runtime.quotient.fn.__code__
    run = FunctionType(source, {"tl": _Exact, "INTERPRETED": False, "reciprocal": reciprocal})
    draw = random.Random(0)
    wrong = 0
    for greatest in (np.float32(448), np.float32(57344)):
        for _ in range(300):
            amax = np.float32(draw.uniform(1, 2) * 2.0 ** draw.randint(-100, 100))
            q = run(greatest, amax) if corrected else greatest * reciprocal(amax)
            wrong += q != _nearest(Fraction(float(greatest)) / Fraction(float(amax)))
    assert (wrong == 0) == corrected, wrong


@pytest.mark.parametrize(("least", "right"), [(-121, True), (-124, False)])
def test_quotients_avoid_subnormal_reciprocals(least: int, right: bool) -> None:
    """Avoid reciprocals that a GPU flushes to 0, with which a scale would be infinite.

    The least divisor of a scale is 2^-119.
    """

    def reciprocal(y: Any) -> Any:
        return np.float32(1 / float(y)) if abs(y) >= 2.0**-126 else np.float32(np.inf)

    run = FunctionType(
        runtime.quotient.fn.__code__,
        {"tl": _Finite, "INTERPRETED": False, "reciprocal": reciprocal},
    )
    draw = random.Random(0)
    wrong = 0
    for _ in range(100):
        x = np.float32(draw.uniform(1, 2))
        y = np.float32(draw.uniform(1, 2) * 2.0**least)
        q = run(x, y)
        wrong += not np.isfinite(q) or q != _nearest(Fraction(float(x)) / Fraction(float(y)))
    assert (wrong == 0) == right, wrong
    for greatest in (448.0, 57344.0):
        assert greatest / 2.0**126 >= 2.0**-121
        assert greatest / np.finfo(np.float32).max >= 2.0**-121


class _Finite(_Exact):
    """Variant of `_Exact` in which infinity stays infinite."""

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Any:
        every = [float(x) for x in (a, b, c)]
        if np.isfinite(every).all():
            return _Exact.fma(a, b, c)
        return np.float32(every[0] * every[1] + every[2])
