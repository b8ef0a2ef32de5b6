"""A pseudo-random permutation that computes each element in constant time and stores nothing."""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8


def keys(seed: int, epoch: int, purpose: str, count: int) -> np.ndarray:
    """Return `count` independent uint64 words that depend only on seed, epoch and purpose."""
    # SHAKE gives any number of words from one text; the 1 is the version of the order
    text = f"mtrain order 1|{purpose}|{seed}|{epoch}"
    return np.frombuffer(hashlib.shake_256(text.encode()).digest(8 * count), dtype="<u8").astype(
        np.uint64
    )


def mix64(x: np.ndarray) -> np.ndarray:
    """Scatter the bits of uint64 words by the finaliser of splitmix64, a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A keyed bijection of [0, n): a Feistel network over the smallest even number of bits, cycle
    walking.

    The network permutes [0, 4^k) where 4^k is at least n; a value that lands at n or above goes
    through it again until it lands below (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). At most 4 passes are expected, whatever n is, and nothing is stored but the
    round keys.
    """

    def __init__(self, n: int, round_keys: np.ndarray) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"a permutation needs 1 <= n <= 2^62, not {n}")
        self.n = n
        self._keys = [np.uint64(k) for k in round_keys]
        # both halves of a Feistel network have as many bits, so that each round can be inverted
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        self._drop = np.uint64(64 - half)

    def _network(self, x: np.ndarray) -> np.ndarray:
        left = x >> self._half
        right = x & self._mask
        for key in self._keys:
            # 64 mixed bits, of which one half of the number takes the upper ones
            mixed = mix64(right ^ key) >> self._drop
            previous = left
            left = right
            right = previous ^ mixed
        return (left << self._half) | right

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Return the images of `index` (int64, any shape, in [0, n)) as int64 of its shape."""
        out = self._network(index.astype(np.uint64))
        limit = np.uint64(self.n)
        while (outside := out >= limit).any():
            out[outside] = self._network(out[outside])
        return out.astype(np.int64)
