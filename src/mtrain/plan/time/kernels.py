"""Seconds of kernels by their shapes: the larger of arithmetic and memory traffic, with what tiles
leave unused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtrain.config.engine.formats import bytes_of
from mtrain.models.graph import FP32
from mtrain.plan.time.device import MICRO, Device
from mtrain.plan.time.efficiencies import Efficiencies, powered
from mtrain.plan.time.work import Linear, Pairs

# A multiprocessor computes a tile of this size of the result at once.
TILE_M = 128
TILE_N = 256
# Queries that attention computes at once. A block on the diagonal is computed whole, although
# its mask hides half of it.
ATTENTION_TILE = 128
HOST_TILE = 64
# A product that accumulates a gradient reads and writes it. A host writes the product first, and
# then reads it, which makes four.
ADDED = 2
ADDED_ON_HOST = 4
# Recipe -> passes over a tensor to cast it. `tensorwise` needs the largest value first; `nvfp4`
# also rotates the transpose.
PASSES = {"delayed": 1, "tensorwise": 2, "blockwise": 1, "mxfp8": 1, "nvfp4": 3}
# The backward of attention computes five products, its forward two.
BACKWARD_PRODUCTS = 2.5
# Rate of cuDNN's attention in 8 bits against that in 16: the softmax is as slow in both.
FP8_ATTENTION = 1.3
# FLOPs of attention's forward for a query, a key and an element of the width of a head.
PRODUCTS_OF_A_PAIR = 4


@dataclass(frozen=True)
class Kernels:
    """The cost of products on a device in a run."""

    device: Device
    reached: Efficiencies
    format: str
    """Number format of activations."""
    low_format: str
    recipe: str
    """Recipe of low precision, or the format again."""
    element: int
    gradient: int = FP32
    """Bytes of an element of a gradient that is added up."""
    attends_in_fp8: bool = False

    def linear(self, one: Linear) -> float:
        """Return the seconds of a linear layer's forward."""
        p = one.product
        return self._product(p.m, p.n, p.k, p.batch, one) + self._casts(one, p.m * p.k)

    def linear_back(self, one: Linear) -> float:
        """Return the seconds of its backward: the gradients of inputs, and of weights that are
        trained.
        """
        p = one.product
        inputs = self._product(p.m, p.k, p.n, p.batch, one)
        if one.factors == "frozen":
            return inputs
        if one.factors == "activations":
            return inputs + self._product(p.n, p.k, p.m, p.batch, one)
        times = ADDED_ON_HOST if self.device.on_host else ADDED
        weights = self._product(p.n, p.k, p.m, p.batch, one, times * self.gradient)
        return inputs + weights + self._casts(one, p.m * p.n)

    def _casts(self, one: Linear, elements: int) -> float:
        """Return the seconds of reading an operand and writing it in low precision, as it is and
        transposed.
        """
        if not one.low or self.recipe == self.format:
            return 0.0
        # a generation that multiplies any layout needs no transpose, unless scales lie along rows
        copies = 1 if self.device.blackwell and self.recipe in ("delayed", "tensorwise") else 2
        each = self.element * PASSES[self.recipe] + copies * bytes_of(self.low_format)
        return elements * one.product.batch * each / (self.device.memory * self.reached.memory)

    def _product(self, m: int, n: int, k: int, batch: int, one: Linear, result: int = 0) -> float:
        """Return the seconds of products whose result moves so many bytes an element; 0: it is
        written in the format of activations.
        """
        low = one.low and self.recipe != self.format
        m, n, k = (max(1, size) for size in (m, n, k))
        form = self.low_format if low else self.format
        peak = self.device.peaks[form]
        reached = self.reached.products[self.recipe if low else self.format]
        if one.grouped:
            reached *= self.reached.grouped * (self.reached.grouped_low if low else 1.0)
        e = self.reached
        d = self.device
        reached *= powered(d, e, form)
        rows, columns = (math.ceil(size / tile) for size, tile in ((m, TILE_M), (n, TILE_N)))
        waves = rows * columns * batch / d.multiprocessors
        # a tile is begun and ended in a time, in which faster multiprocessors would multiply more
        lost = e.tile_us * MICRO * peak / d.multiprocessors / (2 * TILE_M * TILE_N)
        reached *= waves / (waves + e.waves_lost) * k / (k + lost)
        # tiles at the edges of a large result are computed whole; a small one, or a host, has
        # smaller ones
        whole = min(m, n) >= TILE_M and not d.on_host
        made = rows * TILE_M * columns * TILE_N if whole else m * n
        arithmetic = 2 * made * k * batch / (peak * reached)
        each = 1 if low else self.element
        moved = batch * (each * (m * k + n * k) + (result or self.element) * m * n)
        return max(arithmetic, moved / (d.memory * e.memory))

    def attention(self, pairs: Pairs) -> float:
        """Return the seconds of attention forward."""
        return self._pairs(pairs, 1.0, self.reached.attention)

    def attention_back(self, pairs: Pairs) -> float:
        """Return the seconds of attention backward."""
        return self._pairs(pairs, BACKWARD_PRODUCTS, self.reached.attention_backward)

    def _pairs(self, pairs: Pairs, products: float, reached: float) -> float:
        """Return the seconds of the products, and of the softmax's exponentials that do not overlap
        with them.
        """
        rate = self._attention_rate()
        d = self.device
        blocks = math.ceil(pairs.rows / (HOST_TILE if d.on_host else ATTENTION_TILE))
        seen = pairs.flops * (1 + 1 / blocks)
        exponentials = (
            seen / (PRODUCTS_OF_A_PAIR * pairs.width) / (d.peaks[self.format] * d.exponentials)
        )
        return products * seen / (rate * reached) + self.reached.softmax * exponentials

    def _attention_rate(self) -> float:
        rate = self.device.peaks[self.format] * math.pow(
            self.device.power.get(self.format, 1.0), self.reached.power
        )
        return rate * FP8_ATTENTION if self.attends_in_fp8 else rate

    def moved(self, size: float) -> float:
        """Return the seconds of memory-bound operations on so many bytes."""
        return size / (self.device.memory * self.reached.memory)
