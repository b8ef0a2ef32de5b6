"""`recipe diff`: what two recipes, run files, run folders or checkpoint folders differ in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mtrain import strict_json
from mtrain.config.compose.dump import spell
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.errors import ConfigError, Problem, say_page, visible
from mtrain.loading import initial_weights
from mtrain.loading.configuration import settled
from mtrain.recipes.diff import ABSENT, Difference, differences, overrides_of

EQUAL = 0
DIFFERENT = 1
"""Exit codes, as those of diff."""


def diff(words: Sequence[str], *, as_json: bool) -> int:
    """Print each difference with its kind; return 0 without differences, else 1."""
    if len(words) != 2:
        rule = f"compares two, and {len(words)} are given"
        raise ConfigError(
            [
                Problem(
                    "MT010",
                    "",
                    None,
                    rule,
                    "recipe diff llama3/8b_h100x8 runs/NAME",
                    "command line",
                )
            ]
        )
    machine = Machine.here()
    left, right = (
        resolve(
            settled(initial_weights.composed(overrides_of([word])), machine, None)[0].run, machine
        )
        for word in words
    )
    found = differences(left, right)
    if as_json:
        rows = [
            {"key": d.key, "left": _plain(d.left), "right": _plain(d.right), "kind": d.kind}
            for d in found
        ]
        digests = {"left": left.digest(), "right": right.digest()}
        say_page(
            strict_json.dumps(
                {"equal": not found, "digests": digests, "differences": rows}, indent=2
            )
        )
    else:
        say_page(_table(found, words))
    return DIFFERENT if found else EQUAL


def _plain(value: object) -> object:
    return None if value is ABSENT else value


def _table(found: Sequence[Difference], names: Sequence[str]) -> str:
    if not found:
        return visible(f"equal: {names[0]} and {names[1]} are the same run")
    rows = [
        (f"{n}.", d.key, f"{_shown(d.left)} -> {_shown(d.right)}", d.kind)
        for n, d in enumerate(found, 1)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        f"{n:>{widths[0]}} {key:<{widths[1]}}  {values:<{min(60, widths[2])}}  {kind}"
        for n, key, values, kind in rows
    ]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(d.kind for d in found).items())
    return "\n".join(
        [*map(visible, lines), f"{len(found)} difference{'s' if len(found) > 1 else ''}: {kinds}"]
    )


def _shown(value: object) -> str:
    return ABSENT if value is ABSENT else spell(value)
