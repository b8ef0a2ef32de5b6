"""Tables of command lines with which tests of layouts are parametrized."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml
from pydantic import TypeAdapter

FILE = Path(__file__).resolve().parents[1] / "distributed/cases.yaml"


@cache
def _tables() -> dict[str, dict[str, str]]:
    content = yaml.safe_load(FILE.read_text())
    return TypeAdapter(dict[str, dict[str, str]]).validate_python(content)


def cases_of(table: str) -> dict[str, str]:
    """Return the words of the command line of each case of a table, by the case's name."""
    return _tables()[table]
