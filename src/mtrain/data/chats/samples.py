"""Samples of encoded chats: chats, packed windows, pairs and prompts."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.config.compose.paths import user_path
from mtrain.config.schema.data import DataConfig
from mtrain.data.chats.prepare import COLUMNS, LEARNED, RECORDS, TABLE
from mtrain.data.records import JsonLines
from mtrain.data.samples.packing import first_fit
from mtrain.data.samples.permutation import ROUNDS, Permutation, keys
from mtrain.data.samples.token_stream import SHARES, split_records
from mtrain.data.store import cache
from mtrain.data.store.cache import writing
from mtrain.data.store.corpus import Corpus
from mtrain.data.store.indexed import IndexedDataset
from mtrain.errors import ConfigError, CorruptData, Problem

# The id of padding
NOTHING = -1
# Samples that are cached, as those of a micro-batch are read more than once
KEPT = 256
WINDOWS = "windows.bin"


class Prepared:
    """Encoded chats in memory maps; `group` documents belong together: 1, or 2 of a pair."""

    def __init__(self, corpus: Corpus, group: int = 1) -> None:
        assert corpus.prefix is not None
        folder = corpus.prefix.parent
        self.corpus = corpus
        self.group = group
        self.dataset = IndexedDataset(corpus.prefix)
        self.learned = _mapped(folder / LEARNED, np.uint8)
        self.table = _mapped(folder / TABLE, np.dtype("<i8"))
        documents = self.dataset.num_documents
        if (
            len(self.table) != documents * COLUMNS
            or len(self.learned) != self.dataset.num_tokens
            or documents % group
        ):
            raise CorruptData(
                f"{folder}: {LEARNED} or {TABLE} does not match tokens.idx: remove the folder"
            )
        self.table = self.table.reshape(-1, COLUMNS)

    def __len__(self) -> int:
        return len(self.table) // self.group

    def whole_lines(self, split: Sequence[float]) -> list[range]:
        """Return the groups of each split: consecutive lines, with all of their pairs."""
        lines = self.table[:: self.group, 0]
        bounds = [*np.flatnonzero(np.diff(lines, prepend=-1)).tolist(), len(lines)]
        parts = split_records(len(bounds) - 1, split)
        return [range(bounds[part.start], bounds[part.stop]) for part in parts]

    def learnable(self, length: int) -> np.ndarray:
        """Return whether all documents of a group learn within `length` tokens; bool [n]."""
        return np.asarray((self.table[:, 1] < length).reshape(-1, self.group).all(axis=1))

    def fits(self, length: int, multiple: int) -> np.ndarray:
        """Return whether each group fits whole into a sample of `length` tokens; bool [n]."""
        rooms = -(-self.dataset.lengths.astype(np.int64) // multiple) * multiple
        return np.asarray(rooms.reshape(-1, self.group).sum(axis=1) <= length)

    def sizes(self, chats: np.ndarray, length: int) -> np.ndarray:
        """Return the sizes of documents that are cut at `length`; int64."""
        return np.minimum(self.dataset.lengths[chats].astype(np.int64), length)

    def document(self, number: int, length: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `length` ids of a document and their loss mask.

        Raises CorruptData for an id outside the vocabulary.
        """
        start = self.dataset.document_start(number)
        ids = self.dataset[number][:length].astype(np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise CorruptData(
                f"{self.place(number)}: token ids from {ids.min()} to {ids.max()}; the vocabulary"
                f" has ids 0 to {vocab_size - 1}"
            )
        known = self.learned[start : start + len(ids)] != 0
        # no token of its document comes before the first one, which nothing can predict
        known[:1] = False
        return ids, known

    def place(self, number: int) -> str:
        """Return file and line of a document's chat."""
        return f"{self.corpus.meta['file']}:{self.table[number, 0]}"


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except (OSError, ValueError) as error:
        raise CorruptData(f"{path}: cannot be read: {error}") from error


@dataclass(frozen=True)
class Windows:
    """Windows of documents, one for each sample: slices of `order` between `starts`."""

    order: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, place: int) -> list[int]:
        return self.order[self.starts[place] : self.starts[place + 1]].tolist()


@dataclass(frozen=True)
class Sample:
    """A sample of `seq_length` tokens and the one that follows, as arrays [seq_length + 1]."""

    tokens: np.ndarray
    """int64: ids, `NOTHING` for padding."""
    learned: np.ndarray
    """bool: the loss mask."""
    starts: tuple[int, ...]
    """The places where its documents begin; padding at the end counts as a document."""
    documents: tuple[int, ...]
    chosen: bool = True
    """False for the rejected answer of a pair, and for one with a label of false."""
    margin: float = 0.0
    """The margin of a pair, with its chosen answer."""


class ChatSamples:
    """The samples of a split, in one epoch after another; `len` is the number of one epoch. They
    are chats, labelled answers, or windows of pairs, whose answers follow each other.

    The order of epoch e is drawn from the seed and e. A chat is cut at `seq_length` tokens; it is
    skipped if it then learns nothing. With `multiple`, a sample is the chats of one of `windows`,
    each padded to a multiple of this many tokens.
    """

    def __init__(
        self,
        chats: Prepared,
        windows: Windows,
        seq_length: int,
        seed: int,
        vocab_size: int,
        name: str,
        counts: dict[str, int],
        multiple: int | None = None,
    ) -> None:
        self.chats = chats
        self.windows = windows
        self.seq_length = seq_length
        self.name = name
        self.seed = seed
        self.vocab_size = vocab_size
        self.multiple = multiple
        self._counts = counts
        self._order = functools.lru_cache(maxsize=4)(self._draw)
        self._sample = functools.lru_cache(maxsize=KEPT)(self._made)

    def __len__(self) -> int:
        return len(self.windows)

    def _draw(self, epoch: int) -> Permutation:
        return Permutation(len(self), keys(self.seed, epoch, f"chats {self.name}", ROUNDS))

    def window_of(self, number: int) -> int:
        """Return the window of a sample."""
        epoch, place = divmod(int(number), len(self))
        return int(self._order(epoch)(np.array([place], np.int64))[0])

    def sample(self, number: int) -> Sample:
        """Return the sample of a number; raise CorruptData for an id outside the vocabulary."""
        return self._sample(self.window_of(number))

    def window(self, place: int) -> Sample:
        """Return the sample of a window."""
        return self._sample(place)

    def _made(self, window: int) -> Sample:
        length = self.seq_length
        documents = tuple(self.windows[window])
        tokens = np.full(length + 1, NOTHING, np.int64)
        learned = np.zeros(length + 1, np.bool_)
        starts = []
        at = 0
        step = self.multiple or 1
        for number in documents:
            ids, known = self.chats.document(number, length, self.vocab_size)
            tokens[at : at + len(ids)] = ids
            learned[at : at + len(ids)] = known
            starts.append(at)
            at += -(-len(ids) // step) * step
        # packed attention needs a document for every token, padding included
        if at < length and self.multiple is not None:
            starts.append(at)
        chosen = bool(self.chats.table[documents[0], 3])
        margin = float(self.chats.table[documents[0], 4:].view(np.float64)[0])
        return Sample(tokens, learned, tuple(starts), documents, chosen, margin)

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1]: token ids, `NOTHING` for padding.

        Raises CorruptData for an id outside the vocabulary.
        """
        return np.stack([self.sample(number).tokens for number in numbers])

    def place(self, number: int) -> str:
        """Return file and line of each chat of a sample."""
        return ", ".join(self.chats.place(document) for document in self.sample(number).documents)

    def describe(self) -> dict[str, int]:
        """Return the numbers of chats, tokens, chats cut and left out, and samples of an epoch."""
        return {**self._counts, "samples": len(self)}


class PairSamples:
    """The answers of the pairs of a split, in the order in which `ChatSamples` has chats: the
    chosen and the rejected one of each pair, with even and odd numbers.
    """

    def __init__(
        self,
        chats: Prepared,
        pairs: np.ndarray,
        seq_length: int,
        seed: int,
        vocab_size: int,
        name: str,
        counts: Any,
    ) -> None:
        # a pair is two windows of one document: the rejected chat follows the chosen one
        chosen = Windows(2 * pairs, np.arange(len(pairs) + 1))
        self._chosen = ChatSamples(chats, chosen, seq_length, seed, vocab_size, name, counts)
        rejected = Windows(2 * pairs + 1, chosen.starts)
        self._rejected = ChatSamples(chats, rejected, seq_length, seed, vocab_size, name, counts)
        self.seq_length = seq_length
        self.name = name
        self.scores: np.ndarray | None = None
        """The log-probability of each answer by a reference, by place; fp64 [n]."""

    def __len__(self) -> int:
        return 2 * len(self._chosen)

    def sample(self, number: int) -> Sample:
        """Return one answer of a pair, after the common start, which is not learned."""
        return self.row(self.row_of(number))

    def row_of(self, number: int) -> int:
        """Return the place of an answer among those of the split, in the order of the file."""
        return 2 * self._chosen.window_of(int(number) // 2) + int(number) % 2

    def row(self, place: int) -> Sample:
        """Return the answer of a place."""
        side = self._rejected if place % 2 else self._chosen
        return side.window(int(place) // 2)

    def pair(self, number: int) -> tuple[Sample, Sample]:
        """Return the chosen and the rejected answer of the pair of that number."""
        return self.sample(2 * number), self.sample(2 * number + 1)

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1]: the tokens of answers, `NOTHING` after their ends."""
        return np.stack([self.sample(number).tokens for number in numbers])

    def place(self, number: int) -> str:
        """Return file and line of the pair of that number."""
        return self._chosen.place(number)

    def describe(self) -> dict[str, int]:
        """Return the numbers of pairs, tokens, pairs cut and left out, and samples of an epoch."""
        return {**self._chosen.describe(), "samples": len(self)}


class PromptSamples:
    """The answers to the prompts of a split: sample n answers prompt n // group, in the order in
    which `ChatSamples` has chats. A sample holds no answer until the run samples it.
    """

    group = 1
    """Answers to each prompt; the run sets it before it reads."""

    def __init__(
        self,
        prompts: Prepared,
        kept: np.ndarray,
        seq_length: int,
        seed: int,
        vocab_size: int,
        name: str,
        counts: dict[str, int],
    ) -> None:
        windows = Windows(kept, np.arange(len(kept) + 1))
        self._order = ChatSamples(prompts, windows, seq_length, seed, vocab_size, name, counts)
        self._prompts = prompts
        self._kept = kept
        self._vocab_size = vocab_size
        assert prompts.corpus.prefix is not None
        self._records = JsonLines(prompts.corpus.prefix.parent / RECORDS)
        if len(self._records) != len(prompts):
            raise CorruptData(f"{self._records.file}: not one line for each prompt: remove it")
        self.seq_length = seq_length
        self.name = name

    def __len__(self) -> int:
        return self.group * len(self._kept)

    def document(self, number: int) -> int:
        """Return the place of a sample's prompt in the file."""
        return int(self._kept[self._order.window_of(int(number) // self.group)])

    def ids(self, number: int) -> np.ndarray:
        """Return the tokens of a sample's prompt, all of them: int64 [tokens]."""
        document = self.document(number)
        length = int(self._prompts.dataset.lengths[document])
        return self._prompts.document(document, length, self._vocab_size)[0]

    def record(self, number: int) -> dict[str, Any]:
        """Return the columns of a sample's prompt."""
        found: dict[str, Any] = json.loads(self._records.line(self.document(number)))
        return found

    def sample(self, number: int) -> Sample:
        """Return the prompt of a sample, of which nothing is learned."""
        ids = self.ids(number)[: self.seq_length + 1]
        tokens = np.full(self.seq_length + 1, NOTHING, np.int64)
        tokens[: len(ids)] = ids
        return Sample(tokens, np.zeros(len(tokens), np.bool_), (0,), (self.document(number),))

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1]: prompts, `NOTHING` after their ends."""
        return np.stack([self.sample(number).tokens for number in numbers])

    def place(self, number: int) -> str:
        """Return file and line of a sample's prompt."""
        return self._prompts.place(self.document(number))

    def describe(self) -> dict[str, int]:
        """Return the numbers of prompts, tokens, and samples of an epoch."""
        return {**self._order.describe(), "samples": len(self)}

    def require_room(self, answer: int) -> None:
        """Raise ConfigError if a prompt leaves no room for an answer of so many tokens."""
        lengths = self._prompts.dataset.lengths[self._kept]
        room = self.seq_length + 1 - answer
        long = np.flatnonzero(lengths > room)
        if not len(long):
            return
        first = int(self._kept[long[0]])
        most = int(lengths.max())
        rule = (
            f"cannot hold a prompt and its answer because {self._prompts.place(first)} has"
            f" {self._prompts.dataset.lengths[first]} tokens and an answer has up to {answer}"
            f" ({len(long)} of {len(lengths)} prompts of {self.name} are too long, up to {most})"
        )
        fix = f"data.seq_length={most + answer - 1}"
        if self.seq_length + 1 > most:
            fix = f"{fix} or rollout.max_tokens={self.seq_length + 1 - most}"
        raise ConfigError.of("MT348", "data.seq_length", self.seq_length, rule, fix)


def open_chats(
    data: DataConfig, vocab_size: int, seed: int, corpus: Corpus, need: Sequence[str]
) -> dict[str, ChatSamples | PairSamples | PromptSamples | None]:
    """Return the samples of each split: consecutive chats, at least one for a share above zero.

    Raises ConfigError if a needed split has nothing to learn, or the tokenizer has more ids than
    the model.
    """
    problem = corpus.vocabulary_problem(vocab_size)
    if problem is not None:
        raise ConfigError([problem])
    chats = Prepared(corpus, 2 if corpus.meta["preferences"] in ("pairs", "scores") else 1)
    learnable = chats.learnable(data.length)
    if data.packed and chats.group == 2:
        learnable &= chats.fits(data.length, data.packed_multiple or 1)
    problems = []
    out: dict[str, ChatSamples | PairSamples | PromptSamples | None] = dict.fromkeys(SHARES)
    for name, part in zip(SHARES, chats.whole_lines(data.split), strict=True):
        kept = part.start + np.flatnonzero(learnable[part.start : part.stop])
        if len(kept):
            # evaluations of all runs read the same chats, whatever their seed
            order = seed if name == "train" else 0
            out[name] = _samples(data, chats, part, kept, vocab_size, order, name)
        elif name in need or name == "train":
            problems.append(_nothing(data, name, len(part), len(chats)))
    if problems:
        raise ConfigError(problems)
    return out


def _nothing(data: DataConfig, name: str, held: int, total: int) -> Problem:
    """Return the problem of a needed split of `held` chats without a sample."""
    if not held:
        rule = f"the {name} split has none of the {total} chats"
        fix = f"a larger share for {name}"
        return Problem("MT605", "data.split", list(data.split), rule, fix)
    rule = (
        f"{data.path}: none of the {held} chats of the {name} split has anything to learn in its"
        f" first {data.length} tokens"
    )
    return Problem("MT605", "data.seq_length", data.seq_length, rule, "a larger data.seq_length")


def _samples(
    data: DataConfig,
    chats: Prepared,
    part: range,
    kept: np.ndarray,
    vocab_size: int,
    seed: int,
    name: str,
) -> ChatSamples | PairSamples | PromptSamples:
    documents = (chats.group * kept[:, None] + np.arange(chats.group)).ravel()
    lengths = chats.dataset.lengths[chats.group * part.start : chats.group * part.stop]
    multiple = None
    counts = {
        "documents": len(kept),
        "tokens": int(chats.sizes(documents, data.length).sum()),
        "cut": int((lengths > data.length).sum()),
        "left_out": len(part) - len(kept),
    }
    if data.kind == "prompts":
        return PromptSamples(chats, kept, data.length, seed, vocab_size, name, counts)
    if chats.group == 2 and not data.packed:
        return PairSamples(chats, kept, data.length, seed, vocab_size, name, counts)
    windows = Windows(documents, np.arange(len(documents) + 1))
    if data.packed:
        multiple = data.packed_multiple or 1
        windows = _packed(data, chats, documents, multiple, part)
    return ChatSamples(chats, windows, data.length, seed, vocab_size, name, counts, multiple)


def _packed(
    data: DataConfig, chats: Prepared, documents: np.ndarray, multiple: int, part: range
) -> Windows:
    """Return the windows that first fit makes of the chats of a split, from the cache or new."""
    settings = [chats.corpus.meta["fingerprint"], data.length, multiple, part.start, part.stop]
    settings += [chats.group] if chats.group > 1 else []
    # the seed has no part in it: it only orders the windows
    folder = user_path(data.cache_dir) / f"windows-{cache.name_of(settings)}"

    def meta() -> dict[str, Any] | None:
        try:
            counts = cache.read_meta(folder)
            size = 8 * (counts["chats"] + counts["windows"] + 1)
            complete = (folder / WINDOWS).stat().st_size == size
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return counts if complete else None

    def make(building: Path) -> None:
        sizes = -(-chats.sizes(documents, data.length) // multiple) * multiple
        # A pair is one item: both of its answers are in one window.
        order, starts = first_fit(sizes.reshape(-1, chats.group).sum(axis=1), data.length)
        (building / WINDOWS).write_bytes(np.concatenate([order, starts]).astype("<i8").tobytes())
        rows = {"kind": "windows", "chats": len(order), "windows": len(starts) - 1}
        cache.write_meta(building, rows)

    with writing(folder.parent):
        counts = cache.build_once(folder, meta, make)
    values = _mapped(folder / WINDOWS, np.dtype("<i8"))
    order = values[: counts["chats"]]
    starts = values[counts["chats"] :]
    groups = documents.reshape(-1, chats.group)
    if len(order) != len(groups) or len(starts) != counts["windows"] + 1:
        raise CorruptData(f"{folder}: its windows are of other chats: remove the folder")
    return Windows(groups[order].ravel(), chats.group * starts)
