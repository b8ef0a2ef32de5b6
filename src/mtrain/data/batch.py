"""Micro-batches of one data-parallel rank, as torch tensors.

Every rank reads its own tokens; nothing is broadcast, so no collective can hang. The memory maps of
the ranks of a machine share the page cache, so the bytes are read once. The samples of a step are a
pure function of the number of samples consumed, so tensor-parallel ranks cannot disagree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NotRequired, Protocol, TypedDict, cast

import numpy as np
import torch

from mtrain.data.chats.samples import NOTHING, ChatSamples, Sample
from mtrain.data.samples.megatron_order import MegatronBlend, MegatronSamples
from mtrain.data.samples.packing import balance_by_work
from mtrain.data.samples.token_stream import FillInTheMiddle
from mtrain.data.samples.whole_documents import BlendOfDocuments, WholeDocuments
from mtrain.errors import ConfigError


class Source(Protocol):
    """A source of samples by number, such as `Samples`."""

    def __len__(self) -> int: ...

    def batch(self, numbers: np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1] for n global sample numbers."""
        ...


class MicroBatch(TypedDict):
    """The input of a forward step: tensors [micro_batch_size, seq_length], or packed ones [1, micro
    * seq_length].

    A model family may add its own tensors, which its chunks get as keyword arguments.
    """

    tokens: torch.Tensor
    """int64: the input."""
    labels: torch.Tensor
    """int64: the token that follows each input token."""
    loss_mask: torch.Tensor
    """float32: the weight of each prediction, 0 for one that does not count; see `averaged`."""
    position_ids: torch.Tensor
    """int64: 0, 1, ... in each sample, or in each document of packed samples."""
    cu_seqlens: NotRequired[torch.Tensor]
    """packed: int32 [documents + 1], the start of each document, and the end of the last."""
    loss_counts: NotRequired[torch.Tensor]
    """float32: the addend of each prediction to the divisor of the loss; without it `loss_mask`."""
    reference_log_probabilities: NotRequired[torch.Tensor]
    """The log-probability of each label by a reference model, which the step adds; or that of each
    answer, at its first label.
    """
    answers: NotRequired[torch.Tensor]
    """packed answers: int64, the answer of each label, counted over the micro-batch."""
    desirable: NotRequired[torch.Tensor]
    """float64: 1 at the first label of each answer that is chosen, else 0."""
    margins: NotRequired[torch.Tensor]
    """float64: the margin of a pair, at the first label of its chosen answer; else 0."""
    mismatched_divergence: NotRequired[torch.Tensor]
    """float64 []: the divergence on answers to other prompts, which the step adds."""
    advantages: NotRequired[torch.Tensor]
    """float32: how much better an answer is than its group, or than expected, at its tokens."""
    returns: NotRequired[torch.Tensor]
    """float32: the target of a critic's value before each label."""
    old_values: NotRequired[torch.Tensor]
    """float32: that value when the answer was sampled."""
    sampled_log_probabilities: NotRequired[torch.Tensor]
    """float32: nats of each label in the distribution that it was sampled from."""
    old_log_probabilities: NotRequired[torch.Tensor]
    """float32: nats of each label by the policy that sampled, computed by the trainer."""
    teacher_ids: NotRequired[torch.Tensor]
    """int32 [n, seq_length, k]: the likeliest tokens of a teacher at each place."""
    teacher_log_probabilities: NotRequired[torch.Tensor]
    """float32 [n, seq_length, k + 1]: nats of these tokens, and of all others together."""
    routes: NotRequired[torch.Tensor]
    """int16 [micro_batch_size, seq_length, layers, k]: the experts that the sampler sent each token
    to, in this rank's layers of experts; -1 for tokens that it did not read.
    """
    other_tokens: NotRequired[torch.Tensor]
    """An answer to another prompt after each prompt; these four keys are as those above."""
    other_labels: NotRequired[torch.Tensor]
    other_loss_mask: NotRequired[torch.Tensor]
    other_padding: NotRequired[torch.Tensor]
    padding: NotRequired[torch.Tensor]
    """bool: True at positions without a token; without it, every position has one.

    Routers of experts, speed and model FLOPs count only tokens, whether or not they are learned.
    """


@dataclass(frozen=True)
class Packing:
    """The settings that separate the documents of a sample."""

    ends: tuple[int, ...]
    """Tokens that end a document."""
    multiple: int = 1
    """Documents are padded to a multiple of this many tokens."""


# A function that collates samples to a micro-batch, from their tokens, int64 [n, seq_length + 1],
# and their global numbers, int64 [n]. It depends only on these, random numbers included, so that
# every rank and a resumed run make the same.
Collator = Callable[[torch.Tensor, np.ndarray], MicroBatch]


def next_token_collator(
    masked_eod: int | None = None,
    packing: Packing | None = None,
    moved: FillInTheMiddle | None = None,
) -> Collator:
    """Return the collator for next-token prediction.

    The prediction after `masked_eod` does not count. With `packing`, samples are packed documents.
    `moved` reorders parts of documents first.
    """

    def collator(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        # a reordered document keeps its length, so packing finds its end where it was
        if moved is not None:
            windows = torch.from_numpy(moved(windows.numpy(), numbers))
        if packing is not None:
            return pack(windows, packing)
        # in numpy: in the prefetch thread, torch would start threads that compete with the step's
        text = windows.numpy()
        tokens = np.ascontiguousarray(text[:, :-1])
        labels = np.ascontiguousarray(text[:, 1:])
        mask = np.ones(tokens.shape, np.float32)
        if masked_eod is not None:
            mask[tokens == masked_eod] = 0.0
        positions = np.tile(np.arange(tokens.shape[1], dtype=np.int64), (len(tokens), 1))
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
        return cast(MicroBatch, {key: torch.from_numpy(value) for key, value in arrays.items()})

    return collator


class GlobalBatches:
    """The share of one data-parallel rank in each step.

    A step is the samples [consumed, consumed + size), by default of the global batch size.

    Micro-batch m of rank r takes the samples consumed + m * (micro * dp_size) + r * micro + j, so
    the samples of a step are the same for any dp_size; `balanced` distributes them by the squares
    of the lengths of their packed documents. `collator` collates them. A `limit` makes this an
    evaluation: samples from that number on, and repeated ones, are padding that only fills a step.
    `average` is `trainer.loss_average`. `depths` is how many tokens after the next one are
    predicted as well: see `further_masks`. Raises ConfigError if the global batch cannot be divided
    evenly.
    """

    def __init__(
        self,
        samples: Source,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        collator: Collator | None = None,
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
            raise ConfigError.of("MT606", "trainer.global_batch_size", global_batch_size, rule, fix)
        self.samples = samples
        self.collator = collator or next_token_collator()
        self.limit = limit
        self.average = average
        self.depths = depths
        self.counted = 0
        """Samples of an evaluation."""
        end = 0
        if limit is not None:
            self.counted, end = distinct_samples(samples, limit)
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
        """Return whether some samples are padding that only fills a step."""
        return self.limit is not None and self.counted < self.steps * self.global_batch_size

    def of_rank(self, dp_rank: int) -> GlobalBatches:
        """Return the share of another data-parallel rank in the same steps."""
        other = copy.copy(self)
        other._rank = dp_rank
        return other

    def numbers(self, consumed_samples: int, size: int | None = None) -> np.ndarray:
        """Return the sample numbers of a step on this rank; int64 [micro-batches,
        micro_batch_size].

        Raises ValueError if a step of `size` samples cannot be divided evenly.
        """
        count, rest = divmod(size or self.global_batch_size, self._stride)
        if rest:
            raise ValueError(
                f"a step of {size} samples is not a multiple of {self._stride}, one micro-batch"
                " per rank"
            )
        places = np.arange(count * self._stride).reshape(count, self._ranks, -1)
        if self._balanced:
            works = [
                self._work(consumed_samples + first)
                for first in range(0, places.size, self._stride)
            ]
            places = balance_by_work(np.concatenate(works), self.micro_batch_size, self._ranks)
        return consumed_samples + places[:, self._rank]

    def _work(self, first: int) -> np.ndarray:
        """Return the attention work of one micro-batch of all ranks, from sample `first` on."""
        # Only attention differs between samples: all have seq_length tokens, and every other
        # operation costs the same for each token.
        numbers = first + np.arange(self._stride, dtype=np.int64)
        windows = torch.from_numpy(self.samples.batch(numbers))
        rows = zip(windows.split(1), numbers[:, None], strict=True)
        bounds = [
            self.collator(tokens, number)["cu_seqlens"].numpy().astype(np.float64)
            for tokens, number in rows
        ]
        return np.array([np.square(np.diff(ends)).sum() for ends in bounds])

    def microbatches(self, consumed_samples: int, size: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of the step of `size` samples after `consumed_samples`."""
        numbers = self.numbers(consumed_samples, size)
        fills = self._fills(numbers) if self.pads else np.zeros(numbers.shape, np.bool_)
        numbers = np.where(fills, 0, numbers)  # there may be no sample after the last one
        batches = self._collated(numbers, self.samples.batch(numbers.ravel()))
        if self.pads:
            for batch, part in zip(batches, torch.from_numpy(fills), strict=True):
                self._leave_out(batch, part)
        return [self._weighed(batch) for batch in batches]

    def made_of(
        self, numbers: np.ndarray, changed: Callable[[np.ndarray], np.ndarray]
    ) -> list[MicroBatch]:
        """Return micro-batches of any samples, int64 [micro-batches, micro_batch_size]; `changed`
        gets their tokens, int64 [n, seq_length + 1], and returns those to use.
        """
        windows = changed(self.samples.batch(numbers.ravel()))
        return [self._weighed(batch) for batch in self._collated(numbers, windows)]

    def _collated(self, numbers: np.ndarray, windows: np.ndarray) -> list[MicroBatch]:
        parts = zip(torch.from_numpy(windows).split(self.micro_batch_size), numbers, strict=True)
        return [self.collator(tokens, samples) for tokens, samples in parts]

    def _fills(self, numbers: np.ndarray) -> np.ndarray:
        """Return which samples of an evaluation do not count; bool, in the shape of `numbers`."""
        assert self.limit is not None
        return (numbers >= self.limit) | is_repeated(self.samples, numbers.ravel()).reshape(
            numbers.shape
        )

    def _leave_out(self, batch: MicroBatch, part: torch.Tensor) -> None:
        """Turn the samples that are True in `part` [micro_batch_size] into padding.

        Every micro-batch has the padding tensor, even if it is all False, as CUDA graphs replay
        one input structure.
        """
        for key in ("loss_mask", OTHER + "loss_mask"):
            if key in batch:
                batch[key].view(self.micro_batch_size, -1)[part] = 0.0  # type: ignore[literal-required]
        padding = batch.get("padding", torch.zeros_like(batch["loss_mask"], dtype=torch.bool))
        padding.view(self.micro_batch_size, -1)[part] = True
        batch["padding"] = padding

    def _weighed(self, batch: MicroBatch) -> MicroBatch:
        further = further_masks(batch, self.depths, self.average, self.micro_batch_size)
        batch = averaged(batch, self.average, self.micro_batch_size)
        return batch if further is None else cast(MicroBatch, {**batch, FURTHER: further})


# Key of a micro-batch for multi-token prediction: float32 [b, s, depths], the `loss_mask` of each
# depth, averaged by itself as in `averaged`, so that it adds up to the count of its losses.
FURTHER = "further_masks"


def further_masks(batch: MicroBatch, depths: int, average: str, rows: int) -> torch.Tensor | None:
    """Return `FURTHER` of a micro-batch of `rows` sequences before averaging; None without depths.

    At a position, depth d predicts what the position d places later predicts, if that is in the
    same document, or in the same row of an unpacked batch.
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
    """Return a micro-batch of `rows` sequences with loss weights for tokens, samples or sequences.

    The loss of a step is the sum over its predictions of loss_mask * loss, divided by the sum of
    loss_counts, both over the whole global batch. `token`: each prediction that counts weighs 1 and
    adds 1 to the count. `sample`: the predictions of a sample, or of a packed document, weigh 1
    together and add 1. `sequence`: the same for a row. `answer`: each prediction weighs 1, and
    those of a row add 1; `pair`: those of a chosen answer add 1, of every second row or packed
    answer. The count of a sample is placed at its first prediction, so no layout that splits a
    sample over ranks changes it.
    """
    if average == "token":
        return batch
    mask = batch["loss_mask"]
    flat = mask.flatten()
    bounds = batch.get("cu_seqlens")
    if average in ("sample", "pair") and bounds is not None:
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
    # `roll` compares the first prediction with the last, which may be of the same sample
    if len(places):
        counts[places[0]] = 1.0
    if average in ("answer", "pair"):
        if average == "pair":
            # Padding at the end of a packed row is a document, and no answer.
            answer = batch["answers"].flatten() if "answers" in batch else owner
            counts = torch.where(answer % 2 == 0, counts, 0.0)
        return cast(MicroBatch, {**batch, "loss_counts": counts.view_as(mask)})
    own = {"loss_mask": weights.to(mask.dtype).view_as(mask), "loss_counts": counts.view_as(mask)}
    return cast(MicroBatch, {**batch, **own})


def pack(windows: torch.Tensor, packing: Packing) -> MicroBatch:
    """Return samples as one row of documents that do not attend to each other.

    `windows` is int64 [n, seq_length + 1]. Each document of a sample is padded to a multiple of
    `packing.multiple`, and tokens that then exceed the sample are left out. Padding and the end of
    a document, where the next token belongs to another one, do not count for the loss.
    """
    length = windows.shape[1] - 1
    ending = torch.isin(windows, torch.tensor(packing.ends))
    rows: list[torch.Tensor] = []
    starts: list[int] = []
    for window, ends in zip(windows, ending, strict=True):
        place, begin = _placed(ends[:-1], length, packing.multiple)
        kept = place < length
        present = torch.ones(length, dtype=torch.int64)
        columns = torch.stack([window[:-1], window[1:], (~ends[:-1]).long(), present])
        # zeros stay where padding moved the tokens away: id 0, no loss, and not present
        row = torch.zeros((4, length), dtype=torch.int64)
        row[:, place[kept]] = columns[:, kept]
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
    """Return the place of each token of a sample, and of the start of each document that fits.

    `ends` [length] is boolean.
    """
    cuts = [0, *(ends.nonzero().flatten() + 1).tolist(), length]
    place = torch.arange(length)
    begin = []
    shift = 0
    for start, stop in pairwise(cuts):
        # the last token may end a document, and no other follows it
        if start == stop:
            continue
        if start + shift < length:
            begin.append(start + shift)
        place[start:stop] += shift
        shift += -(stop - start) % multiple
    return place, begin


OTHER = "other_"
"""Prefix of the keys of a micro-batch with answers to other prompts."""


def chat_collator(source: ChatSamples) -> Collator:
    """Return the collator for chats, whose loss mask selects the learned tokens.

    Packed chats do not attend to each other, and each begins at position 0; the padding of a sample
    is a separate document.
    """

    def collator(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        samples = [source.sample(number) for number in numbers]
        return collate(samples, packed=source.multiple is not None)

    return collator


def document_collator(
    source: WholeDocuments | BlendOfDocuments, masked_eod: int | None = None
) -> Collator:
    """Return the collator for next-token prediction in whole documents.

    Each document begins at position 0, as does the padding of a sample. The
    prediction after `masked_eod` does not count.
    """

    def collator(windows: torch.Tensor, numbers: np.ndarray) -> MicroBatch:
        batch = collate([source.sample(number) for number in numbers], packed=True)
        if masked_eod is not None:
            batch["loss_mask"][batch["tokens"] == masked_eod] = 0.0
        return batch

    return collator


def collate(samples: list[Sample], *, packed: bool) -> MicroBatch:
    """Return the micro-batch of samples as rows [n, seq_length], or as one packed row."""
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    # padding is negative, and an embedding has no row for that
    ids = tokens.clamp(min=0)
    learned = torch.from_numpy(np.stack([sample.learned for sample in samples]))
    length = ids.shape[1] - 1
    batch = MicroBatch(
        tokens=ids[:, :-1].contiguous(),
        labels=ids[:, 1:].contiguous(),
        loss_mask=learned[:, 1:].float().contiguous(),
        position_ids=torch.arange(length).expand(len(ids), length).contiguous(),
        padding=(tokens[:, :-1] == NOTHING).contiguous(),
    )
    if not packed:
        return batch
    starts = [row * length + start for row, sample in enumerate(samples) for start in sample.starts]
    bounds = torch.tensor([*starts, len(samples) * length], dtype=torch.int32)
    begins = bounds[:-1].long().repeat_interleave(bounds.diff().long())
    return MicroBatch(
        tokens=batch["tokens"].view(1, -1),
        labels=batch["labels"].view(1, -1),
        loss_mask=batch["loss_mask"].view(1, -1),
        position_ids=(torch.arange(len(begins)) - begins).unsqueeze(0),
        cu_seqlens=bounds,
        padding=batch["padding"].view(1, -1),
    )


def evaluation_samples(source: Any, wanted: int) -> Any:
    """Return the samples of a split that an evaluation of `wanted` samples reads.

    Megatron's order shuffles all epochs of a small split that the evaluations of a run need
    together; there an evaluation reads one epoch. Otherwise it reads the split itself.
    """
    if isinstance(source, MegatronSamples):
        return source.once() if source.shape.epochs > 1 else source
    return source.once(wanted) if isinstance(source, MegatronBlend) else source


def is_repeated(source: Any, numbers: np.ndarray) -> np.ndarray:
    """Return whether each sample of the numbers int64 [n] also has a smaller number; bool [n].

    In Megatron's order a blend continues after a corpus is exhausted, and repeats its samples.
    """
    if isinstance(source, WholeDocuments) and len(numbers) and source.reaches(int(numbers.max())):
        return np.zeros(len(numbers), np.bool_)  # without `len`, which would pack all parts
    again = np.asarray(numbers >= len(source))
    if isinstance(source, MegatronBlend):
        part, index = source.places(numbers)
        again |= index >= np.array([len(one) for one in source.parts])[part]
    return again


def distinct_samples(source: Any, wanted: int) -> tuple[int, int]:
    """Return the distinct samples among the first `wanted`, and the number after them."""
    if isinstance(source, WholeDocuments) and source.reaches(wanted - 1):
        return wanted, wanted
    most = min(wanted, len(source))
    if not isinstance(source, MegatronBlend):
        return most, most
    kept = np.flatnonzero(~is_repeated(source, np.arange(most, dtype=np.int64)))
    return len(kept), int(kept[-1]) + 1 if len(kept) else 0
