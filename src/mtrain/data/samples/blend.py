"""A blend of corpora: sample number g determines the corpus and its sample by computation."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mtrain.data.samples.permutation import ROUNDS, Permutation, keys
from mtrain.data.samples.token_stream import Samples
from mtrain.errors import ConfigError, Problem

# The fewest samples of a block, in which every part has its share
BLOCK = 1024
# A smaller share would need a block of millions of samples, so `Halves` distributes it instead
SMALL = 1e-6
# (first sample, shares of the parts in any unit) of each stretch; the first starts at 0
Plan = Sequence[tuple[int, Sequence[float]]]


class Halves:
    """The distribution of samples by shares of any ratio, by repeated halving of the parts.

    Of two halves, the one with the smaller share gets its rounded share of the samples of both, and
    the other gets the rest. So the samples of a part never decrease, they add up, and a part is off
    its share by at most as many samples as there are halvings.
    """

    def __init__(self, shares: np.ndarray) -> None:
        """Take float64 [parts] shares, some of them above zero."""
        self._count = len(shares)
        self._cuts: list[tuple[int, int, int, float, bool]] = []
        self.levels = self._cut(shares, 0, len(shares))

    def _cut(self, shares: np.ndarray, first: int, end: int) -> int:
        """Add the cuts of the parts from `first` to `end`; return the most cuts above any part."""
        if end - first < 2:
            return 0
        middle = (first + end) // 2
        left = math.fsum(shares[first:middle])
        right = math.fsum(shares[middle:end])
        least = min(left, right) / (left + right) if left + right else 0.0
        self._cuts.append((first, middle, end, least, left <= right))
        return 1 + max(self._cut(shares, first, middle), self._cut(shares, middle, end))

    def given(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples each part gives; int64 [parts]."""
        out = np.zeros(self._count, np.int64)
        out[0] = samples  # the first of the parts that are not yet cut holds the samples of all
        for first, middle, _, least, left_is_less in self._cuts:
            both = int(out[first])
            # The smaller share is at most one half, so its rounded count grows by at most one with
            # each sample of both, and the rest never falls.
            less = math.floor(least * both + 0.5)
            out[middle] = both - less if left_is_less else less
            out[first] = both - int(out[middle])
        return out


@dataclass(frozen=True)
class Stretch:
    """Consecutive samples of a blend with constant shares."""

    number: int
    first: int
    """The first sample."""
    length: int | None
    """Its number of samples; None for an endless stretch."""
    shares: np.ndarray
    """Shares of the parts, which add up to one."""
    before: np.ndarray
    """The number of samples that each part gave before it."""

    @functools.cached_property
    def halves(self) -> Halves | None:
        """Return the distribution by halves if some shares are small, else None."""
        least = float(self.shares[self.shares > 0].min())
        return Halves(self.shares) if least < SMALL else None

    @functools.cached_property
    def block(self) -> int:
        """Return the samples of a block, in which parts are mixed; the last may be longer."""
        if self.halves is not None:
            return BLOCK
        # with two samples of the smallest part in a block, rounding always leaves it one
        return max(BLOCK, math.ceil(2 / float(self.shares[self.shares > 0].min())))

    @functools.cached_property
    def blocks(self) -> int | None:
        """Return how many blocks it has."""
        return None if self.length is None else max(1, self.length // self.block)

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        ends = np.cumsum(self.shares)
        # rounded sums may end below one, and would then lose the last sample of a stretch
        ends[int(np.flatnonzero(self.shares)[-1]) :] = 1.0
        return ends

    def given(self, samples: int) -> np.ndarray:
        """Return how many of its first samples each part gives, int64 [parts].

        At its end, shares that are whole numbers of samples are exact.
        """
        if self.halves is not None:
            return self.halves.given(samples)
        half = 0.5 if samples == self.length else 0.0
        return np.diff(np.floor(self._ends * samples + half).astype(np.int64), prepend=0)

    def block_of(self, places: np.ndarray) -> np.ndarray:
        """Return the block of each of its samples."""
        found = places // self.block
        return found if self.blocks is None else np.minimum(found, self.blocks - 1)

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the first sample of a block, counted in the stretch, and that of the next one."""
        last = self.blocks is not None and block == self.blocks - 1
        end = self.length if last else (block + 1) * self.block
        assert end is not None
        return block * self.block, end


class Blend:
    """Samples of several parts in given shares, with the interface of `Samples`.

    Sample numbers are divided into blocks, in each of which the parts have places in a keyed order.
    After any number of blocks each part has given its share to within one sample, and its own
    samples 0, 1, 2, ... without a gap.

    `shares` hold for the whole blend, or are a plan over its samples. With `most`, a part stops
    after so many samples (None: never), and the others share the rest; `total` is then the number
    of samples until all parts are used up, else None. Raises ConfigError if no part has a share.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        shares: Sequence[float] | Plan,
        seed: int,
        name: str = "train",
        most: Sequence[int | None] | None = None,
    ) -> None:
        self.parts = list(parts)
        self.seed = seed
        self.name = name
        self.seq_length = parts[0].seq_length
        self.vocab_size = parts[0].vocab_size
        whole: Any = [(0, shares)] if isinstance(shares[0], float | int) else shares
        plan = [(int(first), np.array(each, np.float64)) for first, each in whole]
        if any(each.min() < 0 or not each.sum() > 0 for _, each in plan):
            raise ConfigError([no_weight_problem(name)])
        limits = np.array([np.inf if m is None else m for m in most or [None] * len(parts)])
        self.stretches, self.total = _stretches(plan, limits)
        self._firsts = [stretch.first for stretch in self.stretches]
        self.shares = plan[0][1] / math.fsum(plan[0][1])
        """The shares at the first sample."""
        self._order = functools.lru_cache(maxsize=8)(self._draw)

    def __len__(self) -> int:
        return self.total if self.total is not None else sum(len(part) for part in self.parts)

    def _draw(self, stretch: int, block: int) -> Permutation:
        begin, end = self.stretches[stretch].bounds(block)
        # the first stretch has no number, so that blends without a plan keep their order
        purpose = f"blend {self.name}" + (f" {stretch}" if stretch else "")
        return Permutation(end - begin, keys(self.seed, block, purpose, ROUNDS))

    def places(self, numbers: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each sample and its number there; two int64 [n].

        Raises ConfigError for a sample after all parts have stopped.
        """
        wanted = np.asarray(numbers, np.int64)
        if self.total is not None and len(wanted) and int(wanted.max()) >= self.total:
            raise ConfigError([exhausted_problem(self.name, int(wanted.max()) + 1, self.total)])
        part = np.empty_like(wanted)
        index = np.empty_like(wanted)
        within = np.searchsorted(self._firsts, wanted, side="right") - 1
        for number in np.unique(within):
            stretch = self.stretches[number]
            those = np.flatnonzero(within == number)
            places = wanted[those] - stretch.first
            blocks = stretch.block_of(places)
            for block in np.unique(blocks):
                rows = blocks == block
                found = self._in_block(stretch, int(block), places[rows])
                part[those[rows]], index[those[rows]] = found
        return part, index

    def _in_block(
        self, stretch: Stretch, block: int, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        begin, end = stretch.bounds(block)
        before = stretch.given(begin)
        ends = np.cumsum(stretch.given(end) - before)
        # a place after the permutation is a sample of the part in whose span it lies
        at = self._order(stretch.number, block)(places - begin)
        part = np.searchsorted(ends, at, side="right")
        quota = np.diff(ends, prepend=0)
        return part, at - (ends - quota)[part] + before[part] + stretch.before[part]

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return tokens of the samples with these numbers; int64 [n, seq_length + 1].

        Raises CorruptData for an id outside the vocabulary.
        """
        part, index = self.places(numbers)
        out = np.empty((len(part), self.seq_length + 1), np.int64)
        for i in np.unique(part):
            out[part == i] = self.parts[i].batch(index[part == i])
        return out

    def describe(self) -> dict[str, Any]:
        """Return counts of documents, tokens and samples over all parts."""
        counts = [part.describe() for part in self.parts]
        totals = {key: sum(count[key] for count in counts) for key in counts[0]}
        small = any(stretch.halves is not None for stretch in self.stretches)
        return {**totals, "dealt": "by halves"} if small else totals


def _stretches(
    plan: list[tuple[int, np.ndarray]], most: np.ndarray
) -> tuple[list[Stretch], int | None]:
    """Return the stretches of a plan with limits, and the place without a part left, or None."""
    out: list[Stretch] = []
    used = np.zeros(len(most), np.int64)
    closed = most < 1
    at = 0
    ends = [first for first, _ in plan[1:]] + [None]
    for (_, shares), end in zip(plan, ends, strict=True):
        while end is None or at < end:
            live = np.where(closed, 0.0, shares)
            if not live.any():
                return out, at
            live /= math.fsum(live)
            whole = Stretch(len(out), at, None if end is None else end - at, live, used.copy())
            stretch = _until_used_up(whole, most - used)
            if stretch.length is None:
                return [*out, stretch], None
            if stretch.length:
                out.append(stretch)
                used = used + stretch.given(stretch.length)
                at = at + stretch.length
            left = most - used
            if stretch.length:
                closed |= left < 1
            else:
                # no sample fits any more: close the parts with the least left, or this never ends
                closed |= (live > 0) & (left <= left[live > 0].min())
    raise AssertionError("the last stretch of a plan has no end")


def _until_used_up(stretch: Stretch, left: np.ndarray) -> Stretch:
    """Return the beginning of a stretch in which no part exceeds its remaining samples."""
    live = stretch.shares > 0
    if np.isinf(left[live]).all():
        return stretch
    shortened = stretch
    # rounding gives a part less than one sample above its share, and halves one for each level
    levels = stretch.halves.levels if stretch.halves is not None else 0
    for excess in (0.0, 0.5, *range(1, 2 + levels)):
        length = max(0, int(np.floor((left[live] - excess) / stretch.shares[live]).min()))
        if stretch.length is not None:
            length = min(length, stretch.length)
        shortened = replace(stretch, length=length)
        if (shortened.given(length) <= left).all():
            break
    return shortened


def no_weight_problem(name: str) -> Problem:
    """Return the problem of a blend whose weights are all zero."""
    rule = f"cannot be used because all weights of the {name} split are zero: no corpus is read"
    return Problem(
        "MT352", "data.blend_weights", None, rule, "data.blend_weights=null, or one above zero"
    )


def exhausted_problem(
    name: str, wanted: int, total: int, most: Sequence[float] | None = None
) -> Problem:
    """Return the problem of a blend whose corpora reach their epochs before the run ends."""
    rule = (
        f"the {name} split has {total} samples before every corpus has had its epochs, and the run"
        f" needs {wanted}"
    )
    fix = "fewer trainer.train_iters, or more data.blend_max_epochs"
    return Problem("MT640", "data.blend_max_epochs" if most else "", most, rule, fix)


def unweighted_problem(name: str, wanted: int, total: int) -> Problem:
    """Return the problem of a blend without weights, which Megatron-LM reads only once."""
    rule = (
        f"without weights Megatron's order has {total} samples of {name}, each once, and the run"
        f" needs {wanted}"
    )
    return Problem(
        "MT640", "data.blend_weights", None, rule, "data.blend_weights=[...], or data.order=keyed"
    )


def by_sizes(sizes: Sequence[int]) -> list[tuple[int, Sequence[float]]]:
    """Return the plan in which part i gives exactly sizes[i] of the first sum(sizes) samples."""
    # two stretches of equal shares: counts are exact at the end of a stretch of known length
    return [(0, [float(size) for size in sizes]), (sum(sizes), [float(size) for size in sizes])]
