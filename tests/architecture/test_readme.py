"""The README shows what the commands print, and every command in it is one that exists."""

from __future__ import annotations

import re
import shlex

import pytest

from mtrain.cli.main import VERBS
from tests.support.commands import ROOT, mtrain

README = (ROOT / "README.md").read_text()
CONSOLES = re.findall(r"```console\n\$ python launch.py ?(.*)\n([^`]*)```", README)
VALIDATED = [(words, shown) for words, shown in CONSOLES if words.startswith("check")]


@pytest.mark.parametrize(("words", "shown"), VALIDATED, ids=[w for w, _ in VALIDATED])
def test_what_the_readme_shows_is_what_is_printed(words: str, shown: str) -> None:
    done = mtrain(*shlex.split(words), cwd=ROOT)
    assert shown.strip() == (done.stdout + done.stderr).strip(), "paste what the command prints into the README"


def test_the_readme_shows_a_run_a_judgement_and_errors() -> None:
    assert len(VALIDATED) >= 2
    assert any(words == "" and "final validation loss" in shown for words, shown in CONSOLES)


def test_every_command_of_the_readme_is_a_verb_or_an_override() -> None:
    for words in re.findall(r"`python launch.py([^`]*)`", README):
        for word in shlex.split(words)[:1]:
            assert word in VERBS or "=" in word or word.startswith("["), word


def test_every_file_that_the_readme_names_exists() -> None:
    for name in re.findall(r"`((?:conf|recipes|tests|kernels|config|build|mcore|devices)/[\w./-]+)`", README):
        places = (ROOT / name, ROOT / "src/mtrain" / name)
        assert any(place.exists() for place in places), name
