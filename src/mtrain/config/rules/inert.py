"""A key that is set but reaches nothing is an error: somebody believes that it does something."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.conditional import CONDITIONAL
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.run import RunConfig


def keys_reach_something(run: RunConfig) -> Iterator[Finding]:
    """Every key that needs another one finds it."""
    for key in CONDITIONAL:
        if key.value(run) != key.off and not key.active(run):
            off: Change = {key.path: key.off}
            yield Finding("MT150", key.path, f"reaches nothing without {key.needs}", (off,))


RULES = (keys_reach_something,)
