"""The keys that a broken rule relates: the ones that it read and that its text mentions."""

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

    They are the keys that the finding names and, among the keys that the rule read, each that its
    text mentions or that a fix changes by itself.
    """
    words = _words(finding.rule)
    meant = {key for word, key in _STANDS_FOR.items() if word in words}
    # A rule that read a whole section has read its keys.
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
        or _mentions(key, value, finding.detail)
        # A word of a choice, such as `sinkhorn`, is telling wherever it stands.
        or (isinstance(value, str) and origins.get(key) != "default" and value in words)
    }
    return [key for key in run.flat() if key in found and key != finding.path]


def _mentions(key: str, value: Any, detail: str) -> bool:
    """Return whether the detail of a finding has the name of a key, or its value as a number."""
    name = key.rpartition(".")[2]
    words = _words(detail)
    if value is None:
        return False
    # The words of a code are too general for this: `ranks` of tensor parallelism are no
    # parallel.ranks.
    if name in words or name.replace("_", " ") in detail:
        return True
    # `true`, a list or a common word in a text names no key.
    if isinstance(value, (bool, tuple, dict, str)):
        return False
    # A small number occurs by chance; with a part of the key's name next to it, it does not.
    parts = [part for part in name.split("_") if len(part) > 2]
    near = value >= DISTINCT or any(word.startswith(part) for part in parts for word in words)
    return near and not words.isdisjoint({str(value), f"{value:g}"})


def _words(text: str) -> set[str]:
    return {word.rstrip(".") for word in _WORD.findall(text)}
