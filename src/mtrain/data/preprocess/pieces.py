"""A cache of the token ids of pieces, into which texts are cut where no token crosses a cut.

A tokenizer cuts a text before it looks for tokens, at places that are known for the patterns below.
Words repeat, so most pieces were encoded before. The library encodes whole any text that cannot be
cut with certainty.

The cuts are right for this reason: every pattern is a list of alternatives that are tried from left
to right, where the previous match ended. In GPT-2's pattern no alternative has white space after
anything else, so a match ends wherever white space follows a letter, a digit or a sign. The later
patterns take line ends after signs, and only there. The only look-ahead, `\\s+(?!\\S)`, is at the
end of white space, and no piece ends in white space unless the text does.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_CONTRACTED}?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{_CONTRACTED}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns of Llama 3 and GPT-4, Qwen 2, and GPT-4o
LATER = (
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}",
    rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_TAIL}",
    O200K,
)
AT_SPACES = re.compile(r"\s*\S+|\s+")
NOT_BEHIND_SIGNS = re.compile(r"\s*\S+(?:(?<![A-Za-z0-9])[\r\n]\s*\S*)*|\s+")
# For WordPiece, which drops white space
WORDS = re.compile(r"[^ \t\n\r]+")
# Characters that only some engines take for white space: a text with one is encoded whole
DOUBTFUL = "[\x1c-\x1f\x85\u180e\u200b]"
# DOUBTFUL, and the characters that BERT removes from words
CONTROLS = "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u180e\u200b]"
# GPT2 and LATER for ASCII text, with explicit classes of letters and digits
_OF_ASCII = (
    r" ?(?:[A-Za-z]+|[0-9]+|(?<! )'(?:s|t|re|ve|m|ll|d)|[^\sA-Za-z0-9]+)|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}|"
    r" ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]|"
    r" ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[0-9]{1,3}|"
    r" ?[^\sA-Za-z0-9]+[\r\n/]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+",
)
FINER = {
    pattern: re.compile(ascii_) for pattern, ascii_ in zip((GPT2, *LATER), _OF_ASCII, strict=True)
}
OF_WORDPIECE = re.compile(r"[A-Za-z0-9]+|[^A-Za-z0-9]")
# Characters of texts that are packed at once
BATCH_CHARS = 1 << 19
# The most pieces that are cached (about 50 MB)
MOST = 1 << 18
# The most characters of a cached piece: longer ones hardly repeat
LONGEST = 48
# The letters of ByteLevel that stand for bytes of ASCII that cannot be printed; the others stand
# for themselves.
LETTERS = {byte: 256 + i for i, byte in enumerate([*range(33), 127])}
Find = Callable[[str], list[str]]


@dataclass(frozen=True)
class Cut:
    """A way to cut texts into pieces."""

    pieces: Find
    words: Find | None
    """A cut of ASCII into the tokenizer's own words, None if that is unknown."""
    doubtful: str = DOUBTFUL
    """The characters of texts that are encoded whole."""


def cut_of(body: dict[str, Any]) -> Cut | None:
    """Return the cut of texts for a tokenizer.json, or None if they may not be cut."""
    model = body.get("model") or {}
    normalizer = body.get("normalizer")
    if any(body.get(key) for key in ("truncation", "padding")) or model.get("dropout"):
        return None
    kind = (normalizer or {}).get("type")
    steps = _steps(body.get("pre_tokenizer"))
    names = [step["type"] for step in steps]
    normalized = any(token.get("normalized") for token in body.get("added_tokens") or ())
    # such a token is searched for in normalized text, in which its name may be spelled differently
    if kind and normalized:
        return None
    if model.get("type") == "WordPiece":
        fits = kind in (None, "BertNormalizer") and names == ["BertPreTokenizer"]
        return Cut(WORDS.findall, OF_WORDPIECE.findall, CONTROLS) if fits else None
    if model.get("type") not in ("BPE", None) or kind not in (None, "NFC") or not steps:
        return None
    *before, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if not last.get("use_regex", True):
        return _of_split(before[-1]) if names[:-1] == ["Split"] else None
    if names[:-1] == ["Digits"]:
        return Cut(AT_SPACES.findall, None)
    return Cut(AT_SPACES.findall, FINER[GPT2].findall) if not before else None


def _of_split(step: dict[str, Any]) -> Cut | None:
    pattern = (step.get("pattern") or {}).get("Regex")
    if step.get("behavior") != "Isolated" or step.get("invert") or pattern not in FINER:
        return None
    return Cut((AT_SPACES if pattern == GPT2 else NOT_BEHIND_SIGNS).findall, FINER[pattern].findall)


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    """Return the steps of a pre-tokenizer, in their order."""
    if not isinstance(pre_tokenizer, dict):
        return []
    inner = pre_tokenizer.get("pretokenizers") if pre_tokenizer.get("type") == "Sequence" else None
    return [pre_tokenizer] if inner is None else [step for one in inner for step in _steps(one)]


class Pieces(dict[str, bytes]):
    """A cache of piece -> ids as bytes of a dtype; see the module.

    With `plain`, the name of a special token in a text is characters, and not the token.
    """

    batch_chars = BATCH_CHARS

    def __init__(self, tokenizer: tokenizers.Tokenizer, cut: Cut, code: str, plain: bool) -> None:
        self._tokenizer = tokenizer
        self._cut = cut
        self._code = code
        if type(tokenizer.model).__name__ == "BPE" and cut.words is not None:
            self._model = tokenizer.model
        else:
            self._model = None
        added = tokenizer.get_added_tokens_decoder().values()
        # the library looks for added tokens before it cuts, so they may cross a cut
        names = [
            re.escape(token.content)
            for token in added
            if token.content and not (plain and token.special)
        ]
        self._named = re.compile("|".join(names) or "(?!)").search
        self._doubtful = re.compile(cut.doubtful).search
        self._missing: list[str] = []

    # A dict's own lookup finds cached pieces in C. An unknown one comes here, is noted, and is
    # encoded later together with the other unknown ones of the batch.
    def __missing__(self, piece: str) -> bytes:
        self._missing.append(piece)
        return b""

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        """Return the ids of each text."""
        self._make_room()
        out = [b""] * len(texts)
        again = list[int]()
        whole = list[int]()
        # one text at a time, so that its pieces stay in the processor's cache
        for i, text in enumerate(texts):
            pieces = self._pieces(text)
            if pieces is None:
                whole.append(i)
                continue
            before = len(self._missing)
            out[i] = self._joined(pieces)
            if len(self._missing) > before:
                again.append(i)
        learned = self._learn()
        for i in again:
            out[i] = self._joined(self._pieces(texts[i]) or [])
        self._forget_long(learned)
        for i, packed in zip(whole, self._encoded([texts[i] for i in whole]), strict=True):
            out[i] = packed
        return out

    def _pieces(self, text: str) -> list[str] | None:
        """Return the pieces of a text, or None if it is encoded whole."""
        if self._doubtful(text) or self._named(text):
            return None
        words = self._cut.words
        return words(text) if words is not None and text.isascii() else self._cut.pieces(text)

    def _make_room(self) -> None:
        if len(self) > MOST:
            self.clear()

    def _forget_long(self, learned: list[str]) -> None:
        for piece in learned:
            if len(piece) > LONGEST:
                del self[piece]

    def _joined(self, pieces: list[str]) -> bytes:
        if len(pieces) < 2:
            return self[pieces[0]] if pieces else b""
        return b"".join(itemgetter(*pieces)(self))

    def _learn(self) -> list[str]:
        """Encode the missing pieces, and return them."""
        missing = list(dict.fromkeys(self._missing))
        self._missing = []
        if self._model is None:
            self.update(zip(missing, self._encoded(missing), strict=True))
            return missing
        words = [piece for piece in missing if piece.isascii()]
        rest = [piece for piece in missing if not piece.isascii()]
        self.update(zip(words, self._by_model(words), strict=True))
        self.update(zip(rest, self._encoded(rest), strict=True))
        return missing

    def _by_model(self, pieces: list[str]) -> Iterator[bytes]:
        """Yield the packed ids of ASCII pieces, word by word in the letters of ByteLevel."""
        assert self._model is not None
        assert self._cut.words is not None
        # the model by itself skips the library's normalizer, pre-tokenizer and offsets
        tokenize = self._model.tokenize
        for piece in pieces:
            ids = [
                token.id
                for word in self._cut.words(piece)
                for token in tokenize(word.translate(LETTERS))
            ]
            yield array(self._code, ids).tobytes()

    def _encoded(self, texts: list[str]) -> list[bytes]:
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        return [array(self._code, encoding.ids).tobytes() for encoding in found]


def pieces_of(
    tokenizer: tokenizers.Tokenizer, code: str, plain: bool, kind: type[Pieces] = Pieces
) -> Pieces | None:
    """Return a cache for a tokenizer, or None if its texts may not be cut."""
    cut = cut_of(json.loads(tokenizer.to_str()))
    return None if cut is None else kind(tokenizer, cut, code, plain)


# Characters of texts that `BulkPieces` packs at once
BULK_CHARS = 1 << 21
# The most characters of a text: its offsets in bytes must fit into arrow's 32 bits
LARGEST = 1 << 28
ODD = re.compile(rf"{DOUBTFUL}|[\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]").search
# The doubtful white space of ASCII
CONTROL = range(0x1C, 0x20)
# Kinds of bytes; BEYOND is any byte of a character that is not ASCII
LETTER, DIGIT, SIGN, APOSTROPHE, SPACE, LINE, FEED, BEYOND = range(8)
KINDS = 8
# Between two kinds there is always a cut, or only if no further white space follows
ALWAYS = 1
BEFORE_THE_LAST = 2


def _kinds() -> np.ndarray:
    """Return the kind of each byte; uint8 [256]."""
    out = np.full(256, SIGN, np.uint8)
    for byte in range(128):
        letter = chr(byte)
        if letter.isalnum():
            out[byte] = LETTER if letter.isalpha() else DIGIT
    for kind, letters in (
        (APOSTROPHE, b"'"),
        (SPACE, b" \t"),
        (LINE, b"\r\n"),
        (FEED, b"\x0b\x0c"),
    ):
        out[list(letters)] = kind
    out[128:] = BEYOND
    return out


def _cuts(*, behind_signs: bool) -> np.ndarray:
    """Return whether texts are cut between two kinds; uint8 [KINDS * KINDS]."""
    out = np.zeros((KINDS, KINDS), np.uint8)
    out[LETTER, [DIGIT, SIGN, SPACE, LINE, FEED]] = ALWAYS
    out[DIGIT, [LETTER, SIGN, SPACE, LINE, FEED]] = ALWAYS
    out[SIGN, [DIGIT, SPACE]] = ALWAYS
    out[APOSTROPHE, [DIGIT, SPACE]] = ALWAYS
    out[BEYOND, SPACE] = ALWAYS
    out[LINE, [LETTER, DIGIT]] = ALWAYS
    # the last of several spaces belongs to the word after it
    out[[SPACE, LINE, FEED], SPACE] = BEFORE_THE_LAST
    # GPT-2's pattern ends after signs; the later ones join them to letters and line ends
    if behind_signs:
        out[[SPACE, LINE, FEED], LINE] = BEFORE_THE_LAST
        out[SIGN, [LETTER, LINE]] = ALWAYS
        out[LINE, [SIGN, APOSTROPHE]] = ALWAYS
        out[[APOSTROPHE, BEYOND], LINE] = ALWAYS
    return out.reshape(-1)


KIND_OF = _kinds()
CUT_BETWEEN = {behind_signs: _cuts(behind_signs=behind_signs) for behind_signs in (False, True)}


class BulkPieces(Pieces):
    """`Pieces` for many texts at once."""

    batch_chars = BULK_CHARS

    def __init__(self, tokenizer: tokenizers.Tokenizer, cut: Cut, code: str, plain: bool) -> None:
        super().__init__(tokenizer, cut, code, plain)
        import pyarrow

        self._arrow: Any = pyarrow
        self._in_bulk = self._model is not None
        self._between = CUT_BETWEEN[cut.words == FINER[GPT2].findall]

    def pack(self, texts: Sequence[str]) -> list[bytes]:
        if not self._in_bulk:
            return super().pack(texts)
        encoded = [text.encode() for text in texts]
        # smaller bytes wrap around to large ones, so one comparison finds the whole range
        offsets = np.frombuffer(b"".join(encoded), np.uint8) - CONTROL[0]
        control = bool((offsets < len(CONTROL)).any())
        fits = [self._fits(text, control) for text in texts]
        rest = iter(super().pack([text for text, fit in zip(texts, fits, strict=True) if not fit]))
        found = iter(self._pack([text for text, fit in zip(encoded, fits, strict=True) if fit]))
        return [next(found) if fit else next(rest) for fit in fits]

    def _fits(self, text: str, control: bool) -> bool:
        """Return whether a text is cut in bytes; `control`: some text has a byte of CONTROL."""
        if not 0 < len(text) <= LARGEST or self._named(text):
            return False
        if text.isascii() and not control:
            return True
        return not ODD(text)

    def _pack(self, texts: list[bytes]) -> list[bytes]:
        if not texts:
            return []
        pyarrow = self._arrow
        data = b"".join(texts)
        ends = np.cumsum([len(text) for text in texts])
        begins = np.append(0, ends[:-1])
        places = cut_places(np.frombuffer(data, np.uint8), begins, ends, self._between)
        bounds = np.append(places, len(data)).astype(np.int32)
        buffers = [None, pyarrow.py_buffer(bounds), pyarrow.py_buffer(data)]
        # arrow finds the distinct pieces without an object of Python for each
        pieces = pyarrow.Array.from_buffers(
            pyarrow.string(), len(places), buffers
        ).dictionary_encode()
        known = pyarrow.array(self._ids(pieces.dictionary.to_pylist()), pyarrow.binary())
        joined = known.take(pieces.indices)
        _, offsets, ids = joined.buffers()
        at = np.frombuffer(offsets, np.int32)[joined.offset : joined.offset + len(joined) + 1]
        cuts = [*at[np.searchsorted(places, begins)].tolist(), int(at[-1])]
        held = memoryview(ids) if ids is not None else memoryview(b"")
        return [bytes(held[a:b]) for a, b in pairwise(cuts)]

    def _ids(self, pieces: list[str]) -> list[bytes]:
        """Return the ids of distinct pieces; those of long ones are not cached."""
        self._make_room()
        packed = list(map(self.__getitem__, pieces))
        if self._missing:
            learned = self._learn()
            for i in [i for i, ids in enumerate(packed) if not ids]:
                packed[i] = self[pieces[i]]
            self._forget_long(learned)
        return packed


def cut_places(
    data: np.ndarray, begins: np.ndarray, ends: np.ndarray, table: np.ndarray
) -> np.ndarray:
    """Return the places where pieces of texts begin, int64; the texts are end to end in UTF-8.

    No piece is empty.
    """
    kinds = KIND_OF[data]
    # the row and the column of the table in one index: kind * 8 + next kind
    pairs = np.left_shift(kinds[:-1], 3)
    pairs |= kinds[1:]
    between = table[pairs]
    cut = np.zeros(len(data), np.bool_)
    np.equal(between, ALWAYS, out=cut[1:])
    several = np.flatnonzero(between[:-1] == BEFORE_THE_LAST) + 1
    following = kinds[several + 1]
    cut[several] = (following != SPACE) & (following != LINE) & (following != FEED)
    cut[ends - 1] = False  # the next byte is of another text
    cut[begins] = True
    return np.flatnonzero(cut)


def memory_of(tokenizer: tokenizers.Tokenizer, code: str, plain: bool) -> Pieces | None:
    """Return the fastest available `Pieces`, or None if the texts of a tokenizer may not be cut."""
    return pieces_of(tokenizer, code, plain, Pieces if find_spec("pyarrow") is None else BulkPieces)
