"""Texts of a shell script that are not wholly known: gaps in words, with the reason and
the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """What only running a script could tell."""

    text: str
    """As the script spells it."""
    where: str
    """`file:line`."""
    why: str
    """The end of a sentence that begins with `text`."""
    absent: bool = False
    """Whether it is nothing unless the environment, or an argument of the script, says something.
    """
    words: tuple[Word, ...] | None = None
    """All that it may add, where that is known."""


@dataclass(frozen=True)
class Unread:
    """A word that is not wholly known."""

    pieces: tuple[str | Gap, ...]

    @property
    def text(self) -> str:
        """Return the word as far as it is known, its gaps as the script spells them."""
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.pieces)

    @property
    def start(self) -> str:
        """What is known of its beginning."""
        return self.pieces[0] if isinstance(self.pieces[0], str) else ""

    @property
    def gaps(self) -> list[Gap]:
        """What is not known of it."""
        return [piece for piece in self.pieces if isinstance(piece, Gap)]

    @property
    def whole(self) -> bool:
        """Return whether nothing of it is known, so that it may be no word or several."""
        return not any(isinstance(piece, str) and piece for piece in self.pieces)

    @property
    def absent(self) -> bool:
        """Return whether there is no such word unless the environment or an argument says
        something.
        """
        return self.whole and all(gap.absent for gap in self.gaps)

    @property
    def why(self) -> str:
        """What is needed to know it, with the line."""
        return "; ".join(
            dict.fromkeys(f"needs {gap.text} ({gap.where}), which {gap.why}" for gap in self.gaps)
        )


Word = str | Unread
Value = tuple[str | Gap, ...]
"""A text with gaps."""


def shown(word: Word) -> str:
    """Return a word as a person reads it."""
    return word if isinstance(word, str) else word.text


def word_of(value: Iterable[str | Gap]) -> Word:
    """Return a text with gaps as one word."""
    pieces = list[str | Gap]()
    for piece in value:
        if isinstance(piece, str) and pieces and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    if any(isinstance(piece, Gap) for piece in pieces):
        return Unread(tuple(pieces))
    return "".join(piece for piece in pieces if isinstance(piece, str))


def split(value: Value) -> list[list[str | Gap]]:
    """Return a text cut at spaces; a gap is a part of the word that it stands in."""
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
    """Return a word as the words that it becomes where it is not quoted."""
    return [word_of(pieces) for pieces in split((word,) if isinstance(word, str) else word.pieces)]


def between(items: Sequence[Value]) -> Value:
    """Items with a space between them."""
    spaced: Iterator[tuple[str | Gap, ...]] = (
        (" ", *item) if n else item for n, item in enumerate(items)
    )
    return tuple(piece for item in spaced for piece in item)
