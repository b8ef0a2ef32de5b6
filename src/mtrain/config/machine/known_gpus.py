"""The cluster file that describes a GPU, found by the name that its driver gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mtrain.config.compose import yaml_reader
from mtrain.config.compose.paths import display, find_config, folders
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.errors import ConfigError

GROUP = "cluster"
# The longest chain of files, each of which names the next in its `defaults`.
MOST_BASES = 8


@dataclass(frozen=True)
class Known:
    """A kind of GPU, and the file that describes it."""

    cluster: ClusterConfig
    source: str
    """The file, as problems name it."""


def known(name: str) -> Known | None:
    """Return the description of a GPU by name, from the first folder of choices that has one; None
    if no folder does.
    """
    return _known(name, tuple(folders()))


@cache
def _known(name: str, places: tuple[Path, ...]) -> Known | None:
    for file in _files(places):
        with suppress(
            ConfigError, OSError, ValueError
        ):  # a faulty file is reported to whoever chooses it
            # Reading is faster than parsing, and most files are of other GPUs.
            if name not in file.read_text(encoding="utf-8"):
                continue
            values = yaml_reader.load(file).values
            if name in values.get("driver_names", ()):
                whole = _with_bases(values, MOST_BASES)
                return Known(ClusterConfig.model_validate(whole), display(file))
    return None


def _files(places: tuple[Path, ...]) -> Iterator[Path]:
    for folder in places:
        yield from sorted((folder / GROUP).rglob("*.yaml"))


def _with_bases(values: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the values of a file, over those of the files that its `defaults` name."""
    whole: dict[str, Any] = {}
    for base in values.get("defaults", ()):
        file = (
            find_config(f"{GROUP}/{base}") if isinstance(base, str) and base != "_self_" else None
        )
        if file is not None and most:
            whole |= _with_bases(yaml_reader.load(file).values, most - 1)
    return whole | {key: value for key, value in values.items() if key != "defaults"}
