"""Python files, each read, parsed and walked once for all tests of a process."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def text_of(path: Path) -> str:
    """Return the text of a file."""
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(text_of(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of the tree of a file."""
    return list(ast.walk(tree_of(path)))


def comments_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment of a file."""
    lines = text_of(path).encode().split(b"\n")
    # The tree knows where strings are, so a tokenizer need not look for them again.
    strings: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for node in nodes_of(path):
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        ):
            last = node.end_lineno or node.lineno
            for line in range(node.lineno, last + 1):
                start = node.col_offset if line == node.lineno else 0
                end = node.end_col_offset or 0 if line == last else len(lines[line - 1])
                strings[line].append((start, end))
    for number, text in enumerate(lines, 1):
        at = text.find(b"#")
        while at >= 0:
            if not any(start <= at < end for start, end in strings[number]):
                yield number, text[at:].decode()
                break
            at = text.find(b"#", at + 1)
