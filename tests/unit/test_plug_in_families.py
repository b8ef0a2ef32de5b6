"""A family of another package, with its own section, rule and code, in fresh processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tables import tables

TABLES = tables("plug_in_families")

ROOT = Path(__file__).resolve().parents[2]
FILES = TABLES["files"]
RING = ("model=llama_tiny", "model.family=ring")


EACH = """
import json, os, sys
import mtrain.api
from mtrain.cli.main import main
for number, argv in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if not child:
        shown = os.open(str(number), os.O_WRONLY | os.O_CREAT)
        os.dup2(shown, 1)
        os.dup2(shown, 2)
        code = main(argv)
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""A program that runs several command lines, each in a process forked from it."""
REFUSED = {
    r"RING001\] .* does not divide by 3\. Use model.ring.turns=2": (*RING, "model.ring={turns:3}"),
    "Use model.ring.turns=3": (*RING, "model.ring={turn:3}"),
    "model.ring.turns=0": (*RING, "model.ring={turns:0}"),
    "a ring has one input": (*RING, "model.ring={}", "model.parallel_residual=true"),
    "MT246": RING,
    "it needs model.family=ring": ("model=llama_tiny", "model.ring={}"),
}
ACCEPTED = "accepted"
EXPLAINED = {
    "Times that each layer is used.": ("model.ring.turns",),
    "Turns divide the layers.": ("RING001",),
    "the model family ring: RING001": (),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the distribution, as an installer would leave it."""
    return write(tmp_path_factory.mktemp("site"), {})


@pytest.fixture(scope="module")
def shown(installed: Path) -> dict[str, tuple[int, str]]:
    """Return the exit code and output of the command lines that only read, by the expected
    words.
    """
    lines = {words: ("check", *argv) for words, argv in REFUSED.items()}
    lines |= {words: ("explain", *argv) for words, argv in EXPLAINED.items()}
    lines[ACCEPTED] = ("check", *RING, "model.ring={turns:2}")
    return dict(zip(lines, launch(installed, *lines.values()), strict=True))


def write(folder: Path, other: dict[str, str]) -> Path:
    for name, text in (FILES | other).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def environment(site: Path) -> dict[str, str]:
    path = os.pathsep.join([str(site), str(ROOT / "src"), str(ROOT / "kernels")])
    return {**os.environ, "PYTHONPATH": path}


def launch(site: Path, *lines: tuple[str, ...]) -> list[tuple[int, str]]:
    """Run verbs where the distribution is installed; the exit code and all output of each."""
    done = subprocess.run(
        [sys.executable, "-c", EACH],
        input=json.dumps(lines),
        env=environment(site),
        cwd=site,
        capture_output=True,
        text=True,
        check=True,
    )
    codes = map(int, done.stdout.split())
    texts = [(site / str(number)).read_text() for number in range(len(lines))]
    return list(zip(codes, texts, strict=True))


def test_plug_in_family_keys_are_accepted(shown: dict[str, tuple[int, str]]) -> None:
    code, text = shown[ACCEPTED]
    assert (code, text[:2]) == (0, "ok"), text


@pytest.mark.parametrize("quoted", REFUSED)
def test_plug_in_family_rules_refuse(shown: dict[str, tuple[int, str]], quoted: str) -> None:
    code, text = shown[quoted]
    assert code == 2
    assert re.search(quoted, text), text


def test_plug_in_keys_and_codes_are_explained(shown: dict[str, tuple[int, str]]) -> None:
    for words in EXPLAINED:
        assert words in shown[words][1]


def test_plug_in_code_of_other_name_is_refused(tmp_path: Path) -> None:
    rules = FILES["ring_family/rules.py"].replace("RING001", "MT101")
    site = write(tmp_path, {"ring_family/rules.py": rules})
    ((code, text),) = launch(site, ("check", *RING, "model.ring={}"))
    assert code == 3
    assert "code MT101 of its rules is not RING and a number" in text


def test_plug_in_named_like_a_key_is_refused(tmp_path: Path) -> None:
    entry = FILES["ring-0.1.dist-info/entry_points.txt"].replace("ring =", "moe =")
    site = write(tmp_path, {"ring-0.1.dist-info/entry_points.txt": entry})
    tiny = ("check", "model=llama_tiny")
    (own, _), (code, text) = launch(site, tiny, (*tiny, "model.family=moe"))
    assert own == 0
    assert code == 3
    assert "model.moe is a key of every model. Use another name" in text


def test_plug_in_that_is_broken_hinders_own_models(tmp_path: Path) -> None:
    site = write(tmp_path, {"ring_family/config.py": "import nowhere"})
    (own, _), (code, text) = launch(site, ("check", "model=llama_tiny"), ("check", *RING))
    assert own == 0
    assert code == 3
    assert "ring_family.config.CONFIG does not load: No module named 'nowhere'" in text
