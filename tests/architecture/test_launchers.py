"""A launcher asks no driver: what it imports before ranks start knows neither torch nor
a device.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import tree_of
from tests.architecture.test_laws import SOURCE

BEFORE_RANKS = ("launching", "cli", "config")
KNOW_TORCH = (
    "torch",
    "megatron",
    "transformer_engine",
    "triton",
    "mtrain.devices",
    "mtrain.mcore",
    "mtrain.assembly",
)


def imported_at_once(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports on load, without those for type checkers."""
    for node in tree_of(path).body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def files() -> list[Path]:
    return sorted(path for package in BEFORE_RANKS for path in (SOURCE / package).rglob("*.py"))


def test_launcher_imports_no_torch() -> None:
    for path in files():
        found = [
            m
            for m in imported_at_once(path)
            if any(m == k or m.startswith(f"{k}.") for k in KNOW_TORCH)
        ]
        assert not found, f"{path} runs in the launcher, which imports no {', '.join(found)}"
