"""Differences between two configurations of a run, whatever folder they were written in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mtrain.config.messages.keys import effect_of
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import RunConfig

# Key -> its value in the other configuration, and in this one
Differences = dict[str, tuple[object, object]]
# Section -> its keys with paths of input files
PATHS = {
    "data": (
        "path",
        "blend",
        "validation_blend",
        "test_blend",
        "megatron_cache",
        "tokenizer",
        "chat_template",
    ),
    "peft": ("init_from",),
    "checkpoint": ("init_from",),
}


def anchored(run: RunConfig) -> RunConfig:
    """Return the run with absolute paths, so that it means the same from any working directory."""
    sections = {}
    for name, keys in PATHS.items():
        section = getattr(run, name)
        sections[name] = section.model_copy(
            update={key: _absolute(getattr(section, key)) for key in keys}
        )
    return run.model_copy(update=sections)


def _absolute(path: Any) -> Any:
    """Return a path, or each of several, as absolute; URLs of object stores stay."""
    if isinstance(path, tuple):
        return tuple(_absolute(one) for one in path)
    return path if path is None or "://" in path else os.path.abspath(Path(path).expanduser())


def differences_of(run: RunConfig, other: RunConfig, *effects: Effect) -> Differences:
    """Return keys of the given effects whose values differ.

    The default is every effect that changes the resulting weights.
    """
    wanted = effects or (Effect.ARCHITECTURE, Effect.NUMERICS, Effect.CONTENTS, Effect.PARALLELISM)
    # absolute paths: a run started in another working folder names the same files differently
    left_values = anchored(run).recorded().flat()
    right_values = anchored(other).recorded().flat()
    keys = [k for k in {**left_values, **right_values} if effect_of(k) in wanted]
    return {
        k: (right_values.get(k), left_values.get(k))
        for k in keys
        if right_values.get(k) != left_values.get(k)
    }


def without_adapters(differences: Differences, other: RunConfig) -> Differences:
    """Return the differences that matter where adapters start on the weights of `other`, which may
    have no adapters.
    """
    return {
        key: pair
        for key, pair in differences.items()
        if other.peft.kind or not key.startswith("peft.")
    }
