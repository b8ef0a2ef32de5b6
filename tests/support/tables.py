"""Tables of test cases: the YAML files in `tests/tables`, one row a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "tables"
# libyaml reads these tables in a tenth of the time; its absence changes nothing else
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def tables(name: str) -> dict[str, Any]:
    """Return the tables of `tests/tables/NAME.yaml`: lists of rows, or mappings by name."""
    rows: dict[str, Any] = yaml.load((FOLDER / f"{name}.yaml").read_text(), LOADER)
    return rows
