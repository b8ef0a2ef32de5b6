"""The weights that a new run starts from: the source of its model, or a check against it.

This module reads configurations and headers of weights, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtrain.config.compose.composer import Composed, compose
from mtrain.config.compose.paths import CHECKPOINTS, MANIFEST, RUN_FILE, display, user_path
from mtrain.config.compose.yaml_reader import Document, load
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem

HF_CONFIG = "config.json"
# Section of a model -> its keys that follow from the data of a run, and do not describe weights.
FROM_DATA = {"t5": ("encoder_length", "decoder_length")}


def composed(argv: Sequence[str]) -> Composed:
    """Compose a command line; if it chooses no model, take that of `checkpoint.init_from`.

    Raises:
        Rejected: with every problem that the schema found.
        ConfigError: files do not compose, or the weights are of a model that is not known here.
    """
    return compose(argv, model_of)


def model_of(start: str) -> Document | None:
    """Return the model in the folder of `checkpoint.init_from`, as a file of the group `model`;
    None if the folder has none.

    Raises:
        ConfigError: its configuration cannot be read, or is of a model that is not known here.
    """
    path = user_path(start)
    file = run_file_of(path)
    if file is not None:
        return _of_run(file)
    if not (path / HF_CONFIG).is_file():
        return None
    from mtrain.convert.huggingface.model import configuration

    _, found = configuration(path / HF_CONFIG)
    return Document(_said(found.run.model), {}, display(path / HF_CONFIG))


def brought(composed: Composed) -> ModelConfig | None:
    """Return the model of the weights if the run's model was taken from them, else None.

    Raises:
        ConfigError: the configuration of the weights cannot be read.
    """
    start = composed.run.checkpoint.init_from
    document = model_of(start) if start is not None else None
    if document is None or composed.choices.get("model") != document.source:
        return None
    return ModelConfig.model_validate(document.values)


def run_file_of(path: Path) -> Path | None:
    """Return the run.yaml of a run folder or of a checkpoint, or None."""
    home = path.parent.parent if path.parent.name == CHECKPOINTS else path
    return next((file for file in (path / RUN_FILE, home / RUN_FILE) if file.is_file()), None)


def _of_run(file: Path) -> Document:
    document = load(file)
    values = dict(document.values.get("model") or {})
    for section, keys in FROM_DATA.items():
        if isinstance(values.get(section), dict):
            values[section] = {
                key: value for key, value in values[section].items() if key not in keys
            }
    # The document stands for conf/model/NAME.yaml, whose keys begin below `model`.
    lines = {
        key.partition(".")[2]: line
        for key, line in document.lines.items()
        if key.startswith("model.")
    }
    return Document(values, lines, document.source, document.text)


def _said(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a model that are not at their defaults."""
    found: dict[str, Any] = model.model_dump(mode="json", exclude_defaults=True)
    return found


def problems(run: RunConfig, origins: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each key in which a run's model differs from that of its first weights.

    Raises:
        CorruptData: the weights are incomplete.
    """
    start = run.checkpoint.init_from
    # A resumed run has weights of its own.
    if start is None or run.checkpoint.resume not in (None, "auto"):
        return []
    path = user_path(start)
    try:
        if any((path / name).is_file() for name in (RUN_FILE, MANIFEST)):
            from mtrain.launching.resume import weights_of

            weights_of(run)
        elif (path / HF_CONFIG).is_file():
            from mtrain.convert.huggingface.model import open_matching

            open_matching(run, path)
    except ConfigError as error:
        return [replace(p, source=p.source or origins.get(p.path, "")) for p in error.problems]
    return []
