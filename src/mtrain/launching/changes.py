"""How two configurations of a run differ, whatever folder they were written in."""

from __future__ import annotations

import os
from pathlib import Path

from mtrain.config.base import Effect
from mtrain.config.keys import effect_of
from mtrain.config.run import RunConfig

Differences = dict[str, tuple[object, object]]
"""Key -> its value there, and here."""


def anchored(run: RunConfig) -> RunConfig:
    """The run with absolute data paths, so that it means the same from any working directory."""

    def absolute(path: str | None) -> str | None:
        return os.path.abspath(Path(path).expanduser()) if path is not None else None

    data = run.data.model_copy(update={"path": absolute(run.data.path), "tokenizer": absolute(run.data.tokenizer)})
    if data.blend is not None:
        data = data.model_copy(update={"blend": tuple(str(absolute(prefix)) for prefix in data.blend)})
    return run.model_copy(update={"data": data})


def differences_of(run: RunConfig, other: RunConfig, *effects: Effect) -> Differences:
    """Keys whose values differ, of the given effects (default: those that change the weights that come out)."""
    wanted = effects or (Effect.ARCHITECTURE, Effect.NUMERICS, Effect.PARALLELISM)
    mine, theirs = anchored(run).recorded().flat(), anchored(other).recorded().flat()
    keys = [k for k in {**mine, **theirs} if effect_of(k) in wanted]
    return {k: (theirs.get(k), mine.get(k)) for k in keys if theirs.get(k) != mine.get(k)}


def without_adapters(differences: Differences, other: RunConfig) -> Differences:
    """Differences that count where adapters begin over the weights of `other`, which may have none."""
    return {key: pair for key, pair in differences.items() if other.peft.kind or not key.startswith("peft.")}
