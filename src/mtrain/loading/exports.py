"""The exports of a run as Hugging Face folders: refused before the run where none can be made."""

from __future__ import annotations

from collections.abc import Mapping

from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem

KEY = "checkpoint.hf_every"


def problems(run: RunConfig, origins: Mapping[str, str]) -> list[Problem]:
    """Return the problem of a run that exports a model which no `model_type` describes."""
    every = run.checkpoint.hf_every
    if every is None:
        return []
    from mtrain.recipes.huggingface.exporter import config_json

    try:
        config_json(run.model, "float32")
    except ConfigError as error:
        why = error.problems[0].detail.removeprefix("cannot write a config.json because ")
        model = f"{run.model.name} of the family {run.model.family}"
        rule = f"cannot export {model} as a Hugging Face folder because {why}"
        return [Problem("MT439", KEY, every, rule, f"{KEY}=null", origins.get(KEY, ""))]
    return []
