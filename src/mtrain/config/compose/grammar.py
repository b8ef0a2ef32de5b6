"""Hydra's grammar of command-line arguments. The first use imports Hydra."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from itertools import accumulate
from typing import Any

from mtrain.config.compose.yaml_reader import MAX_DEPTH


class Sweep(ValueError):
    """A value that stands for several runs: `1,2` or `range(1,4)`."""


_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


def parse_value(text: str) -> Any:
    """Return the value that `text` spells in Hydra's override grammar.

    Raises:
        Sweep: it spells several values.
        ValueError: it is not in the grammar; the message names the place.
    """
    override = _parsed(text)
    if override.is_sweep_override():
        raise Sweep("several values")
    return _plain(override.value())


def _parsed(text: str) -> Any:
    """Return Hydra's reading of a value.

    Raises:
        ValueError: it is not in the grammar; the message names the place.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    # Hydra's parser takes quadratic time in the depth; a command line must not hang it.
    if _depth(text) > MAX_DEPTH:
        raise ValueError("nested too deep")
    try:
        return OverridesParser.create().parse_override(f"key={text}")
    except (HydraException, ArithmeticError):
        raise ValueError(_unreadable(text)) from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _depth(text: str) -> int:
    """Return the largest nesting of brackets outside of quotes."""
    steps = ((c in "[{(") - (c in "]})") for c in _QUOTED.sub("", text))
    return max(accumulate(steps), default=0)


def _unreadable(text: str) -> str:
    """Return why the grammar cannot read a text."""
    for opening, closing in ("[]", "{}", "()"):
        if text.count(opening) != text.count(closing):
            return f"a {opening} or {closing} has no partner"
    if text.count("'") % 2 or text.count('"') % 2:
        return "a quote that is opened is not closed"
    if re.match(r"[A-Za-z_]+\(", text):
        return (
            "there is no such function of several values: choice(a,b), range(1,4), glob(word*),"
            " sort(b,a)"
        )
    if "${" in text:
        return "a reference is ${group.key}"
    odd = next((c for c in text if not (c.isalnum() or c in " _/.-+:%@?*[]{},='\"$")), "")
    quotes = "put the value into quotes, if it is text"
    return f"{odd!r} is part of no plain value; {quotes}" if odd else quotes


def sweep_values(text: str, names: Sequence[str], limit: int) -> list[str] | None:
    """Return the values that `text` sweeps over, as override values; None for one plain value.

    `glob(...)` chooses from `names`.

    Raises:
        ValueError: not in the grammar, more than `limit` values, or a sweep without an end.
    """
    from hydra.core.override_parser.types import Glob, RangeSweep
    from hydra.errors import HydraException

    override = _parsed(text)
    if not override.is_sweep_override():
        return None
    try:
        sweep = override.value()
        if isinstance(sweep, Glob):
            return sweep.filter(list(names))
        if not override.is_discrete_sweep():
            raise ValueError(
                "only values that can be counted are swept: a,b or choice() or range() or glob()"
            )
        if isinstance(sweep, RangeSweep):
            # Before the values exist: range(1,1e12) would fill the memory.
            if _length(sweep) > limit:
                raise ValueError(f"more than {limit} values")
            _as_written(sweep)
        found = list(override.sweep_string_iterator())
    except (HydraException, ArithmeticError):
        raise ValueError(_unreadable(text)) from None
    if len(found) > limit:
        raise ValueError(f"more than {limit} values")
    return found


def _length(sweep: Any) -> float:
    """Return the length of a range without building it."""
    if not sweep.step:
        raise ValueError("a range with a step of 0 never ends")
    return max(0.0, (float(sweep.stop) - float(sweep.start)) / float(sweep.step))


def _as_written(sweep: Any) -> None:
    """Turn the bounds of a fractional range into the decimals that the user wrote, so that float
    rounding does not put 0.003 into range(0.001,0.003,0.001).
    """
    bounds = (sweep.start, sweep.stop, sweep.step)
    if not all(isinstance(bound, int) for bound in bounds):
        sweep.start, sweep.stop, sweep.step = (Decimal(str(bound)) for bound in bounds)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{type(value).__name__} is no plain value")
