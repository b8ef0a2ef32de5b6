"""README and pages of docs: their checks end as shown, every command and file in them exists, and
no link is dead.
"""

from __future__ import annotations

import re
import shlex

import pytest

from mtrain.cli.verbs import NAMES
from tests.support.commands import ROOT, mtrain
from tests.walks import LEFT, walks

README = (ROOT / "README.md").read_text()
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
PROSE = {name: path.read_text() for name, path in PAGES.items()}
CONSOLES = re.findall(
    r"```console\n\$ python launch.py ?(.*)\n([^`]*)```", "\n".join(PROSE.values())
)
VALIDATED = {words: shown for words, shown in CONSOLES if words.startswith("check")}
MOST_LINES = 250


def test_readme_length() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("words", VALIDATED)
def test_readme_shown_checks_print_the_same_codes(words: str) -> None:
    shown = VALIDATED[words]
    done = mtrain(*shlex.split(words), cwd=ROOT)
    codes = [re.findall(r"\[(MT\d+)\]", text) for text in (shown, done.stdout + done.stderr)]
    assert codes[0] == codes[1]
    assert ("error[" in shown) == (done.returncode == 2)


def test_readme_four_walks_are_run() -> None:
    found = walks(README)
    assert [one.title.split()[0] for one in found] == ["Pretrain", "Fine-tune", "Plan", "Port"]
    assert all(one.title in LEFT for one in found)
    said = re.search(r"\n## Four walks\n(.*?)\n## ", README, re.DOTALL)
    assert said is not None
    for line in said.group(1).splitlines():
        if line.startswith("python "):
            assert any(
                line in one.commands or any(c.startswith(line) for c in one.commands)
                for one in found
            ), line


@pytest.mark.parametrize("page", PAGES)
def test_readme_commands_are_verbs_or_overrides(page: str) -> None:
    for words in re.findall(r"`python launch.py([^`]*)`", PROSE[page]):
        for word in shlex.split(words)[:1]:
            assert word in {*NAMES, "help"} or "=" in word or word.startswith("["), word


@pytest.mark.parametrize("page", PAGES)
def test_readme_named_files_exist(page: str) -> None:
    for name in re.findall(
        r"`((?:conf|docs|recipes|tests|kernels|config|build|mcore|devices)/[\w./-]+)`", PROSE[page]
    ):
        places = (ROOT / name, ROOT / "src/mtrain" / name)
        assert any(place.exists() for place in places), name


@pytest.mark.parametrize("page", PAGES)
def test_readme_links_lead_to_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PROSE[page]):
        if "://" not in target:
            assert (PAGES[page].parent / target).exists(), target
