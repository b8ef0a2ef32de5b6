"""Columns of text."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, left: int, ragged: Sequence[int] = ()) -> list[str]:
    """Return columns as wide as they need, the first `left` of them and those in `ragged` ragged
    right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = (
        [
            text.ljust(w) if i < left or i in ragged else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return [f"  {'  '.join(row)}".rstrip() for row in cells]
