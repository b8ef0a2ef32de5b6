"""Every folder of tests is one that pytest looks into."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch

import pytest

from tests.support.commands import ROOT


def test_collection_every_test_folder_is_collected(pytestconfig: pytest.Config) -> None:
    skipped = pytestconfig.getini("norecursedirs")
    for base in (ROOT / "tests", ROOT / "kernels/tests"):
        for file in base.rglob("test_*.py"):
            for part in file.relative_to(ROOT).parts[:-1]:
                assert not any(fnmatch(part, pattern) for pattern in skipped), (
                    f"{file} is never run: pytest passes over folders named {part} (norecursedirs)"
                )


def test_collection_every_test_folder_is_linted() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "."]
    seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = {str(path) for path in (ROOT / "tests").rglob("*.py")}
    assert files - set(seen.stdout.splitlines()) == set()
