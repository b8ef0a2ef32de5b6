"""Seconds of kernels by their shapes: the larger of arithmetic and memory traffic, with unused
parts of tiles; and of collectives, on the fast links of a domain or on the network, by where the
ranks of a group are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import log2
from typing import Literal

from mtrain.config.engine.formats import bytes_of
from mtrain.models.graph import FP32, Exchange
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
        """Return the seconds of its backward: gradients of inputs, and of trained weights."""
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
        """Return the seconds of quantising an operand, as it is and transposed."""
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
        """Return the seconds of products, and of the softmax's exponentials outside them."""
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


# How often a tensor goes around a group: a reduction scatters, then gathers.
ROUNDS = {"gather": 1, "scatter": 1, "reduce": 2, "ring": 1, "all_to_all": 1}


@dataclass(frozen=True)
class Group:
    """Ranks that are `stride` apart."""

    size: int
    stride: int

    def inside(self, device: Device) -> int:
        """Return how many of the ranks are in one fast domain."""
        return max(1, min(self.size, device.domain // self.stride))


@dataclass(frozen=True)
class Share:
    """Weights of a rank that are trained, and the ranks that have the same."""

    elements: float
    group: Group
    """Ranks of one copy, over which the weights may be sharded."""
    copies: Group
    """One of each copy (HSDP): they have the same shard."""


@dataclass(frozen=True)
class Links:
    """The cost of the messages of a run's groups on a device."""

    device: Device
    reached: Efficiencies

    def seconds(self, group: Group, exchange: Exchange, *, once: bool = False) -> float:
        """Return the seconds of one exchange; `once`: a row goes to a domain once, and there once
        to each rank that takes it.
        """
        if group.size == 1:
            return 0.0
        waits = self.waits(group)
        if exchange.kind == "all_to_all":
            return waits + self._all_to_all(group, exchange, once)
        share = (group.size - 1) / group.size
        return waits + ROUNDS[exchange.kind] * exchange.bytes * share / self.rate(group)

    def collective(
        self, group: Group, kind: Literal["gather", "scatter", "reduce"], size: float
    ) -> float:
        """Return the seconds of a collective on a tensor of so many bytes in all."""
        return self.seconds(group, Exchange("tp", kind, int(size)))

    def waits(self, group: Group) -> float:
        """Return the latency of a collective in seconds."""
        # The latency is fitted for each doubling of a group.
        return self.reached.latency_us * MICRO * log2(group.size)

    def rate(self, group: Group) -> float:
        """Return the bytes per second of a ring of a group."""
        inside = group.inside(self.device)
        d = self.device
        e = self.reached
        fast = d.fast * e.fast_link
        # Each rank of a domain has its own card: a ring between domains uses all of them.
        return fast if inside == group.size else min(fast, inside * d.network * e.network)

    def _all_to_all(self, group: Group, exchange: Exchange, once: bool) -> float:
        inside = group.inside(self.device)
        d = self.device
        e = self.reached
        domains = group.size / inside
        near = exchange.bytes * (inside - 1) / group.size
        far = exchange.bytes * (1 - 1 / domains)
        if once and exchange.messages > 1:
            row = exchange.bytes / exchange.messages
            far = row * _met(domains, exchange.messages) * (1 - 1 / domains)
            near = row * _met(group.size, exchange.messages) * (1 - 1 / inside)
        # Both kinds of messages travel at the same time.
        return max(near / (d.fast * e.fast_link), far / (d.network * e.network))

    def sent(self, size: float, stride: int) -> float:
        """Return the seconds of a tensor to the rank `stride` further on."""
        near = stride < self.device.domain
        if near:
            rate = self.device.fast * self.reached.fast_link
        else:
            rate = self.device.network * self.reached.network
        return self.reached.latency_us * MICRO + size / rate


def _met(places: float, messages: int) -> float:
    """Return the expected number of distinct places that messages reach at random."""
    return places * (1 - (1 - 1 / places) ** messages)
