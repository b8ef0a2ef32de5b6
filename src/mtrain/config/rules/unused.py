"""A key that is set but has no effect is an error: somebody believes that it does something."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtrain.config.conditional import CONDITIONAL, QUANTIZED, Conditional
from mtrain.config.dump import override
from mtrain.config.keys import is_content
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, Rule, rule
from mtrain.config.run import RunConfig

UNUSED = Code(
    "MT150",
    "A key is set that has no effect beside the others.",
    "Take the key away, or set the one that it waits for.",
    example="data.blend=[a,b]",
)
_SETTING = re.compile(r"([a-z_]+(?:\.[a-z0-9_]+)+)=([a-z0-9_]+)(?:, .*| or .*)?")
"""A condition that is one setting, or one of several values of a key."""
_KEY = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")
_OTHERS = tuple(key for key in CONDITIONAL if key not in QUANTIZED)


def key_has_an_effect(key: Conditional) -> Rule:
    """The rule that a key which needs another one finds it; those of formats are validated beside their recipes."""
    named = (key.path, *_KEY.findall(key.needs))
    sections = dict.fromkeys(name.rpartition(".")[0] for name in named)  # a condition may look at keys beside these

    @rule(UNUSED, reads=" ".join((*named, *sections)))
    def has_an_effect(run: RunConfig) -> Iterator[Finding]:
        if key.value(run) != key.off and not key.active(run):
            rule, off = f"has no effect without {key.needs}", {key.path: key.off}
            needed = _SETTING.fullmatch(key.needs) if is_content(key.path) else None
            if needed is None:
                yield Finding("MT150", key.path, rule, (off,), unset=True)
            else:  # what was written is kept: the key that it waits for is set
                on: Change = {needed[1]: needed[2]}
                yield Finding("MT150", key.path, rule, (on,), hint=override(*next(iter(on.items()))))

    return has_an_effect


RULES = tuple(map(key_has_an_effect, _OTHERS))
