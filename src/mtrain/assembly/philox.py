"""Random numbers by element index: Philox4x64-10 (Salmon et al., Parallel random numbers: as easy
as 1, 2, 3, 2011).

Element i of a stream is half i % 2 of the 64-bit word i // 2, so any part of a tensor can be drawn
separately. Every operation is exactly rounded or an integer's, so all devices make the same bits: a
device's own normal numbers differ by the last bits of its logarithm and cosine. On the host numpy
draws the words, elsewhere torch does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

PER_BLOCK = 8
"""Elements that one counter gives."""
ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
LOW = 0xFFFFFFFF
BITS = 8
"""An octave of probabilities has 2^BITS cells, in each of which the quantile of the normal
distribution is a line.
"""
REST = 23 - BITS
"""Bits of a float's fraction that say where in its cell a number lies."""
LEAST = 0.5
"""The smallest number whose quantile is needed, in units of 2^-32."""
DIGEST = "d1e71821486b0d934ce822d71366891a7c6f55184f79ab0c7baf290e3a8c4bc5"
"""Result of `digest` on every device."""


@dataclass(frozen=True)
class Stream:
    """The random numbers of one tensor."""

    key: int
    """A number of 128 bits."""

    @classmethod
    def of(cls, name: str) -> Stream:
        """Return the stream of a name."""
        return cls(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big"))

    def rows(
        self, top: int, bottom: int, width: int, span: tuple[int, int], device: torch.device | None
    ) -> Tensor:
        """Return the bits of the elements of columns `span` of rows `top` to `bottom` of a matrix
        of `width` columns, on a device, or, with None, on the host.

        Returns:
            int32 [bottom - top, columns].
        """
        left, right = span
        if device is None:
            return self._on_host(top * width, bottom * width).view(-1, width)[:, left:right]
        if right - left == width:
            return self._elsewhere(
                torch.tensor([top * width]), (bottom - top) * width, device
            ).view(-1, width)
        return self._elsewhere(torch.arange(top, bottom) * width + left, right - left, device)

    def _on_host(self, start: int, stop: int) -> Tensor:
        first = start // PER_BLOCK
        last = -(-stop // PER_BLOCK)
        # numpy counts before it draws
        drawn = np.random.Philox(key=self.key, counter=(first - 1) % 2**256).random_raw(
            (last - first) * 4
        )
        return torch.from_numpy(drawn.view(np.int32))[
            start - first * PER_BLOCK : stop - first * PER_BLOCK
        ]

    def _elsewhere(self, starts: Tensor, count: int, device: torch.device) -> Tensor:
        """Return `count` elements from each of `starts` (int64 [n], on the host): int32 [n,
        count].
        """
        blocks = -(-count // PER_BLOCK) + int(bool((starts % PER_BLOCK).any()))
        first = (starts // PER_BLOCK).to(device).unsqueeze(1)
        words = self.words((first + torch.arange(blocks, device=device)).flatten())
        elements = words.view(torch.int32).view(len(starts), -1)
        shifts = (starts % PER_BLOCK).unique()
        if len(shifts) == 1:
            return elements[:, int(shifts) : int(shifts) + count]
        return elements.gather(
            1, (starts % PER_BLOCK).to(device).unsqueeze(1) + torch.arange(count, device=device)
        )

    def words(self, counters: Tensor) -> Tensor:
        """Return the four words of each counter (int64 [n]) in int64 [n, 4], by torch's integers,
        which wrap around.
        """
        x0 = counters
        x1 = torch.zeros_like(counters)
        x2 = x1
        x3 = x1
        keys = [self.key & (2**64 - 1), self.key >> 64]
        for _ in range(ROUNDS):
            high0, low0 = _product(MULTIPLIERS[0], x0)
            high1, low1 = _product(MULTIPLIERS[1], x2)
            x0 = high1 ^ x1 ^ _signed(keys[0])
            x2 = high0 ^ x3 ^ _signed(keys[1])
            x1 = low1
            x3 = low0
            keys = [(key + step) % 2**64 for key, step in zip(keys, KEY_STEPS, strict=True)]
        return torch.stack([x0, x1, x2, x3], dim=1)


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 64 bits of `factor` times each of `x`, both unsigned."""
    upper = factor >> 32
    lower = factor & LOW
    high = _shifted(x)
    low = x & LOW
    middle = high * lower + _shifted(low * lower)
    carried = low * upper + (middle & LOW)
    return high * upper + _shifted(middle) + _shifted(carried), x * _signed(factor)


def _shifted(x: Tensor) -> Tensor:
    """Return the upper half of unsigned words."""
    return (x >> 32) & LOW


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def uniform(bits: Tensor) -> Tensor:
    """Return numbers in [0, 1) of 24 bits each, float32."""
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24


def normal(bits: Tensor) -> Tensor:
    """Return normal numbers of mean 0 and standard deviation 1, float32: the quantiles of the 32
    bits of each.
    """
    bits = bits.contiguous()
    # the last bit that a float has no room for is rounded, alike everywhere
    place = ((bits & 0x7FFFFFFF).float() + LEAST).view(torch.int32)
    cell = ((place >> REST) - _first_cell()).flatten()
    quantiles, slopes = _tables(bits.device)
    inside = (place & ((1 << REST) - 1)).float()
    # two operations, so that no device makes one rounding of two
    moved = slopes.index_select(0, cell).view_as(inside) * inside
    return torch.copysign(
        quantiles.index_select(0, cell).view_as(inside) + moved, bits.view(torch.float32)
    )


def _first_cell() -> int:
    return int(np.float32(LEAST).view(np.int32)) >> REST


@cache
def edges() -> list[float]:
    """Return the quantile at each edge of a cell, for probabilities from 2^-33 to a half; positive,
    as of the upper tail.

    They are rounded to float32 where they are used. None lies so near the middle between two floats
    that the last bits of the C library's logarithm could decide which it becomes; a test says so.
    """
    last = int(np.float32(2**31).view(np.int32)) >> REST
    cells = np.arange(_first_cell(), last + 1, dtype=np.int32) << REST
    return [-NormalDist().inv_cdf(float(place) / 2**32) for place in cells.view(np.float32)]


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the quantile at the beginning of each cell, and how much it changes by each step
    inside.
    """
    quantiles = torch.tensor(edges(), dtype=torch.float64).float()
    ahead = torch.cat([quantiles[1:], quantiles[-1:]])
    return quantiles.to(device), ((ahead - quantiles) * 2.0**-REST).to(device)


def digest(device: str) -> str:
    """Return the SHA-256 of the numbers of streams on a torch device, of whole and cut rows; it is
    `DIGEST` on each.
    """
    whole = hashlib.sha256()
    probe = torch.empty(0, device=device)
    where = None if probe.is_cpu else probe.device
    for top, bottom, width, span in (
        (0, 3, 1000, (0, 1000)),
        (5, 70, 96, (24, 48)),
        (2, 40, 37, (5, 30)),
    ):
        bits = Stream.of(f"{width}").rows(top, bottom, width, span, where)
        for drawn in (normal(bits), uniform(bits), normal(bits).bfloat16().float()):
            whole.update(drawn.cpu().numpy().tobytes())
    return whole.hexdigest()
