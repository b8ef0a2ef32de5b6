"""Every patch of `mtrain.mcore.patches` is needed, and is enough."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.mcore.patches import PATCHES
from tests.support.covering import some
from tests.support.patch_cases import CASES, FINE, outcome

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def without(request: pytest.FixtureRequest) -> dict[str, str]:
    """What each case gives without its patch, from one process that imports megatron-core and forks each."""
    names = [item.callspec.params["name"] for item in request.session.items if "without" in item.fixturenames]  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.patch_cases", *names],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


PLAIN = [name for name in CASES if not name.startswith("fsdp-")]


@pytest.mark.parametrize("name", some(CASES, always=PLAIN[::6]))
def test_without_the_fix_the_defect_shows(name: str, without: dict[str, str]) -> None:
    assert re.search(CASES[name].symptom, without[name]), without[name]


@pytest.mark.parametrize("name", CASES)
def test_with_the_fix_the_defect_is_gone(name: str) -> None:
    assert outcome(CASES[name]) == FINE


def test_every_fix_has_a_case() -> None:
    assert [patch.name for patch in PATCHES] == list(CASES)
