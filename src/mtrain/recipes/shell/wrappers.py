"""Commands that start other commands: shells with a text, and xargs, which reads further words."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import takewhile

from mtrain.recipes.shell.gaps import Gap, Unread, Word, pieces_of, shown, word_of

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")


def inner_text(words: list[Word]) -> tuple[list[Word], list[Word]] | None:
    """Split `srun bash -c TEXT` or `sbatch --wrap=TEXT` into the first words and the text."""
    for index, word in enumerate(words):
        if os.path.basename(shown(word)) in SHELLS:
            # a -c further on belongs to the program that the shell starts
            for place in range(index + 1, min(index + 6, len(words) - 1)):
                option = shown(words[place])
                if re.fullmatch("-[a-z]*c", option):
                    return words[:index], words[place + 1 : place + 2]
                if not option.startswith("-"):
                    break
        text = shown(word)
        # the output of a command, as in $(python3 blend.py --part train), is a gap, and no
        # command line of this script
        known = " ".join(piece for piece in pieces_of(word) if isinstance(piece, str))
        if (
            # ssh and similar programs take a whole command line as one word
            re.search(r"\s", known)
            and ".py" in known
            and " --" in known
            and not known.startswith("--")
        ):
            return words[:index], [word]
        if text.startswith("--wrap"):
            if text == "--wrap":
                return words[:index], words[index + 1 : index + 2]
            return words[:index], [
                word[7:] if isinstance(word, str) else word_of((word.start[7:], *word.pieces[1:]))
            ]
    return None


def with_input(words: list[Word], gap: Gap) -> list[Word]:
    """Return the words of a command; for `xargs` and `parallel`, a gap stands for the words that
    they read.

    `parallel` also reads the words after `:::`.
    """
    names = [os.path.basename(shown(word)) for word in words]
    place = next(
        (
            i
            for i, name in enumerate(names)
            if name in ("xargs", "parallel") or name.endswith(".py")
        ),
        None,
    )
    if place is None or names[place].endswith(".py"):
        return words
    mark = "{}" if names[place] == "parallel" else _mark(names[place + 1 :])
    command = list(takewhile(lambda word: not shown(word).startswith(":::"), words[place + 1 :]))
    filled = [_without(word, mark, gap) for word in command]
    if filled == command:
        # without a mark, the words come last
        filled = [*filled, Unread((gap,))]
    return [*words[: place + 1], *filled]


def _mark(options: Sequence[str]) -> str:
    """Return the text that `xargs -I TEXT` replaces; empty if xargs appends its words."""
    for index, option in enumerate(options):
        if not option.startswith("-"):
            return ""
        if option in ("-I", "--replace") and index + 1 < len(options):
            return options[index + 1] if option == "-I" else "{}"
        if option.startswith(("-I", "-i", "--replace=")):
            return option.partition("=")[2] if "=" in option else option[2:] or "{}"
    return ""


def _without(word: Word, mark: str, gap: Gap) -> Word:
    """Return a word with a gap in place of each `mark`."""
    if not mark or mark not in shown(word):
        return word
    pieces = list[str | Gap]()
    for piece in pieces_of(word):
        if isinstance(piece, Gap):
            pieces.append(piece)
            continue
        first, *others = piece.split(mark)
        pieces += [first, *(one for text in others for one in (gap, text))]
    return word_of(piece for piece in pieces if piece != "")
