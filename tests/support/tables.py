"""Tables of test cases: the YAML files in `tests/tables`, one row a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtrain.errors import own_yaml

FOLDER = Path(__file__).resolve().parents[1] / "tables"


def tables(name: str) -> dict[str, Any]:
    """Return the tables of `tests/tables/NAME.yaml`: lists of rows, or mappings by name."""
    rows: dict[str, Any] = own_yaml(FOLDER / f"{name}.yaml")
    return rows
