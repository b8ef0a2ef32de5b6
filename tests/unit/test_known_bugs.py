"""The table of known bugs: every name in it is there, and what is patched is shown to be needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.engine import release
from mtrain.config.messages.codes import codes
from mtrain.mcore.patches.apply import PATCHES
from mtrain.mcore.patches.patch import BROUGHT_BACK, KnownBug, known_bugs
from tests.support.patch_cases import CASES

ROOT = Path(__file__).parents[2]
ROWS = pytest.mark.parametrize("fix", known_bugs(), ids=lambda fix: fix.number)


@ROWS
def test_known_bugs_names_upstream_fix(fix: KnownBug) -> None:
    known = {patch.name: patch for patch in PATCHES}
    if fix.became == "patched":
        assert fix.by in CASES, (
            "a case of tests/distributed/test_adapter_patches.py fails without the patch"
        )
        assert known[fix.by].upstream == (fix.number if fix.number.startswith("#") else "")
        assert (fix.is_in_0_19 is True) >= ((0, 19, 2) not in known[fix.by].versions)
    elif fix.became == "refused":
        assert fix.by in codes()
    elif fix.became == "kept by tests":
        assert (ROOT / fix.by).is_file()
        assert fix.by != BROUGHT_BACK or fix.number in (ROOT / fix.by).read_text(), (
            "it is brought back there"
        )
    else:
        assert not fix.by
        assert fix.why


@pytest.mark.skipif(release.release() != (0, 16, 1), reason="places are those of 0.16.1")
def test_known_bugs_places_are_lines_of_megatron() -> None:
    folder = release.folder()
    assert folder is not None
    for fix in known_bugs():
        if fix.where:
            file, line = fix.where.split(":")
            assert (folder / file).read_text().splitlines()[int(line) - 1].strip(), fix


def test_known_bugs_patch_changes_are_unique_rows() -> None:
    numbers = [fix.number for fix in known_bugs()]
    assert len(set(numbers)) == len(numbers)
    assert {patch.upstream for patch in PATCHES if patch.upstream} <= set(numbers)


def test_known_bugs_engines_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "--fixes"]) == 0
    page = capsys.readouterr().out
    assert all(f"  {fix.number}: {fix.about}" in page for fix in known_bugs())
    assert main(["engines", "--fixes", "--json"]) == 0
    assert [row["number"] for row in json.loads(capsys.readouterr().out)] == [
        fix.number for fix in known_bugs()
    ]
