"""Micro-batches of one data-parallel rank, as torch tensors.

Every rank reads the tokens that it needs for itself; nothing is broadcast. The memory maps of the
ranks of a machine share the page cache, so the bytes are read once; which samples make a step is a
pure function of the number of samples consumed, so that tensor-parallel ranks cannot disagree; and
there is no collective that can hang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NotRequired, Protocol, TypedDict, cast

import numpy as np
import torch

from mtrain.data.balance import by_work
from mtrain.data.fim import FillInTheMiddle
from mtrain.data.once import first_once, repeated
from mtrain.errors import ConfigError, Problem


class Source(Protocol):
    """Where samples come from, such as `Samples`."""

    def __len__(self) -> int: ...

    def batch(self, numbers: np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1] for n global sample numbers."""
        ...


class MicroBatch(TypedDict):
    """What a forward step takes; tensors are [micro_batch_size, seq_length], packed ones [1, micro
    * seq_length].

    A family of models may add tensors of its own: its chunks are called with them by their names.
    """

    tokens: torch.Tensor
    """int64: the input."""
    labels: torch.Tensor
    """int64: the token that follows each input token."""
    loss_mask: torch.Tensor
    """float32: 0 where the prediction does not count, else 1, or what it weighs: see `averaged`."""
    position_ids: torch.Tensor
    """int64: 0, 1, ... in each sample, or in each document of packed samples."""
    cu_seqlens: NotRequired[torch.Tensor]
    """packed: int32 [documents + 1], where each document starts, and the end of the last."""
    loss_counts: NotRequired[torch.Tensor]
    """float32: what each prediction adds to the count that the sum of losses is divided by; absent:
    `loss_mask`.
    """
    padding: NotRequired[torch.Tensor]
    """bool: True where there is no token.

    A token is what was read of the data, whether it is predicted from or not: routers of experts,
    speed and model FLOPs count these alone. Absent: every position holds one.
    """


@dataclass(frozen=True)
class Packing:
    """How the documents of a sample are kept apart."""

    ends: tuple[int, ...]
    """Tokens that end a document."""
    multiple: int = 1
    """Documents are padded to a multiple of this many tokens."""


Collator = Callable[[torch.Tensor, np.ndarray], MicroBatch]
"""What is learned from samples: their micro-batch, from their tokens, int64 [n, seq_length + 1],
and their global numbers, int64 [n]. A function of these alone, random numbers included, so that
every rank and a resumed run make the same.
"""


def next_token(
    masked_eod: int | None = None,
    packing: Packing | None = None,
    moved: FillInTheMiddle | None = None,
) -> Collator:
    """Return each token is predicted from those before it.

    With `masked_eod` no loss counts for the prediction that follows this token. With `packing`,
    samples are packed documents. `moved` says what of them is read in another order.
    """

    def form(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        if moved is not None:
            windows = torch.from_numpy(moved(windows.numpy(), numbers))
        if packing is not None:
            return pack(windows, packing)
        # in numpy: the thread that reads ahead must not start threads of torch's beside those of
        # the step
        text = windows.numpy()
        tokens = np.ascontiguousarray(text[:, :-1])
        labels = np.ascontiguousarray(text[:, 1:])
        mask = np.ones(tokens.shape, np.float32)
        if masked_eod is not None:
            mask[tokens == masked_eod] = 0.0
        positions = np.tile(np.arange(tokens.shape[1], dtype=np.int64), (len(tokens), 1))
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
        return cast(MicroBatch, {key: torch.from_numpy(value) for key, value in arrays.items()})

    return form


class GlobalBatches:
    """The share of one data-parallel rank in each step.

    A step is the samples [consumed, consumed + size), its size the global one unless it is given.

    Micro-batch m of rank r takes the samples consumed + m * (micro * dp_size) + r * micro + j, so
    the samples of a step are the same for any dp_size; `balanced` deals those out by the squares of
    the lengths of their packed documents. `form` makes a micro-batch of them. With `limit` it is an
    evaluation: samples from that number on, and those that were there before, only fill a step: no
    loss of theirs counts, and they are padding. `average` is `trainer.loss_average`. `depths` is
    how many tokens behind the next one are predicted as well: see `further_masks`. Raises
    ConfigError if the global batch cannot be cut evenly.
    """

    def __init__(
        self,
        samples: Source,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        form: Collator | None = None,
        limit: int | None = None,
        average: str = "token",
        balanced: bool = False,
        depths: int = 0,
    ) -> None:
        stride = micro_batch_size * dp_size
        if global_batch_size % stride or not 0 <= dp_rank < dp_size:
            rule = (
                f"must be a multiple of micro_batch_size * dp = {micro_batch_size} * {dp_size} ="
                f" {stride}"
            )
            fix = f"trainer.global_batch_size={max(1, round(global_batch_size / stride)) * stride}"
            raise ConfigError(
                [Problem("MT606", "trainer.global_batch_size", global_batch_size, rule, fix)]
            )
        self.samples = samples
        self.form = form or next_token()
        self.limit = limit
        self.average = average
        self.depths = depths
        self.counted = 0
        """Samples of an evaluation."""
        end = 0
        if limit is not None:
            self.counted, end = first_once(samples, limit)
        self.steps = -(-end // global_batch_size)
        """Steps of an evaluation."""
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self._rank = dp_rank
        self._ranks = dp_size
        self._stride = stride
        self._balanced = balanced

    @property
    def pads(self) -> bool:
        """Return whether there are samples that only fill a step, and are padding."""
        return self.limit is not None and self.counted < self.steps * self.global_batch_size

    def numbers(self, consumed_samples: int, size: int | None = None) -> np.ndarray:
        """Global sample numbers of the step on this rank; int64 [micro-batches, micro_batch_size].

        Raises ValueError if a step of `size` samples cannot be cut evenly.
        """
        count, rest = divmod(size or self.global_batch_size, self._stride)
        if rest:
            raise ValueError(
                f"a step of {size} samples is no multiple of {self._stride}, one micro-batch per"
                " rank"
            )
        places = np.arange(count * self._stride).reshape(count, self._ranks, -1)
        if self._balanced:
            works = [
                self._work(consumed_samples + first)
                for first in range(0, places.size, self._stride)
            ]
            places = by_work(np.concatenate(works), self.micro_batch_size, self._ranks)
        return consumed_samples + places[:, self._rank]

    def _work(self, first: int) -> np.ndarray:
        """What attention of the samples from `first` on, one of each place of a micro-batch of all
        ranks, takes.
        """
        numbers = first + np.arange(self._stride, dtype=np.int64)
        windows = torch.from_numpy(self.samples.batch(numbers))
        rows = zip(windows.split(1), numbers[:, None], strict=True)
        bounds = [
            self.form(tokens, number)["cu_seqlens"].numpy().astype(np.float64)
            for tokens, number in rows
        ]
        return np.array([np.square(np.diff(ends)).sum() for ends in bounds])

    def microbatches(self, consumed_samples: int, size: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of the step of `size` samples that starts after
        `consumed_samples` samples.
        """
        numbers = self.numbers(consumed_samples, size)
        fills = self._fills(numbers) if self.pads else np.zeros(numbers.shape, np.bool_)
        numbers = np.where(fills, 0, numbers)  # behind the last sample there may be none to read
        windows = torch.from_numpy(self.samples.batch(numbers.ravel()))
        parts = zip(windows.split(self.micro_batch_size), numbers, strict=True)
        batches = [self.form(tokens, samples) for tokens, samples in parts]
        if self.pads:
            for batch, part in zip(batches, torch.from_numpy(fills), strict=True):
                self._leave_out(batch, part)
        return [self._weighed(batch) for batch in batches]

    def _fills(self, numbers: np.ndarray) -> np.ndarray:
        """Which samples of an evaluation do not count; bool, in the shape of their numbers."""
        assert self.limit is not None
        return (numbers >= self.limit) | repeated(self.samples, numbers.ravel()).reshape(
            numbers.shape
        )

    def _leave_out(self, batch: MicroBatch, part: torch.Tensor) -> None:
        """Make padding of the samples that are true in `part` [micro_batch_size].

        Every micro-batch says what is padding, also where nothing is: graphs replay one.
        """
        batch["loss_mask"].view(self.micro_batch_size, -1)[part] = 0.0
        padding = batch.get("padding", torch.zeros_like(batch["loss_mask"], dtype=torch.bool))
        padding.view(self.micro_batch_size, -1)[part] = True
        batch["padding"] = padding

    def _weighed(self, batch: MicroBatch) -> MicroBatch:
        further = further_masks(batch, self.depths, self.average, self.micro_batch_size)
        batch = averaged(batch, self.average, self.micro_batch_size)
        return batch if further is None else cast(MicroBatch, {**batch, FURTHER: further})


FURTHER = "further_masks"
"""Of a micro-batch whose model predicts more than the next token: float32 [b, s, depths], the
`loss_mask` of each depth, averaged for itself as `averaged` says, so that it adds up to the count
of its losses.
"""


def further_masks(batch: MicroBatch, depths: int, average: str, rows: int) -> torch.Tensor | None:
    """`FURTHER` of a micro-batch of `rows` sequences that is not averaged yet; None: nothing more
    is predicted.

    From a position, depth d predicts what the position d behind it predicts, where that is in the
    same document, or in the same row of what is not packed.
    """
    if not depths:
        return None
    mask = batch["loss_mask"]
    bounds = batch.get("cu_seqlens")
    flat = mask.flatten()
    length = len(flat) // rows
    ends = torch.arange(1, rows + 1) * length if bounds is None else bounds[1:].long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    end_of = ends.repeat_interleave(ends - starts)
    masks = []
    for depth in range(1, depths + 1):
        inside = torch.arange(len(flat)) + depth < end_of
        moved = torch.where(inside, flat.roll(-depth), 0.0).view_as(mask)
        masks.append(
            averaged(cast(MicroBatch, {**batch, "loss_mask": moved}), average, rows)["loss_mask"]
        )
    return torch.stack(masks, dim=-1)


def averaged(batch: MicroBatch, average: str, rows: int) -> MicroBatch:
    """Return a micro-batch of `rows` sequences whose losses are averaged over tokens, samples or
    sequences.

    The loss of a step is the sum over its predictions of loss_mask * loss, divided by the sum of
    loss_counts, both over the whole global batch. `token`: each prediction that counts weighs 1 and
    adds 1 to the count. `sample`: those of a sample, which is a document where documents are
    packed, weigh 1 together and add 1. `sequence`: the same of a row. What has no prediction that
    counts adds nothing. A count is a whole number that stands at the first prediction of its
    sample, so no layout that splits a sample over ranks changes it.
    """
    if average == "token":
        return batch
    mask = batch["loss_mask"]
    flat = mask.flatten()
    bounds = batch.get("cu_seqlens")
    if average == "sample" and bounds is not None:
        lengths = bounds.diff().long()
    else:
        lengths = torch.full((rows,), len(flat) // rows)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    whole = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, owner, flat.double())
    weights = torch.where(flat > 0, flat / whole[owner], 0.0)
    places = (flat > 0).nonzero().flatten()
    owners = owner[places]
    counts = torch.zeros_like(flat)
    counts[places[owners != owners.roll(1)]] = 1.0
    if len(places):
        counts[places[0]] = 1.0
    own = {"loss_mask": weights.to(mask.dtype).view_as(mask), "loss_counts": counts.view_as(mask)}
    return cast(MicroBatch, {**batch, **own})


def pack(windows: torch.Tensor, packing: Packing) -> MicroBatch:
    """Return samples as one row of documents that do not see each other.

    `windows` is int64 [n, seq_length + 1]. Each document of a sample is padded at its end to a
    multiple of `packing.multiple`, and what then no longer fits into the sample is left out. No
    loss counts for padding, nor where a document ends: what follows is another's.
    """
    length = windows.shape[1] - 1
    ending = torch.isin(windows, torch.tensor(packing.ends))
    rows: list[torch.Tensor] = []
    starts: list[int] = []
    for window, ends in zip(windows, ending, strict=True):
        place, begin = _placed(ends[:-1], length, packing.multiple)
        row = torch.zeros((4, length), dtype=torch.int64)
        kept = place < length
        there = torch.ones(length, dtype=torch.int64)
        row[:, place[kept]] = torch.stack([window[:-1], window[1:], (~ends[:-1]).long(), there])[
            :, kept
        ]
        starts += [len(rows) * length + start for start in begin]
        rows.append(row)
    tokens, labels, counted, read = torch.cat(rows, dim=1).unsqueeze(1)
    bounds = torch.tensor([*starts, len(rows) * length], dtype=torch.int32)
    lengths = bounds.diff().long()
    positions = torch.arange(tokens.shape[1]) - bounds[:-1].long().repeat_interleave(lengths)
    batch = MicroBatch(
        tokens=tokens.contiguous(),
        labels=labels.contiguous(),
        loss_mask=counted.float(),
        position_ids=positions.unsqueeze(0),
        cu_seqlens=bounds,
    )
    return batch if packing.multiple == 1 else cast(MicroBatch, {**batch, "padding": read == 0})


def _placed(ends: torch.Tensor, length: int, multiple: int) -> tuple[torch.Tensor, list[int]]:
    """Where each token of a sample goes, and where each document that fits begins; `ends` [length]
    is boolean.
    """
    cuts = [0, *(ends.nonzero().flatten() + 1).tolist(), length]
    place = torch.arange(length)
    begin = []
    shift = 0
    for start, stop in pairwise(cuts):
        if start == stop:
            continue
        if start + shift < length:
            begin.append(start + shift)
        place[start:stop] += shift
        shift += -(stop - start) % multiple
    return place, begin
