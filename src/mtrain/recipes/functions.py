"""Functions of a shell script, apart from the commands that run at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mtrain.recipes.words import Raw, Statement

_BEFORE = ("if", "elif", "then", "else", "do", "while", "until", "!", "time")
"""Words that a brace may stand behind."""


def apart(found: Iterable[Statement]) -> tuple[list[Statement], dict[str, list[Statement]]]:
    """The statements outside of functions, and by its name what stands behind the first brace of each function."""
    rest: list[Statement] = []
    bodies: dict[str, list[Statement]] = {}
    queue = deque(found)
    while queue:
        statement = queue.popleft()
        keyword = bool(statement.words) and statement.words[0].is_text("function")
        words = statement.words[1:] if keyword else statement.words
        if keyword and len(words) > 1 and words[1].is_text("{"):
            opening = replace(statement, words=words[1:])
        elif len(words) == 1 and (keyword or statement.ended == "(") and queue and _opened(queue[0].words[:1]):
            opening = queue.popleft()
        else:
            rest.append(statement)
            continue
        body, depth = [replace(opening, words=opening.words[1:], behind="\n")], _opened(opening.words)
        while queue and depth > 0:
            body.append(queue.popleft())
            depth += _opened(body[-1].words)
        bodies["".join(part.text for part in words[0].parts)] = body
    return rest, bodies


def _opened(words: Sequence[Raw]) -> int:
    """How many braces a statement opens, less those that it closes."""
    depth = 0
    for word in words:
        if word.is_text("{") or word.is_text("}"):
            depth += 1 if word.is_text("{") else -1
        elif word.keyword not in _BEFORE:
            break
    return depth
