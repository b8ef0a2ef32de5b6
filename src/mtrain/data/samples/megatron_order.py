"""The corpus of each sample of a blend in Megatron's order: the one furthest behind its weight.

Sample i comes from the corpus d with the largest w_d * max(i, 1) - n_d, where n_d is the number of
samples that d gave before, and the lowest d of several. A sample depends on all before it, so the
counts n at regular places are computed once, as far as samples are needed. Many pieces are computed
at a time: from guessed counts, a piece soon reaches the counts of the whole sequence, and it is
accepted only if the piece before it ends with the counts that it began with.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtrain.data.samples import megatron_cache
from mtrain.data.samples.blend import Blend
from mtrain.data.samples.token_stream import Samples
from mtrain.data.store.cache import Arrays, build_arrays, name_of
from mtrain.data.store.indexed import IndexedDataset
from mtrain.errors import ConfigError, CorruptData

# Samples between two places whose counts are stored
BLOCK = 4096
# The most pieces that are computed at once
LANES = 1024
FEWEST = 64
# The most samples of a piece; for smaller shares than a few samples of it, guesses fail and the
# pieces are computed one after another.
LONGEST = 1 << 17


class Greedy:
    """The map of a sample to its corpus and number there, for `weights` that add up to one."""

    def __init__(self, weights: np.ndarray) -> None:
        self.weights = np.asarray(weights, np.float64)
        # after about this many samples, every corpus has been picked twice, and a guess of the
        # counts has settled to the true ones
        settled = 2 / max(float(self.weights.min()), 1e-9)
        self._piece = BLOCK * int(min(max(1, -(-settled // BLOCK)), LONGEST // BLOCK))
        self._known = [np.zeros(len(self.weights), np.int64)]
        self._lanes = LANES
        self._block = functools.lru_cache(maxsize=16)(self._computed)

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each sample and its number there; two int64 [n]."""
        blocks, places = np.divmod(np.asarray(numbers, np.int64), BLOCK)
        part = np.empty_like(places)
        index = np.empty_like(places)
        for block in np.unique(blocks):
            rows = blocks == block
            parts, indices = self._block(int(block))
            part[rows] = parts[places[rows]]
            index[rows] = indices[places[rows]]
        return part, index

    def given(self, samples: int) -> np.ndarray:
        """Return how many of the first `samples` samples each corpus gives; int64 [corpora]."""
        block, rest = divmod(samples, BLOCK)
        self._extend(block)
        parts = self._block(block)[0][:rest]
        return self._known[block] + np.bincount(parts, minlength=len(self.weights))

    def _computed(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus and the number of each sample of a block."""
        self._extend(block)
        before = self._known[block]
        counts = before[None].astype(np.float64)
        picks = _run(self.weights, counts, np.array([block * BLOCK]), BLOCK)[:, 0].astype(np.int64)
        index = np.empty_like(picks)
        for d in np.unique(picks):
            rows = picks == d
            index[rows] = before[d] + np.arange(int(rows.sum()))
        return picks, index

    def _extend(self, block: int) -> None:
        """Compute the counts up to the beginning of a block and some more."""
        if block < len(self._known):
            return
        while len(self._known) <= block:
            pieces = -(-(block - len(self._known) + 1) * BLOCK // self._piece)
            kept = self._side_by_side(min(self._lanes, max(pieces, FEWEST)))
            # pieces after a wrong guess are thrown away: compute fewer at once while guesses fail
            self._lanes = max(1, min(LANES, 2 * kept))

    def _side_by_side(self, lanes: int) -> int:
        """Compute `lanes` pieces from the last known place on; return the right guesses."""
        origin = (len(self._known) - 1) * BLOCK
        firsts = origin + self._piece * np.arange(lanes, dtype=np.int64)
        counts = np.empty((lanes, len(self.weights)), np.float64)
        early = firsts - self._piece
        counts[0] = self._known[-1]
        # guesses start one piece early, so that they have settled where their piece begins
        if lanes > 1:
            counts[1:] = _likely(self.weights, early[1:])
            moving = counts[1:]
            _run(self.weights, moving, early[1:], self._piece)
        begun = counts.copy()
        kept = np.empty((self._piece // BLOCK, lanes, len(self.weights)), np.int64)
        for i in range(len(kept)):
            _run(self.weights, counts, firsts + i * BLOCK, BLOCK)
            kept[i] = counts
        right = int(np.argmin(np.append((counts[:-1] == begun[1:]).all(axis=1), False))) + 1
        for lane in range(right):
            self._known += [kept[i, lane].copy() for i in range(len(kept))]
        return right


def _likely(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Return a guess of the counts [n, corpora] after `samples` [n]; it adds up to them."""
    exact = weights * samples[:, None].astype(np.float64)
    counts = np.floor(exact)
    missing = samples - counts.sum(axis=1).astype(np.int64)
    rank = (counts - exact).argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    return counts + (rank < missing[:, None])


def _run(weights: np.ndarray, counts: np.ndarray, firsts: np.ndarray, steps: int) -> np.ndarray:
    """Continue the rows of `counts` [n, corpora] in place from samples `firsts` [n]; return the
    picks int16 [steps, n].
    """
    rows = np.arange(len(counts))
    picks = np.empty((steps, len(counts)), np.int16)
    error = np.empty_like(counts)
    for step in range(steps):
        reached = np.maximum(firsts + step, 1).astype(np.float64)
        np.multiply(weights, reached[:, None], out=error)
        error -= counts
        pick = error.argmax(axis=1)
        counts[rows, pick] += 1.0
        picks[step] = pick
    return picks


# The last epoch is shuffled separately if less than this share of it is needed
FINAL_EPOCH = 0.80
# The share of samples that megatron-core adds to each corpus of a blend
SURPLUS = 0.005
# Blends of at most so many samples are counted at open; for larger ones the surplus suffices
SURELY = 1 << 22
CHUNK = 1 << 20
# Sequences between two whose place in the stream is stored
STRIDE = 1024


@dataclass(frozen=True)
class Shape:
    """The numbers that decide the order of a split, together with the lengths of its sequences."""

    first: int
    """The first sequence of the split."""
    sequences: int
    tokens: int
    seq_length: int
    seed: int
    epochs: int
    samples: int
    """Their total number."""
    together: int
    """The samples before the last epoch if that is shuffled separately, else all."""

    @property
    def final_apart(self) -> bool:
        """Return whether the last epoch is shuffled separately."""
        return self.together < self.samples


def shape_of(
    dataset: IndexedDataset, sequences: range, seq_length: int, seed: int, requested: int | None
) -> Shape:
    """Return the shape of a split of which `requested` samples are needed; None for one epoch."""
    tokens = _start(dataset, sequences.stop) - _start(dataset, sequences.start)
    epochs = 1 if requested is None else max(1, -(-(requested * seq_length + 1) // tokens))
    samples = (epochs * tokens - 1) // seq_length
    together = samples
    if epochs > 1 and requested is not None:
        before = ((epochs - 1) * tokens - 1) // seq_length
        if requested - before < int(FINAL_EPOCH * ((tokens - 1) // seq_length)):
            together = before
    return Shape(
        sequences.start, len(sequences), tokens, seq_length, seed, epochs, samples, together
    )


def _start(dataset: IndexedDataset, sequence: int) -> int:
    """Return the place of a sequence's first token; for sequence `len`, the end of the corpus."""
    if sequence >= len(dataset):
        return dataset.num_tokens
    return int(dataset.pointers[sequence]) // dataset.dtype.itemsize


def write(shape: Shape, lengths: np.ndarray, array: Callable[[str, str, int], np.ndarray]) -> None:
    """Fill the arrays of an order; `array(name, dtype, length)` makes a plain ndarray.

    `sequences` int32: the sequences of all epochs in their order. `starts` int64: the place in the
    stream of every 1024th of them, and its end. `shuffled` uint32, or int64 if that is too small:
    the sample at each place.
    """
    # the legacy generator, in megatron-core's order of calls: another one gives another order
    random = np.random.RandomState(shape.seed)
    order = array("sequences", "<i4", shape.epochs * shape.sequences)
    one = np.arange(shape.first, shape.first + shape.sequences, dtype=np.int32)
    order.reshape(shape.epochs, shape.sequences)[:] = one
    cut = (shape.epochs - 1) * shape.sequences if shape.final_apart else 0
    for part in (order[:cut], order[cut:]):
        if len(part):
            random.shuffle(part)
    # megatron-core's own bound of its shuffle index, one below what uint32 could number
    wide = shape.samples >= np.iinfo(np.uint32).max - 1
    shuffled = array("shuffled", "<i8" if wide else "<u4", shape.samples)
    for first in range(0, shape.samples, CHUNK):
        stop = min(first + CHUNK, shape.samples)
        shuffled[first:stop] = np.arange(first, stop)
    for part in (shuffled[: shape.together], shuffled[shape.together :]):
        if len(part):
            random.shuffle(part)
    write_starts(order, lengths, array)


def write_starts(
    order: np.ndarray, lengths: np.ndarray, array: Callable[[str, str, int], np.ndarray]
) -> None:
    """Fill `starts` for the sequences in `order`."""
    starts = array("starts", "<i8", -(-len(order) // STRIDE) + 1)
    end = 0
    at = 0
    for first in range(0, len(order), CHUNK):
        sums = np.add.reduceat(
            lengths[order[first : first + CHUNK]].astype(np.int64),
            np.arange(0, min(CHUNK, len(order) - first), STRIDE),
        )
        starts[at : at + len(sums)] = end + np.cumsum(sums) - sums
        end += int(sums.sum())
        at += len(sums)
    starts[at] = end


class MegatronSamples(Samples):
    """The samples of a range of sequences in Megatron's order; `len` counts those of all epochs.

    Raises ConfigError if the range is too small for one sample, CorruptData for a cache of
    Megatron-LM that does not fit.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        sequences: range,
        seq_length: int,
        seed: int,
        vocab_size: int,
        name: str,
        requested: int | None,
        cache: Path,
        megatron_cached: megatron_cache.MegatronCache | None = None,
    ) -> None:
        first = _start(dataset, sequences.start)
        end = _start(dataset, sequences.stop)
        self._cache = cache
        self._take(dataset, sequences, first, end, seq_length, vocab_size, name)
        shape = shape_of(dataset, sequences, seq_length, seed, requested)
        self.shape = shape
        found = None
        if megatron_cached is not None:
            wanted = megatron_cache.Wanted(
                dataset.prefix, name, seed, seq_length, requested, megatron_cached.shares
            )
            found = megatron_cache.arrays_of(
                megatron_cached.folder, wanted, shape.epochs * shape.sequences, shape.samples
            )
        arrays = _made(dataset, shape, cache) if found is None else _adopted(dataset, shape, found)
        self.from_cache = found is not None
        self._sequences, self._starts, self._shuffled = (
            arrays[k] for k in ("sequences", "starts", "shuffled")
        )
        self._count = shape.samples

    def once(self) -> MegatronSamples:
        """Return the samples of one epoch of the same sequences, in Megatron-LM's order for one."""
        if self.shape.epochs == 1:
            return self
        return MegatronSamples(
            self.dataset,
            self.documents,
            self.seq_length,
            self.shape.seed,
            self.vocab_size,
            self.name,
            None,
            self._cache,
        )

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return tokens of the samples with these numbers; int64 [n, seq_length + 1].

        After the last sample comes the first again. Raises CorruptData for an id outside the
        vocabulary.
        """
        out = np.empty((len(numbers), self.seq_length + 1), np.int64)
        for row, number in zip(out, numbers, strict=True):
            row[:] = self.dataset.tokens[self.tokens_of(int(number))]
        if len(out) and (out.min() < 0 or out.max() >= self.vocab_size):
            row, column = np.argwhere((out < 0) | (out >= self.vocab_size))[0]
            number = int(numbers[row])
            raise self._outside(int(self.tokens_of(number)[column]), f"{self.name} sample {number}")
        return out

    def tokens_of(self, number: int) -> np.ndarray:
        """Return the place in the corpus of each token of a sample; int64 [seq_length + 1]."""
        number %= self._count
        need = self.seq_length + 1
        dataset = self.dataset
        place = int(self._shuffled[number]) * self.seq_length
        chunk = int(np.searchsorted(self._starts, place, side="right")) - 1
        at = chunk * STRIDE
        skipped = place - int(self._starts[chunk])
        begins = []
        counts = []
        found = 0
        while found < need and at < len(self._sequences):
            some = np.asarray(self._sequences[at : at + STRIDE])
            if int(some.min()) < 0 or int(some.max()) >= len(dataset):
                raise CorruptData(
                    f"{dataset.idx}: its order names sequences {some.min()} to {some.max()}"
                )
            lengths = dataset.lengths[some].astype(np.int64)
            ends = np.cumsum(lengths)
            # the part of each sequence after the skipped tokens and before the last needed one
            unused = np.clip(skipped - (ends - lengths), 0, lengths)
            used = np.clip(skipped + need - found - (ends - lengths), 0, lengths) - unused
            begins.append(dataset.pointers[some] // dataset.dtype.itemsize + unused)
            counts.append(used)
            found += int(used.sum())
            skipped = max(0, skipped - int(ends[-1]))
            at += STRIDE
        if found < need:
            raise CorruptData(
                f"{dataset.idx}: its order ends {need - found} tokens before sample {number} does"
            )
        count = np.concatenate(counts)
        shift = np.concatenate(begins) - (np.cumsum(count) - count)
        return np.arange(need) + np.repeat(shift, count)

    def describe(self) -> dict[str, int]:
        """Return the numbers of documents, tokens and samples, and the settings of their order."""
        s = self.shape
        counts = {"documents": s.sequences, "tokens": s.tokens, "samples": s.samples}
        return {**counts, "epochs": s.epochs, "together": s.together}


def _made(dataset: IndexedDataset, shape: Shape, cache: Path) -> Arrays:
    """Return the arrays of an order, from the cache if it has them."""
    stamp = os.stat(dataset.idx)
    key = [*vars(shape).values(), str(dataset.idx.resolve()), stamp.st_size, stamp.st_mtime_ns]
    size = shape.epochs * shape.sequences + shape.samples
    folder = cache / f"order-{name_of(key)}"
    return build_arrays(folder, size, lambda array: write(shape, dataset.lengths, array))


def _adopted(dataset: IndexedDataset, shape: Shape, found: Arrays) -> Arrays:
    """Return the arrays of an order that Megatron-LM made.

    Raises CorruptData for those of another corpus.
    """
    order = found["sequences"]
    for first in range(0, len(order), CHUNK):
        some = order[first : first + CHUNK]
        if int(some.min()) < shape.first or int(some.max()) >= shape.first + shape.sequences:
            file = order.filename  # type: ignore[attr-defined]
            raise CorruptData(
                f"{file}: sequences {some.min()} to {some.max()}, and the split has"
                f" {shape.first} to {shape.first + shape.sequences - 1}"
            )

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        found[name] = np.zeros(length, dtype)
        return found[name]

    write_starts(order, dataset.lengths, array)
    megatron_cache.compare(found, dataset.lengths, shape.seq_length, STRIDE)
    return found


def normalized(weights: Sequence[float]) -> np.ndarray:
    """Return weights that add up to one, by the same additions as megatron-core's."""
    array = np.array(weights, np.float64)
    return array / np.sum(array)


def cut(count: int, split: Sequence[float]) -> list[tuple[range, tuple[float, float]]]:
    """Return the sequences of each split, rounded as in megatron-core, with their shares."""
    ends = [0.0, *itertools.accumulate(normalized(split).tolist())]
    bounds = [round(end * float(count)) for end in ends]
    return list(
        zip(
            (range(a, b) for a, b in itertools.pairwise(bounds)),
            itertools.pairwise(ends),
            strict=True,
        )
    )


# A function that opens the samples of a corpus, as many as requested; None for one epoch
Part = Callable[[int | None], MegatronSamples]


class MegatronBlend(Blend):
    """Samples of several parts in the order of megatron-core's BlendedDataset of `total` samples.

    Raises ConfigError if a part has too few samples, unless they may `repeat`.
    """

    parts: list[MegatronSamples]  # type: ignore[assignment]

    def __init__(
        self,
        parts: Sequence[MegatronSamples],
        weights: np.ndarray,
        total: int,
        name: str,
        *,
        repeat: bool = False,
    ) -> None:
        self.parts = list(parts)
        self.name = name
        self.total = total
        self.shares = weights
        self.seq_length = parts[0].seq_length
        self.vocab_size = parts[0].vocab_size
        self.stretches = []
        self._greedy = Greedy(weights)
        self._repeat = repeat
        if total <= SURELY:
            self._suffice(self._greedy.given(total))

    def once(self, samples: int) -> MegatronBlend:
        """Return the blend of parts with one epoch each, which may repeat.

        It is this blend itself if its parts have one epoch and suffice for the first `samples`.
        """
        parts = [part.once() for part in self.parts]
        given = self._greedy.given(min(samples, self.total or samples))
        enough = all(many <= len(part) for many, part in zip(given.tolist(), parts, strict=True))
        if enough and all(part.shape.epochs == 1 for part in self.parts):
            return self
        return MegatronBlend(parts, self.shares, self.total or samples, self.name, repeat=True)

    def places(self, numbers: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each sample and its number there; the first follows the last."""
        part, index = self._greedy.places(np.asarray(numbers, np.int64) % max(1, self.total or 1))
        counts = np.zeros(len(self.parts), np.int64)
        np.maximum.at(counts, part, index + 1)
        self._suffice(counts)
        return part, index

    def _suffice(self, counts: np.ndarray) -> None:
        """Raise ConfigError if a part must give more samples than megatron-core makes of it."""
        for part, count in zip(self.parts, counts.tolist(), strict=True):
            if count > len(part) and not self._repeat:
                rule = (
                    f"cannot be kept because the run needs {count} samples of"
                    f" {part.dataset.prefix}, and Megatron's order makes {len(part)}"
                )
                fix = "data.order=keyed, or other data.blend_weights"
                raise ConfigError.of("MT640", "data.order", "megatron", rule, fix)


def blended(
    parts: Sequence[Part], weights: Sequence[float] | None, samples: int | None, name: str
) -> MegatronBlend:
    """Return the blend of corpora with `samples` samples.

    With None, it has one epoch of each corpus. Without `weights` too, cut at `samples`.
    """
    if weights is None or samples is None:
        made = [part(None) for part in parts]
        sizes = [len(one) for one in made]
        return MegatronBlend(made, normalized(sizes), min(samples or sum(sizes), sum(sizes)), name)
    # normalized twice, as megatron-core does: the last bits of a weight decide ties
    shares = normalized(weights)
    target = [math.ceil(samples * share) for share in shares.tolist()]
    made = [
        part(math.ceil(count * (1 + SURPLUS))) for part, count in zip(parts, target, strict=True)
    ]
    return MegatronBlend(made, normalized(shares.tolist()), sum(target), name)
