"""A key that is set but reaches nothing is an error: somebody believes that it does something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mtrain.config.conditional import CONDITIONAL, QUANTIZED, Conditional
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.run import RunConfig

_OTHERS = tuple(key for key in CONDITIONAL if key not in QUANTIZED)


def unread(run: RunConfig, keys: Iterable[Conditional]) -> Iterator[Finding]:
    """A finding for each of `keys` that is set and whose condition does not hold."""
    for key in keys:
        if key.value(run) != key.off and not key.active(run):
            off: Change = {key.path: key.off}
            yield Finding("MT150", key.path, f"reaches nothing without {key.needs}", (off,))


def keys_reach_something(run: RunConfig) -> Iterator[Finding]:
    """Every key that needs another one finds it; those of number formats are judged beside their recipes."""
    yield from unread(run, _OTHERS)


RULES = (keys_reach_something,)
