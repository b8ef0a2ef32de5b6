"""`compare`: the differences of two runs, and the first step whose numbers wrongly differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.cli.output import refusal, say_json, table
from mtrain.cli.recipe.files import table as differences_table
from mtrain.config.compose.paths import program
from mtrain.errors import ConfigError, say_page, show, visible
from mtrain.launching.prove import TOLERANCES, tolerances_of
from mtrain.report.differing import Comparison, Deviation, compare, digest_of_numbers
from mtrain.report.folder import Record, curve, read
from mtrain.report.tail import end_of, usual
from mtrain.units import number_of, short

WRONG = 1
"""The exit code of runs whose numbers differ and should not."""
MOST_KEYS = 3


def run(words: Sequence[str], *, as_json: bool) -> int:
    """Print the comparison of two run folders; return 1 where numbers differ that must not.

    Raises:
        ConfigError: the words name no two runs.
    """
    if len(words) != 2 or any("=" in word for word in words):
        rule = f"cannot compare because it takes two run folders, not {len(words)}"
        raise refusal(rule, f"{program()} compare runs/ONE runs/OTHER")
    left, right = (read(Path(word).expanduser()) for word in words)
    found = compare(left, right, tolerances(left, right))
    if as_json:
        say_json(_data(left, right, found))
    else:
        say_page("\n".join(visible(line) for line in _lines(left, right, found)))
    if not found.steps:
        return ConfigError.exit_code
    return WRONG if found.is_wrong else 0


def tolerances(left: Record, right: Record) -> Mapping[str, float]:
    """Return the tolerances of `prove` for the number format of two runs."""
    config = left.config or right.config
    if config is None:
        return TOLERANCES["fp32"]
    if config.precision.format not in TOLERANCES:
        # fp16 has more digits than bf16, and a proof runs neither scale nor overflow.
        return TOLERANCES["bf16"]
    known = tolerances_of(config)
    half = TOLERANCES.get(config.precision.format, known)
    return {key: max(value, half[key]) for key, value in known.items()}


def _data(left: Record, right: Record, found: Comparison) -> dict[str, Any]:
    first = found.first
    return {
        "equal": found.steps > 0 and first is None,
        "expected_equal": found.must_agree,
        "changing": list(found.changing),
        "excuses": list(found.excuses),
        "steps": found.steps,
        "first": None if first is None else first.data(),
        "rows": [row.data() for row in found.rows],
        "differences": [
            {"key": d.key, "left": d.left, "right": d.right, "kind": d.kind}
            for d in found.differences
        ],
        "digests": {"left": digest_of_numbers(left), "right": digest_of_numbers(right)},
    }


def _lines(left: Record, right: Record, found: Comparison) -> Iterator[str]:
    for record in (left, right):
        yield f"{record.home}: {_steps(record)}, numbers {digest_of_numbers(record)[:12]}"
        if record.problem:
            yield f"  its run.yaml cannot be read by this version: {record.problem}"
    if found.differences:
        yield from differences_table(found.differences).split("\n")
    else:
        yield "the recipes are equal"
    if found.rows:
        yield from table([HEAD, *map(_row, found.rows)], left=1)
    yield from _ends(left, right)
    yield verdict(found)


HEAD = ("curve", "largest difference", "at step", "tolerance", "not bitwise from", "beyond from")


def _row(row: Deviation) -> Sequence[str]:
    largest = f"{row.largest:.1e}" if row.largest else "0"
    later = ["-" if step is None else str(step) for step in (row.unequal, row.first)]
    return (row.what, largest, str(row.at), f"{row.tolerance:.0e}", *later)


def _ends(left: Record, right: Record) -> Iterator[str]:
    """Yield the table of final values."""
    rows = [[name, end_words(left, name), end_words(right, name)] for name in ("loss", "grad_norm")]
    for name in ("tokens_per_s", "mfu"):
        pair = [usual(record.steps, name) for record in (left, right)]
        rows.append([name, *("-" if value is None else short(value) for value in pair)])
    known = [row for row in rows if row[1:] != ["-", "-"]]
    if known:
        yield from table([["at the end", left.name, right.name], *known], left=1)


def end_words(record: Record, key: str) -> str:
    """Return the mean of a curve's last values with its noise."""
    end = end_of([value for _, value in curve(record.steps, key)])
    return "-" if end is None else f"{end.mean:.4f} ± {end.noise:.1g}"


def verdict(found: Comparison) -> str:
    """Return the result in a sentence."""
    first = found.first
    if not found.steps:
        return "nothing is compared: the runs have no step in common"
    steps = number_of(found.steps, "step")
    if first is None:
        bits = all(row.unequal is None for row in found.rows)
        how = "bitwise" if bits else "within the tolerances of `prove`"
        return f"equal {how} in {steps}"
    one, other = map(show, first.pair)
    where = (
        f"step {first.first} is the first that differs: {first.what} is {one} and {other},"
        f" {first.error:.1e} apart, and {first.tolerance:.0e} is accepted"
    )
    if found.must_agree:
        return f"NOT equal, though no key that changes numbers differs: {where}"
    return f"{where}. This is expected: {'; '.join(_reasons(found))}"


def _reasons(found: Comparison) -> Iterator[str]:
    if found.changing:
        named = ", ".join(found.changing[:MOST_KEYS])
        more = len(found.changing) - MOST_KEYS
        yield f"{named}{f' and {more} more keys' if more > 0 else ''} changes the numbers"
    yield from found.excuses


def _steps(record: Record) -> str:
    if not record.steps:
        return "no steps"
    return f"steps {min(record.steps)} to {max(record.steps)}"
