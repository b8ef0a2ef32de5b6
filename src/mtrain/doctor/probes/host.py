"""A measurement of this machine's processor: numpy's fp32 product, and a copy in memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from mtrain import strict_json
from mtrain.errors import say_page

SIDE = 1024
COPIED_BYTES = 64 << 20
SECONDS = 0.2
LEAST_TRIES = 3


def main() -> None:
    """Print the rates as JSON."""
    import numpy as np

    a = np.ones((SIDE, SIDE), dtype=np.float32)
    product = np.empty_like(a)
    source = np.ones(COPIED_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    found = {
        "gemm_flop_per_s": [2 * SIDE**3 / fastest(lambda: np.matmul(a, a, out=product))],
        "copy_bytes_per_s": [2 * COPIED_BYTES / fastest(lambda: np.copyto(target, source))],
    }
    say_page(strict_json.dumps(found))


def fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls, of which others disturb some."""
    best = float("inf")
    tries = 0
    until = time.perf_counter() + SECONDS
    while tries < LEAST_TRIES or time.perf_counter() < until:
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
        tries += 1
    return best


if __name__ == "__main__":
    main()
