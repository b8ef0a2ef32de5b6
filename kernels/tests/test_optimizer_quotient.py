"""The quotient that AdamW's kernel takes on a GPU, in exact arithmetic: the interpreter divides instead."""

from __future__ import annotations

import random
from fractions import Fraction
from types import FunctionType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from mtrain_kernels.optimizer import triton


class _Exact:
    """What `over` asks of Triton's language, on numbers: sums of products that are rounded once."""

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Any:
        return _nearest(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b


def _nearest(x: Fraction) -> Any:
    """fp32, ties to even."""
    near = np.float32(float(x))
    around = sorted((np.nextafter(near, np.float32(side)), near) for side in (-np.inf, np.inf))
    every = {value for pair in around for value in pair}
    return min(every, key=lambda value: (abs(Fraction(float(value)) - x), value.view(np.int32) & 1))


@pytest.mark.parametrize("corrected", [True, False])
def test_a_quotient_is_rounded_once_where_the_divisor_stays(corrected: bool) -> None:
    source = triton.over.fn.__code__
    run = FunctionType(source, {"tl": _Exact, "INTERPRETED": False, "float": float})
    draw, wrong = random.Random(0), 0
    for beta in (0.95, 0.999, 1 - 1e-6):
        for step in (1, 7, 400):
            by = np.float32((1 - beta**step) ** 0.5)
            inverse = np.float32(1 / float(by))
            for _ in range(60):
                x = np.float32(draw.uniform(1, 2) * 2.0 ** draw.randint(-60, 30))
                q = (run if corrected else lambda x, by, inverse: x * inverse)(x, by, inverse)
                wrong += q != _nearest(Fraction(float(x)) / Fraction(float(by)))
    assert (wrong == 0) == corrected, wrong
