"""Texts with images from a folder: a JSON Lines file beside the images.

Which record makes a sample is computed.

`prepare` looks at every record once, trains a tokenizer where none is given, and notes both in the
cache. Samples are tokenized when they are read, and images decoded: each is a function of the files
and the sample's number.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain import strict_json
from mtrain.config.compose.paths import user_path
from mtrain.config.disk.files import WHICH, records_of
from mtrain.config.schema.data import DataConfig
from mtrain.data import cache, records
from mtrain.data.cache import writing
from mtrain.data.images import inside, load, require_pillow
from mtrain.data.json_lines import JsonLines
from mtrain.data.permute import ROUNDS, Permutation, keys
from mtrain.data.samples import SHARES, split_records
from mtrain.data.tokenize import Corpus
from mtrain.errors import ConfigError, CorruptData, Problem

if TYPE_CHECKING:  # it imports the library of tokenizers
    from mtrain.data.text import Tokenizer

FORMAT = 2
META = "meta.json"
TOKENIZER = "tokenizer.json"
KEPT = 256
"""Records whose tokens are kept: those of a micro-batch are asked for more than once."""


class Records(JsonLines):
    """The records of a JSON Lines file beside images.

    `ignored` are the keys of `data.ignored_keys`. Raises ConfigError where there is no such file.
    """

    def __init__(self, path: str | None, ignored: Iterable[str] = ()) -> None:
        if path is None:
            found, rule = (None, "data.kind=image_text reads a folder")
        else:
            found, rule = records_of(user_path(path), WHICH)
        if found is None:
            fix = "data.path=FOLDER with images and a .jsonl file"
            raise ConfigError([Problem("MT614", "data.path", path, rule, fix)])
        super().__init__(found)
        self.folder = found.parent
        self._ignored = frozenset(ignored)

    def record(self, number: int) -> records.Record:
        """Return a record. Raises CorruptData, with its line, where it is none."""
        with self.named(number):
            return records.parse(self.line(number), self._ignored)


def prepare(data: DataConfig, note: Callable[[str], None], tokenizer: Path | None = None) -> Corpus:
    """Look at every record and image path of the folder once, and train a tokenizer where none is
    given.

    Raises ConfigError for a folder or tokenizer that cannot be used, CorruptData for a record that
    is none or an image that is not there, BadEnvironment where Pillow is missing or the cache
    cannot be written.
    """
    require_pillow()
    from mtrain.data.text import Tokenizer

    given = tokenizer or (user_path(data.tokenizer) if data.tokenizer else None)
    found = Records(data.path, data.ignored_keys)
    loaded = Tokenizer(given) if given is not None else None
    stamp = os.stat(found.file)
    settings = {
        "format": FORMAT,
        "file": str(found.file.resolve()),
        "ignored_keys": sorted(data.ignored_keys),
        "stamp": [stamp.st_size, stamp.st_mtime_ns, stamp.st_ino],
        "tokenizer": data.tokenizer_vocab_size if given is None else None,
    }
    digest = hashlib.sha256(strict_json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    folder = user_path(data.cache_dir) / f"images-{digest}"

    def make(building: Path) -> None:
        note(f"{found.file}: looking at {len(found)} records")
        _look_at(found, data, building, train=given is None)

    with writing(folder.parent):
        meta = cache.made(folder, lambda: _known(folder), make)
    if loaded is None or given is None:
        given = folder / TOKENIZER
        loaded = Tokenizer(folder / TOKENIZER)
    sha256 = hashlib.sha256(given.read_bytes()).hexdigest()
    own = {"vocab_size": loaded.vocab_size, "eod": loaded.eod, "tokenizer_sha256": sha256}
    return Corpus(None, given, {**meta, **own})


def _known(folder: Path) -> dict[str, Any] | None:
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return meta


def _look_at(found: Records, data: DataConfig, folder: Path, *, train: bool) -> None:
    """Look at every record; leave what came out, and the tokenizer, in a folder."""
    digest = hashlib.sha256()
    images = 0
    for number in range(len(found)):
        line = found.line(number)
        record = found.record(number)
        with found.named(number):
            records.check_images(record, found.folder)
        digest.update(line)
        for name in record.images:
            images += 1
            digest.update(b"\0%d" % (found.folder / name).stat().st_size)
    if not len(found):
        raise CorruptData(f"{found.file}: there is no record in it")
    if train:
        from mtrain.data import bpe

        made = bpe.train(_texts(found), data.tokenizer_vocab_size)
        (folder / TOKENIZER).write_text(made.to_str(), encoding="utf-8")
    meta = {
        "kind": "image_text",
        "source": found.folder.name,
        "documents": len(found),
        "images": images,
        "fingerprint": digest.hexdigest()[:32],
    }
    (folder / META).write_text(strict_json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _texts(found: Records) -> Iterator[str]:
    for number in range(len(found)):
        yield "".join(
            piece.text for piece in found.record(number).pieces if isinstance(piece, records.Span)
        )


class ImageTextSamples:
    """The samples of a range of records; `len` is the number per epoch, and sample numbers go on
    from there.

    In epoch e the records come in an order that is drawn from the seed and e.
    """

    def __init__(
        self,
        found: Records,
        part: range,
        seq_length: int,
        seed: int,
        tokenizer: Tokenizer,
        vocab_size: int,
        name: str,
    ) -> None:
        self.found = found
        self.part = part
        self.seq_length = seq_length
        self.seed = seed
        self.name = name
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._order = functools.lru_cache(maxsize=4)(self._draw)
        self._tokens = functools.lru_cache(maxsize=KEPT)(self._encode)

    def __len__(self) -> int:
        return len(self.part)

    def _draw(self, epoch: int) -> Permutation:
        return Permutation(len(self.part), keys(self.seed, epoch, f"images {self.name}", ROUNDS))

    def record_of(self, number: int) -> int:
        """Return the record that makes a sample."""
        epoch, place = divmod(int(number), len(self.part))
        return self.part.start + int(self._order(epoch)(np.array([place], np.int64))[0])

    def _encode(self, record: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int64 [seq_length + 1] and whether each is learned, cut or padded
        at the end.
        """
        with self.found.named(record):
            ids, known = records.encoded(self.found.record(record), self._tokenizer)
            if max(ids, default=0) >= self._vocab_size:
                raise CorruptData(
                    f"token id {max(ids)}; the vocabulary has ids 0 to {self._vocab_size - 1}"
                )
        length = self.seq_length + 1
        tokens = np.full(length, records.NOTHING, np.int64)
        learned = np.zeros(length, np.bool_)
        kept = min(length, len(ids))
        tokens[:kept], learned[:kept] = ids[:kept], known[:kept]
        return tokens, learned

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1]: token ids, one `IMAGE` for an image, `NOTHING` behind
        the end.

        Raises CorruptData for a record that is none, or an id outside of the vocabulary.
        """
        return np.stack([self._tokens(self.record_of(number))[0] for number in numbers])

    def learned(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which of these tokens are learned: bool [n, seq_length + 1]."""
        return np.stack([self._tokens(self.record_of(number))[1] for number in numbers])

    def images(self, numbers: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        """Return every image of the samples in its order: float32 [images, 3, size, size].

        Raises CorruptData, with line and name, for one that cannot be read.
        """
        out = [np.zeros((0, 3, size, size), np.float32)]
        for number in map(self.record_of, numbers):
            with self.found.named(number):
                for name in self.found.record(number).images:
                    out.append(load(inside(self.found.folder, name), size)[None])
        return np.concatenate(out)

    def image_count(self, number: int) -> int:
        """Return images of the record that makes a sample, those behind the end of the sample
        included.
        """
        return len(self.found.record(self.record_of(number)).images)

    def place(self, number: int) -> str:
        """Return file and line of the record that makes a sample."""
        return self.found.place(self.record_of(number))

    def describe(self) -> dict[str, int]:
        """Counts: records, samples of an epoch."""
        return {"documents": len(self.part), "samples": len(self.part)}


def opened(
    data: DataConfig, vocab_size: int, seed: int, corpus: Corpus, need: Sequence[str]
) -> dict[str, ImageTextSamples | None]:
    """Return the samples of each split: consecutive records, a share above zero gets one at least.

    Raises ConfigError where a split that is needed gets none, or the tokenizer has more ids than
    the model.
    """
    held = corpus.meta["vocab_size"]
    if held > vocab_size:
        rule = f"the tokenizer of the corpus has {held} tokens, the model {vocab_size}"
        raise ConfigError(
            [Problem("MT607", "model.vocab_size", vocab_size, rule, f"model.vocab_size={held}")]
        )
    assert corpus.tokenizer is not None
    from mtrain.data.text import Tokenizer

    found = Records(data.path, data.ignored_keys)
    tokenizer = Tokenizer(corpus.tokenizer)
    out: dict[str, ImageTextSamples | None] = {}
    for name, part in zip(SHARES, split_records(len(found), data.split), strict=True):
        order = seed if name == "train" else 0
        if len(part):
            out[name] = ImageTextSamples(
                found, part, data.length, order, tokenizer, vocab_size, name
            )
        else:
            out[name] = None
        if out[name] is None and (name in need or name == "train"):
            rule = f"the {name} split has none of the {len(found)} records in {found.file}"
            raise ConfigError(
                [
                    Problem(
                        "MT605", "data.split", list(data.split), rule, f"a larger share for {name}"
                    )
                ]
            )
    return out
