"""Pieces of many texts at once: cut in their bytes by numpy, deduplicated and joined by pyarrow.

Bytes are cut only where two neighbours decide it. For every pattern of `pieces` in ASCII texts,
that is after a word, a number or a line end, before a number, before a space after anything but
white space, and before the last of several spaces; for GPT-2's pattern also after signs. An
apostrophe stays with its neighbours, because of contractions; so does a letter beyond ASCII, except
before white space. No normal form joins an ASCII letter to the one before it. `Pieces` handles
texts with other white space than ASCII's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import tokenizers

from mtrain.data.preprocess.encoders.pieces import DOUBTFUL, FINER, GPT2, Cut, Pieces, pieces_of

MANY_AT_ONCE = 1 << 21
"""Letters of texts that are packed at once."""
LARGEST = 1 << 28
"""Letters of a text whose places fit into 32 bits with room to spare."""
ODD = re.compile(rf"{DOUBTFUL}|[\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]").search
CONTROL = range(0x1C, 0x20)
"""The doubtful white space of ASCII."""
LETTER, DIGIT, SIGN, APOSTROPHE, SPACE, LINE, FEED, BEYOND = range(8)
KINDS = 8
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
    out[LETTER, [DIGIT, SIGN, SPACE, LINE, FEED]] = out[
        DIGIT, [LETTER, SIGN, SPACE, LINE, FEED]
    ] = ALWAYS
    out[SIGN, [DIGIT, SPACE]] = out[APOSTROPHE, [DIGIT, SPACE]] = out[BEYOND, SPACE] = ALWAYS
    out[LINE, [LETTER, DIGIT]] = ALWAYS
    out[[SPACE, LINE, FEED], SPACE] = BEFORE_THE_LAST
    if behind_signs:
        out[[SPACE, LINE, FEED], LINE] = BEFORE_THE_LAST
        out[SIGN, [LETTER, LINE]] = out[LINE, [SIGN, APOSTROPHE]] = out[
            [APOSTROPHE, BEYOND], LINE
        ] = ALWAYS
    return out.reshape(-1)


KIND_OF = _kinds()
CUT_BETWEEN = {behind_signs: _cuts(behind_signs=behind_signs) for behind_signs in (False, True)}


class BulkPieces(Pieces):
    """`Pieces` for many texts at once."""

    many = MANY_AT_ONCE

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
        control = bool(
            (np.frombuffer(b"".join(encoded), np.uint8) - CONTROL[0] < len(CONTROL)).any()
        )
        fits = [self._fits(text, control) for text in texts]
        rest = iter(super().pack([text for text, fit in zip(texts, fits, strict=True) if not fit]))
        found = iter(self._pack([text for text, fit in zip(encoded, fits, strict=True) if fit]))
        return [next(found) if fit else next(rest) for fit in fits]

    def _fits(self, text: str, control: bool) -> bool:
        """Return whether a text is cut in its bytes; `control`: some text of ASCII may have one of
        CONTROL.
        """
        if not 0 < len(text) <= LARGEST or self._named(text):
            return False
        return not ODD(text) if control or not text.isascii() else True

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
        """Return the ids of pieces that differ; those of long ones are not kept."""
        self._make_room()
        packed = list(map(self.__getitem__, pieces))
        if self._missing:
            learnt = self._learn()
            for i in [i for i, ids in enumerate(packed) if not ids]:
                packed[i] = self[pieces[i]]
            self._forget_long(learnt)
        return packed


def cut_places(
    data: np.ndarray, begins: np.ndarray, ends: np.ndarray, table: np.ndarray
) -> np.ndarray:
    """Return where the pieces of texts begin, given end to end in UTF-8; int64, from 0 on.

    No piece is empty.
    """
    kinds = KIND_OF[data]
    pairs = np.left_shift(kinds[:-1], 3)
    pairs |= kinds[1:]
    between = table[pairs]
    cut = np.zeros(len(data), np.bool_)
    np.equal(between, ALWAYS, out=cut[1:])
    several = np.flatnonzero(between[:-1] == BEFORE_THE_LAST) + 1
    behind = kinds[several + 1]
    cut[several] = (behind != SPACE) & (behind != LINE) & (behind != FEED)
    cut[ends - 1] = False  # what follows is of another text
    cut[begins] = True
    return np.flatnonzero(cut)


def memory_of(tokenizer: tokenizers.Tokenizer, code: str, plain: bool) -> Pieces | None:
    """Return the fastest available `Pieces`, or None if the texts of a tokenizer may not be cut."""
    return pieces_of(tokenizer, code, plain, Pieces if find_spec("pyarrow") is None else BulkPieces)
