"""Records of a JSON Lines file: a text and the images in it, as a list of pieces.

A line is {"image": path, "text": text}, or {"image": path, "conversations": [{"from": "human",
"value": text}, {"from": "gpt", "value": text}, ...]} as in LLaVA. `image` may be a list, or be left
out. `<image>` in a text is the place of an image; the images of a text without one precede it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtrain.data.image_text.images import inside
from mtrain.data.record_keys import Keys, learned, require_learned
from mtrain.errors import CorruptData

if TYPE_CHECKING:  # importing it loads the tokenizers library
    from mtrain.data.text.tokenizer import Tokenizer

PLACE = "<image>"
IMAGE = -1
NOTHING = -2
"""In place of a token id: an image, and padding after the end of a text."""
MAX_LINE = 4 << 20
MAX_IMAGES = 256
END = object()
"""A piece: the end of a document, or of an answer."""
UNLEARNED_END = object()
"""The end of an answer that is not learned."""
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
    try:
        "".join((*images, *(span.text for span in spans if isinstance(span, Span)))).encode()
    except UnicodeEncodeError as error:
        raise CorruptData(
            f"\\u{ord(error.object[error.start]):04x} is half of a surrogate pair"
        ) from None
    places = sum(span.text.count(PLACE) for span in spans if isinstance(span, Span))
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

    LLaVA's own training had a system prompt before the first question, which is left out here.
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
