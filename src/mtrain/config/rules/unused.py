"""A key that is set but has no effect is an error: somebody believes that it does something."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.conditional import CONDITIONAL, QUANTIZED, Conditional
from mtrain.config.rules.finding import Change, Finding, rule_for_each
from mtrain.config.run import RunConfig

_OTHERS = tuple(key for key in CONDITIONAL if key not in QUANTIZED)


def key_has_an_effect(key: Conditional, run: RunConfig) -> Iterator[Finding]:
    """A key that needs another one finds it; those of number formats are validated beside their recipes."""
    if key.value(run) != key.off and not key.active(run):
        off: Change = {key.path: key.off}
        yield Finding("MT150", key.path, f"has no effect without {key.needs}", (off,))


RULES = rule_for_each(key_has_an_effect, _OTHERS)
