"""The keys that a broken rule relates: of those that it read, the ones that its text mentions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from mtrain.config.messages.problem import value_at
from mtrain.config.rules.finding import Finding
from mtrain.config.schema.run import RunConfig

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_STANDS_FOR = {
    "dp": "parallel.ranks",
    "processes": "parallel.ranks",
    "stage": "parallel.pp",
    "stages": "parallel.pp",
    "virtual": "parallel.vpp",
    "machines": "cluster.nodes",
    "devices": "cluster.devices_per_node",
    "steps": "trainer.train_iters",
    "experts": "model.moe.num_experts",
    "MLA": "model.mla.kv_lora_rank",
}
"""Word of a text -> the key that it refers to, if the rule read that key or its section."""
DISTINCT = 100
"""Numbers from here on in a text refer to the key with that value."""


def related(
    finding: Finding, run: RunConfig, reads: AbstractSet[str], origins: Mapping[str, str]
) -> list[str]:
    """Return the other keys of a finding, in the order of the schema.

    They are those that the finding names and, of the keys that the rule read, each that its text
    mentions and each that a fix changes by itself.
    """
    words = {word.rstrip(".") for word in _WORD.findall(finding.rule)}
    meant = {key for word, key in _STANDS_FOR.items() if word in words}
    looked_at = reads | {
        key for key in meant if f"{key.rpartition('.')[0]}." in reads and key.startswith("model.")
    }
    changed = {key for change in finding.fixes if len(change) == 1 for key in change}
    values = {
        key: value_at(run, key) for key in {*looked_at, *finding.also} if not key.endswith(".")
    }
    found = {
        key
        for key, value in values.items()
        if key in words
        or (value is not None and (key in changed or key in meant))
        or (value and key in finding.also)
        or _spoken_of(key, value, words, finding.rule, is_set=origins.get(key) != "default")
    }
    return [key for key in run.flat() if key in found and key != finding.path]


def _spoken_of(key: str, value: Any, words: AbstractSet[str], text: str, *, is_set: bool) -> bool:
    """Return whether a text contains the name of a key or its value: a word, or a number with a
    part of the name.
    """
    name = key.rpartition(".")[2]
    if value is None:
        return False
    if name in words or name.replace("_", " ") in text:
        return True
    if isinstance(value, (bool, tuple, dict)):
        return False
    if isinstance(value, str):
        return is_set and value in words
    parts = [part for part in name.split("_") if len(part) > 2]
    near = value >= DISTINCT or any(word.startswith(part) for part in parts for word in words)
    return near and not words.isdisjoint({str(value), f"{value:g}"})
