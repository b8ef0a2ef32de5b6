"""Image-text pairs of a folder: decoded images, records of a JSON Lines file, and their samples.

Pillow, of the extra `images`, decodes an image within limits. The steps are those of CLIP: the
shorter side is resized to the size of the model (bicubic), the middle is cut out, and each channel
is normalised. Source: Radford et al. 2021, and the published preprocessor_config.json of LLaVA-1.5.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain.config.compose.paths import user_path
from mtrain.config.disk.files import WHICH, records_of
from mtrain.config.resolve.model_tokenizer import sha256_of
from mtrain.config.schema.data import DataConfig
from mtrain.data.records import JsonLines, Keys, learned, require_learned
from mtrain.data.samples.permutation import ROUNDS, Permutation, keys
from mtrain.data.samples.token_stream import SHARES, split_records
from mtrain.data.store import cache
from mtrain.data.store.cache import writing
from mtrain.data.store.corpus import Corpus
from mtrain.errors import BadEnvironment, ConfigError, CorruptData
from mtrain.units import bytes_

if TYPE_CHECKING:  # importing it loads the tokenizers library
    from mtrain.data.text.tokenizer import Tokenizer


# Mean and deviation of the red, green and blue of CLIP's training images
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
MAX_BYTES = 64 << 20
# A file of a few bytes may decompress to more than any memory; no real image has so many pixels
MAX_PIXELS = 64_000_000
# The formats that are opened; decoding them starts no other program
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "PPM")


def require_pillow() -> Any:
    """Return the module PIL.Image.

    Raises:
        BadEnvironment: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise BadEnvironment(
            "data.kind=image_text decodes images with Pillow, which is not installed",
            "  fix: pip install 'mtrain[images]'",
        ) from error
    return Image


def inside(folder: Path, name: str) -> Path:
    """Return the path of an image that a record names.

    Raises:
        CorruptData: the path leads out of the folder, also by a link, or cannot exist.
    """
    path = folder / name
    parts = Path(name).parts
    if not name or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise CorruptData(f"{name[:200]!r}: an image has a path inside its folder")
    try:
        real = path.resolve()
    except (OSError, RuntimeError) as error:
        # pathlib raises RuntimeError for a link that leads back to itself
        raise CorruptData(f"{name[:200]!r} cannot be resolved: {error}") from None
    if not real.is_relative_to(folder.resolve()):
        raise CorruptData(f"{name[:200]!r} is a link that leads out of the folder")
    return path


def load(path: Path, size: int) -> np.ndarray:
    """Return an image as float32 [3, size, size], normalised.

    Raises:
        CorruptData: the file is not an image of a known format, is damaged or too large.
        BadEnvironment: Pillow is not installed.
    """
    module = require_pillow()
    try:
        held = path.stat().st_size
        if held > MAX_BYTES:
            raise CorruptData(f"{bytes_(held)}; an image may have {bytes_(MAX_BYTES)}")
        with warnings.catch_warnings():
            # warnings are about odd metadata; Pillow's own limit of pixels is above this one
            warnings.simplefilter("ignore")
            with module.open(path, formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS or min(width, height) < 1:
                    raise CorruptData(
                        f"{width} x {height} pixels; an image may have {MAX_PIXELS} of them"
                    )
                return _normalised(_cropped(image.convert("RGB"), size, module.Resampling.BICUBIC))
    except CorruptData as found:
        raise CorruptData(f"{path}: {found}") from None
    except Exception as error:  # Pillow raises errors of every type for damaged files
        raise CorruptData(f"{path}: not a readable image: {str(error)[:200]}") from error


def _cropped(image: Any, size: int, resample: Any) -> np.ndarray:
    """Resize the shorter side of an image and return its middle: uint8 [size, size, 3]."""
    width, height = image.size
    short = min(width, height)
    # a strip one pixel wide passes the limit of a file, and would grow beyond it here
    if max(width, height) * size // short * size > MAX_PIXELS:
        raise CorruptData(f"{width} x {height} pixels are too long and narrow to be resized")
    wide, high = (size if side == short else int(size * side / short) for side in (width, height))
    if (wide, high) != (width, height):
        # a gap would let Pillow shrink in two steps, whose pixels are not CLIP's
        image = image.resize((wide, high), resample=resample, reducing_gap=None)
    left = (wide - size) // 2
    top = (high - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


def _normalised(pixels: np.ndarray) -> np.ndarray:
    scaled = (
        pixels.astype(np.float32) * np.float32(1 / 255) - np.array(MEAN, np.float32)
    ) / np.array(STD, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


PLACE = "<image>"
IMAGE = -1
# In place of a token id: an image, and padding after the end of a text
NOTHING = -2
MAX_LINE = 4 << 20
MAX_IMAGES = 256
# A piece: the end of a document, or of an answer
END = object()
# The end of an answer that is not learned
UNLEARNED_END = object()
OF_A_RECORD = ("image", "text", "conversations")
OF_A_TURN = ("from", "value")
SPEAKERS = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt"}


@dataclass(frozen=True)
class Span:
    """A piece: a text, and whether it is learned."""

    text: str
    learned: bool


@dataclass(frozen=True)
class Record:
    """A line of the file."""

    images: tuple[str, ...]
    """Paths below the folder, in the order of their places."""
    pieces: tuple[Span | object, ...]
    """Spans, `IMAGE`, `END` and `UNLEARNED_END`."""


def parse_record(line: bytes, ignored: frozenset[str] = frozenset()) -> Record:
    """Return the record of a line, without `ignored` keys.

    Raises:
        CorruptData: the line is not a record, has an unknown key, or nothing in it is learned.
    """
    if len(line) > MAX_LINE:
        raise CorruptData(f"a line has more than {MAX_LINE} bytes")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"not JSON: {str(error)[:200]}") from None
    if not isinstance(values, dict):
        raise CorruptData("not a JSON object")
    keys = Keys(ignored)
    values = keys.kept(values)
    keys.refuse_unknown(values, OF_A_RECORD, "the record")
    require_learned(values, "the record")
    images = values.get("image") or []
    images = [images] if isinstance(images, str) else images
    if (
        not isinstance(images, list)
        or not all(isinstance(i, str) for i in images)
        or len(images) > MAX_IMAGES
    ):
        raise CorruptData(f"image is neither a path nor a list of at most {MAX_IMAGES} paths")
    if ("text" in values) == ("conversations" in values):
        raise CorruptData("it needs either text or conversations")
    if "text" in values:
        spans = _of_text(values["text"])
    else:
        spans = _of_conversations(values["conversations"], keys)
    # JSON may have half of a surrogate pair, which neither a path nor the tokenizer can take
    try:
        "".join((*images, *(span.text for span in spans if isinstance(span, Span)))).encode()
    except UnicodeEncodeError as error:
        raise CorruptData(
            f"\\u{ord(error.object[error.start]):04x} is half of a surrogate pair"
        ) from None
    places = sum(span.text.count(PLACE) for span in spans if isinstance(span, Span))
    # a text without places follows its images
    if places == 0 and images:
        spans = [Span(PLACE * len(images), False), *spans]
    elif places != len(images):
        raise CorruptData(f"{places} times {PLACE} for {len(images)} images")
    return Record(tuple(images), tuple(_cut(spans)))


def _of_text(text: Any) -> list[Span | object]:
    if not isinstance(text, str) or not text.strip():
        raise CorruptData("text is empty, or not a string")
    return [Span(text, True), END]


def _of_conversations(turns: Any, keys: Keys) -> list[Span | object]:
    """Return questions after USER: and answers after ASSISTANT:, LLaVA's prompt; answers are
    learned.

    LLaVA's own training had a system prompt before the first question, which is omitted here.
    """
    if not isinstance(turns, list) or len(turns) < 2:
        raise CorruptData("conversations are not a list of questions and answers")
    out: list[Span | object] = []
    for number, turn in enumerate(turns):
        place = f"turn {number + 1} of conversations"
        wanted = ("human", "gpt")[number % 2]
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(text, str) or SPEAKERS.get(str(turn.get("from"))) != wanted:
            raise CorruptData(f"{place} is not one of {wanted} with a value")
        turn = keys.kept(turn)
        keys.refuse_unknown(turn, OF_A_TURN, place)
        wish = learned(turn, place)
        if wish and wanted == "human":
            raise CorruptData(f"{place}, a question, says that it is learned, and only answers are")
        if wanted == "human":
            out.append(Span(f"USER: {text.strip()} ASSISTANT:", False))
        elif wish is False:
            out += [Span(f" {text.strip()}", False), UNLEARNED_END]
        else:
            out += [Span(f" {text.strip()}", True), END]
    if not any(one is END for one in out):
        raise CorruptData("every answer says that it is not learned: remove the line")
    return out


def _cut(spans: list[Span | object]) -> Iterator[Span | object]:
    """Yield spans with `IMAGE` in the place of each `<image>`."""
    for span in spans:
        if not isinstance(span, Span):
            yield span
            continue
        for number, text in enumerate(span.text.split(PLACE)):
            if number:
                yield IMAGE
            if text:
                yield Span(text, span.learned)


def check_images(record: Record, folder: Any) -> None:
    """Check that the images of a record exist.

    Raises:
        CorruptData: an image is missing, or lies outside the folder.
    """
    for name in record.images:
        path = inside(folder, name)
        try:
            exists = path.is_file()
        except OSError as error:
            raise CorruptData(f"{name[:200]!r} cannot be read: {error.strerror}") from None
        if not exists:
            raise CorruptData(f"{name[:200]!r}: there is no such image")


def encode_record(record: Record, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return the token ids of a record, `IMAGE` for an image, and whether each is learned.

    Text between images is tokenized as a whole; a token that begins before an answer is not a part
    of it.
    """
    begin = tokenizer.beginning
    ids = list(begin)
    known = [False] * len(begin)
    run: list[Span] = []

    def flush() -> None:
        text = "".join(span.text for span in run)
        ends = []
        at = 0
        for span in run:
            at += len(span.text)
            ends.append((at, span.learned))
        for number, start in tokenizer.encode_with_places(text) if text else ():
            ids.append(number)
            known.append(next((is_learned for end, is_learned in ends if start < end), False))
        run.clear()

    for piece in record.pieces:
        if isinstance(piece, Span):
            run.append(piece)
            continue
        flush()
        if piece is END or piece is UNLEARNED_END:
            if tokenizer.eod is not None:
                ids.append(tokenizer.eod)
                known.append(piece is END)
        else:
            ids.append(IMAGE)
            known.append(False)
    flush()
    return ids, known


FORMAT = 2
TOKENIZER = "tokenizer.json"
# Records whose tokens are cached, as those of a micro-batch are read more than once
KEPT = 256


class Records(JsonLines):
    """The records of a JSON Lines file in a folder of images.

    `ignored` are the keys of `data.ignored_keys`. Raises ConfigError if the file is missing.
    """

    def __init__(self, path: str | None, ignored: Iterable[str] = ()) -> None:
        file = None
        rule = "cannot be null because data.kind=image_text reads a folder"
        if path is not None:
            file, rule = records_of(user_path(path), WHICH)
        if file is None:
            fix = "data.path=FOLDER with images and a .jsonl file"
            raise ConfigError.of("MT614", "data.path", path, rule, fix)
        super().__init__(file)
        self.folder = file.parent
        self._ignored = frozenset(ignored)

    def record(self, number: int) -> Record:
        """Return a record; raise CorruptData with its line if it is wrong."""
        with self.named(number):
            return parse_record(self.line(number), self._ignored)


def prepare(data: DataConfig, note: Callable[[str], None], tokenizer: Path | None = None) -> Corpus:
    """Check every record and image path of the folder once, and train a tokenizer if none is given.

    Raises ConfigError for a folder or tokenizer that cannot be used, CorruptData for a wrong record
    or a missing image, BadEnvironment if Pillow is missing or the cache cannot be written.
    """
    require_pillow()
    from mtrain.data.text.tokenizer import Tokenizer

    given = tokenizer or (user_path(data.tokenizer) if data.tokenizer else None)
    records = Records(data.path, data.ignored_keys)
    loaded = Tokenizer(given) if given is not None else None
    stamp = os.stat(records.file)
    settings = {
        "format": FORMAT,
        "file": str(records.file.resolve()),
        "ignored_keys": sorted(data.ignored_keys),
        "stamp": [stamp.st_size, stamp.st_mtime_ns, stamp.st_ino],
        "tokenizer": data.tokenizer_vocab_size if given is None else None,
    }
    folder = user_path(data.cache_dir) / f"images-{cache.name_of(settings)}"

    def make(building: Path) -> None:
        note(f"{records.file}: checking {len(records)} records")
        _check_records(records, data, building, train=given is None)

    with writing(folder.parent):
        meta = cache.build_once(folder, lambda: _known(folder), make)
    if loaded is None or given is None:
        given = folder / TOKENIZER
        loaded = Tokenizer(folder / TOKENIZER)
    sha256 = sha256_of(given)
    own = {"vocab_size": loaded.vocab_size, "eod": loaded.eod, "tokenizer_sha256": sha256}
    return Corpus(None, given, {**meta, **own})


def _known(folder: Path) -> dict[str, Any] | None:
    try:
        return cache.read_meta(folder)
    except (OSError, ValueError):
        return None


def _check_records(records: Records, data: DataConfig, folder: Path, *, train: bool) -> None:
    """Check every record, and write metadata and a trained tokenizer into a folder."""
    digest = hashlib.sha256()
    images = 0
    for number in range(len(records)):
        line = records.line(number)
        record = records.record(number)
        with records.named(number):
            check_images(record, records.folder)
        digest.update(line)
        # sizes replace the contents of images, which are not read before training
        for name in record.images:
            images += 1
            digest.update(b"\0%d" % (records.folder / name).stat().st_size)
    if not len(records):
        raise CorruptData(f"{records.file}: it has no record")
    if train:
        from mtrain.data.text.tokenizer import train_bpe

        made = train_bpe(_texts(records), data.tokenizer_vocab_size)
        (folder / TOKENIZER).write_text(made.to_str(), encoding="utf-8")
    meta = {
        "kind": "image_text",
        "source": records.folder.name,
        "documents": len(records),
        "images": images,
        "fingerprint": digest.hexdigest()[:32],
    }
    cache.write_meta(folder, meta)


def _texts(records: Records) -> Iterator[str]:
    for number in range(len(records)):
        yield "".join(
            piece.text for piece in records.record(number).pieces if isinstance(piece, Span)
        )


class ImageTextSamples:
    """The samples of a range of records, in one epoch after another; `len` is the number of one.

    The order of epoch e is drawn from the seed and e.
    """

    def __init__(
        self,
        records: Records,
        part: range,
        seq_length: int,
        seed: int,
        tokenizer: Tokenizer,
        vocab_size: int,
        name: str,
    ) -> None:
        self.records = records
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
        """Return the record of a sample."""
        epoch, place = divmod(int(number), len(self.part))
        return self.part.start + int(self._order(epoch)(np.array([place], np.int64))[0])

    def _encode(self, record: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids int64 [seq_length + 1] and loss mask of a record, cut or padded."""
        with self.records.named(record):
            ids, known = encode_record(self.records.record(record), self._tokenizer)
            if max(ids, default=0) >= self._vocab_size:
                raise CorruptData(
                    f"token id {max(ids)}; the vocabulary has ids 0 to {self._vocab_size - 1}"
                )
        length = self.seq_length + 1
        tokens = np.full(length, NOTHING, np.int64)
        learned = np.zeros(length, np.bool_)
        kept = min(length, len(ids))
        tokens[:kept] = ids[:kept]
        learned[:kept] = known[:kept]
        return tokens, learned

    def batch(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return int64 [n, seq_length + 1]: token ids, one `IMAGE` for an image, `NOTHING` for
        padding.

        Raises CorruptData for a wrong record, or an id outside the vocabulary.
        """
        return np.stack([self._tokens(self.record_of(number))[0] for number in numbers])

    def learned(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the loss mask of these tokens: bool [n, seq_length + 1]."""
        return np.stack([self._tokens(self.record_of(number))[1] for number in numbers])

    def images(self, numbers: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
        """Return every image of the samples in its order: float32 [images, 3, size, size].

        Raises CorruptData, with line and name, for an unreadable image.
        """
        out = [np.zeros((0, 3, size, size), np.float32)]
        for number in map(self.record_of, numbers):
            with self.records.named(number):
                for name in self.records.record(number).images:
                    out.append(load(inside(self.records.folder, name), size)[None])
        return np.concatenate(out)

    def image_count(self, number: int) -> int:
        """Return the number of images of a sample's record, even if their places are cut off."""
        return len(self.records.record(self.record_of(number)).images)

    def place(self, number: int) -> str:
        """Return file and line of a sample's record."""
        return self.records.place(self.record_of(number))

    def describe(self) -> dict[str, int]:
        """Return the numbers of records, and of samples of an epoch."""
        return {"documents": len(self.part), "samples": len(self.part)}


def open_image_text(
    data: DataConfig, vocab_size: int, seed: int, corpus: Corpus, need: Sequence[str]
) -> dict[str, ImageTextSamples | None]:
    """Return the samples of each split: consecutive records, at least one for a share above zero.

    Raises ConfigError if a needed split has no record, or the tokenizer has more ids than the
    model.
    """
    problem = corpus.vocabulary_problem(vocab_size)
    if problem is not None:
        raise ConfigError([problem])
    assert corpus.tokenizer is not None
    from mtrain.data.text.tokenizer import Tokenizer

    records = Records(data.path, data.ignored_keys)
    tokenizer = Tokenizer(corpus.tokenizer)
    out: dict[str, ImageTextSamples | None] = dict.fromkeys(SHARES)
    for name, part in zip(SHARES, split_records(len(records), data.split), strict=True):
        # evaluations of all runs read the same samples, whatever their seed
        order = seed if name == "train" else 0
        if len(part):
            out[name] = ImageTextSamples(
                records, part, data.length, order, tokenizer, vocab_size, name
            )
        elif name in need or name == "train":
            rule = f"the {name} split has none of the {len(records)} records in {records.file}"
            fix = f"a larger share for {name}"
            raise ConfigError.of("MT605", "data.split", list(data.split), rule, fix)
    return out
