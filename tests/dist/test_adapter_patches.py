"""Every patch of `mtrain.mcore.patches` is needed, and is enough."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.devices import registry
from mtrain.mcore import install
from tests.support.patch_cases import CASES, FINE

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    """What each case gave, from one process that imports megatron.core once and forks every case."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.patch_cases"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_without_the_fix_the_defect_shows(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert re.search(CASES[name].symptom, outcomes[name]["without"]), outcomes[name]["without"]


@pytest.mark.parametrize("name", CASES)
def test_with_the_fix_the_defect_is_gone(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes[name]["with"] == FINE


def test_every_fix_has_a_case() -> None:
    install(registry.get("cpu"))
    from mtrain.mcore.patches import PATCHES

    assert [patch.name for patch in PATCHES] == list(CASES)
