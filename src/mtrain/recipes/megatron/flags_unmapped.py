"""Flags of Megatron-LM without a key, and why: mtrain does the same anyway, has no use for it, or
lacks the feature.

The table is data, in `flags_unmapped.yaml`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import program
from mtrain.errors import own_yaml
from mtrain.recipes.megatron.arguments import Why

NO_SUCH_PART = "changes the numbers: mtrain has no such part of the network"
"""The reason of flags for parts of a network that mtrain does not build."""

_GROUPS: list[dict[str, Any]] = own_yaml(Path(__file__).with_suffix(".yaml"))
OTHERS: dict[str, tuple[Why, str]] = {
    flag.rstrip("="): (group["why"], group["text"].replace("PROGRAM", program()))
    for group in _GROUPS
    for flag in group["flags"].split()
}
"""Flag -> why it has no key, and a sentence."""
VALUED = frozenset(
    flag.rstrip("=") for group in _GROUPS for flag in group["flags"].split() if flag.endswith("=")
)
"""The flags among them that take a value, written with `=` in the table."""

FITTING: dict[str, dict[str, str]] = {
    "--dataloader-type": {
        "single": "every sample is read once, in a seeded order",
        "cyclic": "samples are shuffled",
    },
    "--weight-decay-incr-style": {"constant": "the weight decay is constant"},
    "--lr-warmup-init": {"0": "the warmup starts at 0", "0.0": "the warmup starts at 0"},
}
"""Flag -> the values that describe what mtrain always does."""
