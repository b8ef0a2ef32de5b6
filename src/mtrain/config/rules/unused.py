"""A key that is set but has no effect is an error: somebody believes that it does something."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtrain.config.conditional import CONDITIONAL, QUANTIZED, Conditional
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, Rule, rule
from mtrain.config.run import RunConfig

UNUSED = Code(
    "MT150",
    "A key is set that has no effect beside the others.",
    "Take the key away, or set the one that it waits for.",
    example="data.blend=[a,b]",
)
_KEY = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")
_OTHERS = tuple(key for key in CONDITIONAL if key not in QUANTIZED)


def key_has_an_effect(key: Conditional) -> Rule:
    """The rule that a key which needs another one finds it; those of formats are validated beside their recipes."""
    named = (key.path, *_KEY.findall(key.needs))
    sections = dict.fromkeys(name.rpartition(".")[0] for name in named)  # a condition may look at keys beside these

    @rule(UNUSED, reads=" ".join((*named, *sections)))
    def has_an_effect(run: RunConfig) -> Iterator[Finding]:
        if key.value(run) != key.off and not key.active(run):
            off: Change = {key.path: key.off}
            yield Finding("MT150", key.path, f"has no effect without {key.needs}", (off,))

    return has_an_effect


RULES = tuple(map(key_has_an_effect, _OTHERS))
