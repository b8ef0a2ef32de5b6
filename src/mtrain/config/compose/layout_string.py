"""A layout in one word: `tp8pp12cp2vpp4ep8`, `tp2pp2dp2`, `tp4pp4sp`."""

from __future__ import annotations

import re
from typing import Any

GRAMMAR = (
    "a layout is axes with their degrees, such as tp4pp4 or tp8pp12cp2vpp4ep8: "
    "tp pp vpp cp ep etp dp, each at most once and at least 1, and the flag sp"
)

_TOKEN = re.compile(r"(vpp|etp|tp|pp|cp|ep|dp)([0-9]{1,6})|(sp)(?![0-9])")


def looks_like_layout(word: str) -> bool:
    """Return whether `word` was meant as a layout: it begins with `sp`, or an axis and a digit."""
    return re.match(r"(vpp|etp|tp|pp|cp|ep|dp)-?[0-9]|sp\Z", word) is not None


def parse_layout(word: str) -> dict[str, Any]:
    """Return the values of the group `parallel` that `word` means.

    `dp` sets `ranks` = tp * pp * cp * dp, because the data-parallel size is always derived.

    Raises:
        ValueError: not a layout; the message names the invalid part and the grammar.
    """
    degrees: dict[str, int] = {}
    position = 0
    while position < len(word):
        match = _TOKEN.match(word, position)
        if match is None:
            rest = word[position:]
            what = (
                "a degree has six digits at most" if rest[0].isdigit() else f"cannot read {rest!r}"
            )
            raise ValueError(f"{what}; {GRAMMAR}")
        axis = match.group(1) or "sp"
        degree = int(match.group(2) or 1)
        if axis in degrees:
            raise ValueError(f"{axis} is given twice; {GRAMMAR}")
        if degree < 1:
            raise ValueError(f"{axis}{degree} is not positive; {GRAMMAR}")
        degrees[axis] = degree
        position = match.end()
    if not degrees:
        raise ValueError(GRAMMAR)
    values: dict[str, Any] = {axis: n for axis, n in degrees.items() if axis not in ("dp", "sp")}
    if "sp" in degrees:
        values["sequence_parallel"] = True
    if "dp" in degrees:
        # cp and pp count, ep and etp do not: experts are sharded over ranks of the same grid.
        copy = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("cp", 1)
        values["ranks"] = copy * degrees["dp"]
    return values


def nearest_layout(choice: str) -> str:
    """Return the readable parts of a misspelt layout as an override."""
    degrees: dict[str, str] = {}
    for axis, degree in re.findall(r"(vpp|etp|tp|pp|cp|ep|dp)([1-9][0-9]{0,5})(?![0-9])", choice):
        degrees.setdefault(axis, degree)
    word = "".join(f"{axis}{degree}" for axis, degree in degrees.items())
    return f"parallel={word or 'single'}"
