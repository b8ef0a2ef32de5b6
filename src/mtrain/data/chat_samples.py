"""Samples of prepared chats: one chat each, or a window of several; and pairs of a chosen and a
rejected one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import strict_json
from mtrain.config.compose.paths import user_path
from mtrain.config.schema.data import DataConfig
from mtrain.data import cache
from mtrain.data.cache import writing
from mtrain.data.chats import COLUMNS, LEARNED, META, TABLE
from mtrain.data.first_fit import first_fit
from mtrain.data.indexed import IndexedDataset
from mtrain.data.permute import ROUNDS, Permutation, keys
from mtrain.data.samples import SHARES, split_records
from mtrain.data.tokenize import Corpus
from mtrain.errors import ConfigError, CorruptData, Problem

NOTHING = -1
"""In place of a token id: padding."""
KEPT = 256
"""Samples that are kept: those of a micro-batch are asked for more than once."""
WINDOWS = "windows.bin"


class Prepared:
    """Prepared chats in memory maps; `group` documents stand together: 1, or 2 of a pair."""

    def __init__(self, corpus: Corpus, group: int = 1) -> None:
        assert corpus.prefix is not None
        folder = corpus.prefix.parent
        self.corpus = corpus
        self.group = group
        self.dataset = IndexedDataset(corpus.prefix)
        self.learned = _mapped(folder / LEARNED, np.uint8)
        self.table = _mapped(folder / TABLE, np.dtype("<i8"))
        counts = self.dataset.num_documents, self.dataset.num_tokens
        if (len(self.table), len(self.learned)) != (counts[0] * COLUMNS, counts[1]) or counts[
            0
        ] % group:
            raise CorruptData(
                f"{folder}: {LEARNED} or {TABLE} is not of tokens.idx: remove the folder"
            )
        self.table = self.table.reshape(-1, COLUMNS)

    def __len__(self) -> int:
        return len(self.table) // self.group

    def learnable(self, length: int) -> np.ndarray:
        """Return whether each group has something to learn in the first `length` tokens of all its
        documents; bool [n].
        """
        return np.asarray((self.table[:, 1] < length).reshape(-1, self.group).all(axis=1))

    def sizes(self, chats: np.ndarray, length: int) -> np.ndarray:
        """Return tokens of documents that are cut at `length`; int64."""
        return np.minimum(self.dataset.lengths[chats].astype(np.int64), length)

    def document(self, number: int, length: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first `length` ids of a document, and whether each is learned, given those
        before it.

        Raises CorruptData for an id outside of the vocabulary.
        """
        start = self.dataset.document_start(number)
        ids = self.dataset[number][:length].astype(np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            said = (
                f"token ids from {ids.min()} to {ids.max()}; the vocabulary has ids 0 to"
                f" {vocab_size - 1}"
            )
            raise CorruptData(f"{self.place(number)}: {said}")
        known = self.learned[start : start + len(ids)] != 0
        known[:1] = False
        return ids, known

    def place(self, number: int) -> str:
        """Return file and line of the chat that a document is of."""
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
    """Which documents stand together in a sample: those of `order` from one of `starts` to the
    next.
    """

    order: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, place: int) -> list[int]:
        return self.order[self.starts[place] : self.starts[place + 1]].tolist()


@dataclass(frozen=True)
class Sample:
    """A sample of `seq_length` tokens and what follows them, as arrays [seq_length + 1]."""

    tokens: np.ndarray
    """int64: ids, `NOTHING` where it is padded."""
    learned: np.ndarray
    """bool: whether the token is learned."""
    starts: tuple[int, ...]
    """Where each of its documents begins; the last one is of padding, where there is some behind
    all others.
    """
    documents: tuple[int, ...]


class ChatSamples:
    """The samples of a split; `len` is the number per epoch, and sample numbers go on from there.

    In epoch e they come in an order that is drawn from the seed and e. A chat is cut at
    `seq_length` tokens; one of which nothing is then left to learn is left out. With `multiple`, a
    sample is the chats of one of `windows`, each padded to a multiple of so many tokens.
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
        """Return the window that makes a sample."""
        epoch, place = divmod(int(number), len(self))
        return int(self._order(epoch)(np.array([place], np.int64))[0])

    def sample(self, number: int) -> Sample:
        """Return the sample of a number. Raises CorruptData for an id outside of the vocabulary."""
        return self._sample(self.window_of(number))

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
        if at < length and self.multiple is not None:
            starts.append(at)
        return Sample(tokens, learned, tuple(starts), documents)

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1]: token ids, `NOTHING` where a sample is padded.

        Raises CorruptData for an id outside of the vocabulary.
        """
        return np.stack([self.sample(number).tokens for number in numbers])

    def place(self, number: int) -> str:
        """Return file and line of each chat of a sample."""
        return ", ".join(self.chats.place(document) for document in self.sample(number).documents)

    def describe(self) -> dict[str, int]:
        """Counts: chats, their tokens, those that are cut or left out, samples of an epoch."""
        return {**self._counts, "samples": len(self)}


class PairSamples:
    """The pairs of a split in the order of an epoch, as `ChatSamples` has chats."""

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
        # a pair is a window of one: its rejected chat stands behind the chosen one
        alone = Windows(2 * pairs, np.arange(len(pairs) + 1))
        self._chosen = ChatSamples(chats, alone, seq_length, seed, vocab_size, name, counts)
        rejected = Windows(2 * pairs + 1, alone.starts)
        self._rejected = ChatSamples(chats, rejected, seq_length, seed, vocab_size, name, counts)
        self.seq_length = seq_length
        self.name = name

    def __len__(self) -> int:
        return len(self._chosen)

    def pair(self, number: int) -> tuple[Sample, Sample]:
        """Return the chosen and the rejected sample of a number.

        Of what both begin with nothing is learned.
        """
        return self._chosen.sample(number), self._rejected.sample(number)

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [2 n, seq_length + 1]: the chosen and the rejected chat of each pair,
        `NOTHING` behind the end.
        """
        return np.stack([sample.tokens for number in numbers for sample in self.pair(number)])

    def learned(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which of these tokens are learned: bool [2 n, seq_length + 1]."""
        return np.stack([sample.learned for number in numbers for sample in self.pair(number)])

    def place(self, number: int) -> str:
        """Return file and line of a pair."""
        return self._chosen.place(number)

    def describe(self) -> dict[str, int]:
        """Counts: pairs, tokens, those that are cut or left out, samples of an epoch."""
        return self._chosen.describe()


def opened(
    data: DataConfig, vocab_size: int, seed: int, corpus: Corpus, need: Sequence[str]
) -> dict[str, ChatSamples | PairSamples | None]:
    """Return the samples of each split: consecutive chats, a share above zero gets one at least.

    Raises ConfigError where a split that is needed has nothing to learn, or the tokenizer has more
    ids than the model.
    """
    held = corpus.meta["vocab_size"]
    if held > vocab_size:
        rule = f"the tokenizer of the chats has {held} tokens, the model {vocab_size}"
        raise ConfigError(
            [Problem("MT607", "model.vocab_size", vocab_size, rule, f"model.vocab_size={held}")]
        )
    chats = Prepared(corpus, 1 if data.kind == "sft" else 2)
    learnable = chats.learnable(data.length)
    problems = []
    out: dict[str, ChatSamples | PairSamples | None] = dict.fromkeys(SHARES)
    for name, part in zip(SHARES, split_records(len(chats), data.split), strict=True):
        kept = part.start + np.flatnonzero(learnable[part.start : part.stop])
        if len(kept):
            out[name] = _samples(
                data, chats, part, kept, (vocab_size, seed if name == "train" else 0, name)
            )
        elif name in need or name == "train":
            problems.append(_nothing(data, name, len(part), len(chats)))
    if problems:
        raise ConfigError(problems)
    return out


def _nothing(data: DataConfig, name: str, held: int, total: int) -> Problem:
    """Return a split of `held` chats that is needed has no sample."""
    if not held:
        rule = f"the {name} split has none of the {total} chats"
        fix = f"a larger share for {name}"
        return Problem("MT605", "data.split", list(data.split), rule, fix)
    rule = f"{data.path}: of the {held} chats of the {name} split none has anything to learn"
    rule += f" in its first {data.length} tokens"
    return Problem("MT605", "data.seq_length", data.seq_length, rule, "a larger data.seq_length")


def _samples(
    data: DataConfig, chats: Prepared, part: range, kept: np.ndarray, how: tuple[int, int, str]
) -> ChatSamples | PairSamples:
    vocab_size, seed, name = how
    documents = (chats.group * kept[:, None] + np.arange(chats.group)).ravel()
    lengths = chats.dataset.lengths[chats.group * part.start : chats.group * part.stop]
    multiple = None
    counts = {
        "documents": len(kept),
        "tokens": int(chats.sizes(documents, data.length).sum()),
        "cut": int((lengths > data.length).sum()),
        "left_out": len(part) - len(kept),
    }
    if data.kind == "preference":
        return PairSamples(chats, kept, data.length, seed, vocab_size, name, counts)
    windows = Windows(kept, np.arange(len(kept) + 1))
    if data.packed:
        multiple = data.packed_multiple or 1
        windows = _packed(data, chats, documents, multiple, part)
    return ChatSamples(chats, windows, data.length, seed, vocab_size, name, counts, multiple)


def _packed(
    data: DataConfig, chats: Prepared, documents: np.ndarray, multiple: int, part: range
) -> Windows:
    """Return the windows that the chats of a split fill by first fit, from the cache or
    made now.
    """
    given = [chats.corpus.meta["fingerprint"], data.length, multiple, part.start, part.stop]
    digest = hashlib.sha256(strict_json.dumps(given).encode()).hexdigest()[:16]
    folder = user_path(data.cache_dir) / f"windows-{digest}"

    def meta() -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
            whole = (folder / WINDOWS).stat().st_size == 8 * (found["chats"] + found["windows"] + 1)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if whole else None

    def make(building: Path) -> None:
        sizes = -(-chats.sizes(documents, data.length) // multiple) * multiple
        order, starts = first_fit(sizes, data.length)
        (building / WINDOWS).write_bytes(np.concatenate([order, starts]).astype("<i8").tobytes())
        rows = {"kind": "windows", "chats": len(order), "windows": len(starts) - 1}
        (building / META).write_text(strict_json.dumps(rows) + "\n", encoding="utf-8")

    with writing(folder.parent):
        found = cache.made(folder, meta, make)
    values = _mapped(folder / WINDOWS, np.dtype("<i8"))
    order = values[: found["chats"]]
    starts = values[found["chats"] :]
    if len(order) != len(documents) or len(starts) != found["windows"] + 1:
        raise CorruptData(f"{folder}: not of these chats: remove the folder")
    return Windows(documents[order], starts)
