"""A family of another package, with its own section, rule and code, in fresh processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "ring-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: ring\nVersion: 0.1\n",
    "ring-0.1.dist-info/entry_points.txt": "[mtrain.models]\nring = ring_family\n",
    "ring_family/__init__.py": "",
    "ring_family/config.py": '''
"""The keys of the family ring."""
from typing import Annotated

from mtrain.config.families import FamilyConfig, Limit
from mtrain.config.schema.base import Key, PositiveInt, Section


class RingConfig(Section):
    """`model.ring`: layers that are used in turns."""

    turns: Annotated[PositiveInt, Key(hf="ring_turns")] = 2
    """Times that each layer is used."""


CONFIG = FamilyConfig(
    section=RingConfig,
    about="The family ring; null: another family.",
    limits=(Limit("model.parallel_residual", (False,), "a ring has one input"),),
)
''',
    "ring_family/rules.py": '''
"""The rule of the family ring."""
from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Finding
from mtrain.config.rules.rule import Code


@of_family("ring", Code("RING001"), reads="model.num_layers model.ring.turns")
def whole_turns(run, ring):
    """Turns divide the layers."""
    if run.model.num_layers % ring.turns:
        why = f"model.num_layers {run.model.num_layers} does not divide by {ring.turns}"
        yield Finding("RING001", "model.ring.turns", why, ({"model.ring.turns": 2},))


RULES = (whole_turns,)
''',
    "ring_family/family.py": '''
"""The family ring: a decoder-only transformer by another name."""
import dataclasses

from mtrain.models.gpt.family import FAMILY as GPT

FAMILY = dataclasses.replace(GPT, name="ring")
''',
}
RING = ("model=llama_tiny", "model.family=ring")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distribution, as an installer would leave it."""
    return write(tmp_path_factory.mktemp("site"), {})


def write(folder: Path, other: dict[str, str]) -> Path:
    for name, text in (FILES | other).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def launch(site: Path, *argv: str) -> tuple[int, str]:
    """Run a verb where the distribution is installed; the exit code and all output."""
    path = os.pathsep.join([str(site), str(ROOT / "src"), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *argv],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_plug_in_family_keys_are_accepted(installed: Path) -> None:
    code, text = launch(installed, "check", *RING, "model.ring={turns:2}")
    assert (code, text[:2]) == (0, "ok"), text


@pytest.mark.parametrize(
    ("argv", "quoted"),
    [
        (
            (*RING, "model.ring={turns:3}"),
            r"RING001\] .* does not divide by 3\. Use model.ring.turns=2",
        ),
        ((*RING, "model.ring={turn:3}"), "Use model.ring.turns=3"),
        ((*RING, "model.ring={turns:0}"), "model.ring.turns=0"),
        ((*RING, "model.ring={}", "model.parallel_residual=true"), "a ring has one input"),
        (RING, "MT246"),
        (("model=llama_tiny", "model.ring={}"), "it needs model.family=ring"),
    ],
)
def test_plug_in_family_rules_refuse(installed: Path, argv: tuple[str, ...], quoted: str) -> None:
    code, text = launch(installed, "check", *argv)
    assert code == 2
    assert re.search(quoted, text), text


def test_plug_in_keys_and_codes_are_explained(installed: Path) -> None:
    assert "Times that each layer is used." in launch(installed, "explain", "model.ring.turns")[1]
    assert "Turns divide the layers." in launch(installed, "explain", "RING001")[1]
    assert "the model family ring: RING001" in launch(installed, "explain")[1]


def test_plug_in_code_of_other_name_is_refused(tmp_path: Path) -> None:
    rules = FILES["ring_family/rules.py"].replace("RING001", "MT101")
    site = write(tmp_path, {"ring_family/rules.py": rules})
    code, text = launch(site, "check", *RING, "model.ring={}")
    assert code == 3
    assert "code MT101 of its rules is not RING and a number" in text


def test_plug_in_named_like_a_key_is_refused(tmp_path: Path) -> None:
    entry = FILES["ring-0.1.dist-info/entry_points.txt"].replace("ring =", "moe =")
    site = write(tmp_path, {"ring-0.1.dist-info/entry_points.txt": entry})
    assert launch(site, "check", "model=llama_tiny")[0] == 0
    code, text = launch(site, "check", "model=llama_tiny", "model.family=moe")
    assert code == 3
    assert "model.moe is a key of every model. Use another name" in text


def test_plug_in_that_is_broken_hinders_own_models(tmp_path: Path) -> None:
    site = write(tmp_path, {"ring_family/config.py": "import nowhere"})
    assert launch(site, "check", "model=llama_tiny")[0] == 0
    code, text = launch(site, "check", *RING)
    assert code == 3
    assert "ring_family.config.CONFIG does not load: No module named 'nowhere'" in text
