"""The catalogue of bad input: what a user writes, and what `check` must report.

Its rows are in `tests/tables/catalogue.yaml`. Numbers 1 to 94 are those of the catalogue that was
collected from today's training systems; 0 marks rows of our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from mtrain.api import load
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem
from tests.support.configs import LAPTOP, within_a_second
from tests.support.tables import tables

TABLES = tables("catalogue")


@dataclass(frozen=True)
class Row:
    """One input."""

    number: int
    words: tuple[str, ...]
    """The command line; `{file}` stands for a recipe with `text`."""
    code: str = ""
    """The code of the problem; empty where the input is fine."""
    path: str = ""
    """The key that the problem is about."""
    says: tuple[str, ...] = ()
    """The numbers and keys that the message must contain."""
    origin: str = "command line"
    """Origin of the key's value, if it is not a line of the recipe."""
    severity: str = "error"
    text: str = ""
    """A recipe."""
    line: int = 0
    """The line of the recipe that is to blame; 0: the command line."""

    @property
    def name(self) -> str:
        """Return the name of the test case."""
        return f"{self.number} {' '.join(self.words)}"[:70]


def _command_line(row: Sequence[Any], severity: str = "error") -> Row:
    """Make a row of number, words, code, path, numbers and origin."""
    number, words, *expected = row
    words = words if isinstance(words, list) else words.split()
    code, path, says, *origins = expected or ("", "", ())
    origin = origins[0] if origins else "command line"
    return Row(number, tuple(words), code, path, tuple(says), origin, severity=severity)


def _recipe(row: Sequence[Any]) -> Row:
    """Make a row of number, recipe, line to blame, code, path and numbers."""
    number, text, *expected = row
    line, code, path, says = expected or (0, "", "", ())
    return Row(number, ("recipe={file}",), code, path, tuple(says), text=text, line=line)


def _rows(prefix: str) -> tuple[Row, ...]:
    return (
        *map(_command_line, TABLES[f"{prefix}errors"]),
        *(_command_line(row, "warning") for row in TABLES[f"{prefix}warnings"]),
        *map(_recipe, TABLES[f"{prefix}recipes"]),
    )


# YAML has no letter for a byte that is no UTF-8
NOT_UTF8 = _recipe(
    (0, "optim: {eps: 1e-8}\nlog: {name: \udcff}\n", 2, "MT003", "", ("0xff", "UTF-8"))
)
ROWS = (*_rows(""), *map(_command_line, TABLES["fine"]))
"""Everything that a configuration shows by itself; what data, checkpoints or machines show is
tested at preflight.
"""
OWN_ROWS = (*_rows("own_"), NOT_UTF8)
"""Bad input of kinds that the catalogue of today's systems does not have."""
HARMLESS = (*map(_command_line, TABLES["own_fine"]), *map(_recipe, TABLES["own_fine_recipes"]))
"""Valid input that resembles bad input."""


def validated(words: Sequence[str]) -> list[Problem]:
    """Return the findings of `check` for a command line on a small machine without GPUs."""
    with within_a_second():
        try:
            return list(load(words, LAPTOP, {}).warnings)
        except ConfigError as error:
            return list(error.problems)


@cache
def accepted() -> tuple[RunConfig, ...]:
    """Return the catalogue's configurations that the schema accepts."""
    found = []
    for row in ROWS:
        if not row.text:
            with suppress(ConfigError):
                found.append(resolve(compose(row.words).run, LAPTOP))
    return tuple(found)
