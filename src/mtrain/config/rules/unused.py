"""Effect rules: a key that is set without effect is an error, because its author expects one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mtrain.config.compose.yaml_reader import scalar
from mtrain.config.messages.keys import is_content, when_of
from mtrain.config.messages.problem import value_at
from mtrain.config.messages.suggestions import CHOOSING, with_choices
from mtrain.config.resolve.conditional import CONDITIONAL, QUANTIZED, Conditional, condition
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, Rule, rule
from mtrain.config.schema.run import RunConfig

UNUSED = Code(
    "MT150",
    "Cannot use this key because it has no effect without another.",
    "Set the key that it needs, or remove it.",
    example="data.blend=[a,b]",
)
_KEY = re.compile(r"[a-z_]+(?:\.[a-z0-9_]+)+")
USUAL = {"peft.kind": "lora"}
"""Value of a key that only has to be set."""


def waited_for(run: RunConfig, path: str) -> Change:
    """Return the settings that a key without effect depends on; none for numbers and parts of a
    model.
    """
    text = when_of(path)
    change: dict[str, Any] = {}
    for term in condition(text).terms if text else ():
        if term.holds(value_at(run, term.key)):
            continue
        word = term.words[0] if term.words else USUAL.get(term.key, "null")
        # No number can be suggested for a key that has none: only its author knows it.
        if word == "null":
            return {}
        change[term.key] = scalar(word)
    return change


def key_effect_rule(key: Conditional) -> Rule:
    """Return the rule that a dependent key has its prerequisite; format keys are validated with
    their recipes.
    """
    named = (key.path, *_KEY.findall(key.needs))
    # A condition may read other keys of the sections that its words name.
    sections = dict.fromkeys(name.rpartition(".")[0] for name in named)

    @rule(UNUSED, reads=" ".join((*named, *sections)))
    def key_effect(run: RunConfig) -> Iterator[Finding]:
        if key.value(run) == key.off or key.active(run):
            return
        on = waited_for(run, key.path)
        # A text or a path is the user's own: suggest the key that makes it effective before its
        # removal.
        content = is_content(key.path)
        off: Change = {} if content and on else {key.path: key.off}
        words = with_choices(on)
        chosen = any(path in CHOOSING for path in on)
        hint = words if chosen or (content and len(on) == 1) else ""
        fixes = [change for change in (off, on) if change]
        yield Finding("MT150", key.path, f"it needs {key.needs}", fixes, hint=hint, unset=True)

    return key_effect


KEY_EFFECTS = tuple(key_effect_rule(key) for key in CONDITIONAL if key not in QUANTIZED)
