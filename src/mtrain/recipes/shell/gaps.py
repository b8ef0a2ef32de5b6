"""Texts with gaps: parts of a script that only running it could fill, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """A part of a text that only running the script could fill."""

    text: str
    """The script's spelling."""
    where: str
    """`file:line`."""
    why: str
    """The end of a sentence that begins with `text`."""
    absent: bool = False
    """True if the text is empty unless the environment, or an argument of the script, sets it."""
    words: tuple[Word, ...] | None = None
    """All words that it may add, if they are known."""


@dataclass(frozen=True)
class Unread:
    """A word that is only partly known."""

    pieces: tuple[str | Gap, ...]

    @property
    def text(self) -> str:
        """Return the known parts of the word, with its gaps in the script's spelling."""
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces)

    @property
    def start(self) -> str:
        """Return the known text at its beginning."""
        return self.pieces[0] if isinstance(self.pieces[0], str) else ""

    @property
    def gaps(self) -> list[Gap]:
        """Return its unknown parts."""
        return [piece for piece in self.pieces if isinstance(piece, Gap)]

    @property
    def whole(self) -> bool:
        """Return whether the entire word is unknown, so that it may be no word or several."""
        return not any(isinstance(piece, str) and piece for piece in self.pieces)

    @property
    def absent(self) -> bool:
        """Return whether the word is missing unless the environment or an argument sets it."""
        return self.whole and all(gap.absent for gap in self.gaps)

    @property
    def why(self) -> str:
        """Return what is needed to know it, with the line."""
        return "; ".join(
            dict.fromkeys(f"needs {gap.text} ({gap.where}), which {gap.why}" for gap in self.gaps)
        )


Word = str | Unread
Value = tuple[str | Gap, ...]
"""A text with gaps."""


def shown(word: Word) -> str:
    """Return a word as a person reads it."""
    return word if isinstance(word, str) else word.text


def pieces_of(word: Word) -> Value:
    """Return a word as a text with gaps."""
    return (word,) if isinstance(word, str) else word.pieces


def word_of(value: Iterable[str | Gap]) -> Word:
    """Return a text with gaps as one word."""
    pieces = list[str | Gap]()
    for piece in value:
        # neighbouring texts become one, so that equal words compare equal
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    if any(isinstance(piece, Gap) for piece in pieces):
        return Unread(tuple(pieces))
    return "".join(piece for piece in pieces if isinstance(piece, str))


def split(value: Value) -> list[list[str | Gap]]:
    """Return a text cut at spaces; a gap belongs to the word around it."""
    # a gap has no spaces that could be seen: it may turn out as several words, and counts as one
    out = list[list[str | Gap]]()
    fresh = True
    for piece in value:
        texts = [piece] if isinstance(piece, Gap) else re.split(r"[ \t\n]+", piece)
        for number, text in enumerate(texts):
            fresh = fresh or number > 0
            if text != "":
                if fresh:
                    out.append([])
                out[-1].append(text)
                fresh = False
    return out


def words_in(word: Word) -> list[Word]:
    """Return the words that an unquoted word becomes."""
    return [word_of(pieces) for pieces in split(pieces_of(word))]


def between(items: Sequence[Value]) -> Value:
    """Return items with a space between them."""
    spaced: Iterator[tuple[str | Gap, ...]] = (
        (" ", *item) if n else item for n, item in enumerate(items)
    )
    return tuple(piece for item in spaced for piece in item)
