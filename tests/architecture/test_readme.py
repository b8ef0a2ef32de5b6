"""What the README shows happens: its checks end as shown, and every command and file in it exists."""

from __future__ import annotations

import re
import shlex

import pytest

from mtrain.cli.main import VERBS
from tests.support.commands import ROOT, mtrain
from tests.walks import LEFT, walks

README = (ROOT / "README.md").read_text()
CONSOLES = re.findall(r"```console\n\$ python launch.py ?(.*)\n([^`]*)```", README)
VALIDATED = [(words, shown) for words, shown in CONSOLES if words.startswith("check")]


@pytest.mark.parametrize(("words", "shown"), VALIDATED, ids=[w for w, _ in VALIDATED])
def test_a_check_that_the_readme_shows_ends_as_it_shows_with_the_same_codes(words: str, shown: str) -> None:
    done = mtrain(*shlex.split(words), cwd=ROOT)
    codes = [re.findall(r"\[(MT\d+)\]", text) for text in (shown, done.stdout + done.stderr)]
    assert codes[0] == codes[1]
    assert ("error[" in shown) == (done.returncode == 2)


def test_the_readme_has_four_walks_whose_commands_are_all_run() -> None:
    found = walks(README)
    assert [one.title.split()[0] for one in found] == ["Pretrain", "Fine-tune", "Plan", "Port"]
    assert all(one.title in LEFT for one in found)
    said = re.search(r"\n## Four walks\n(.*?)\n## ", README, re.DOTALL)
    assert said is not None
    for line in said.group(1).splitlines():
        if line.startswith("python "):
            assert any(line in one.commands or any(c.startswith(line) for c in one.commands) for one in found), line


def test_every_command_of_the_readme_is_a_verb_or_an_override() -> None:
    for words in re.findall(r"`python launch.py([^`]*)`", README):
        for word in shlex.split(words)[:1]:
            assert word in VERBS or "=" in word or word.startswith("["), word


def test_every_file_that_the_readme_names_exists() -> None:
    for name in re.findall(r"`((?:conf|recipes|tests|kernels|config|build|mcore|devices)/[\w./-]+)`", README):
        places = (ROOT / name, ROOT / "src/mtrain" / name)
        assert any(place.exists() for place in places), name
