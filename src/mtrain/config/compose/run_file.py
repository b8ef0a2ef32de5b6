"""Reads the file of a resolved run, as `run.yaml` in a run folder or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from mtrain.config.compose.yaml_reader import load
from mtrain.config.messages.validate import validate
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError


def read_run_file(path: Path) -> RunConfig:
    """Return the configuration that a resolved file such as `run.yaml` holds.

    Raises:
        ConfigError: the file cannot be read, or is no complete configuration.
    """
    document = load(path)
    run, problems = validate(document.values, document.where)
    if run is None:
        raise ConfigError(problems)
    return run
