"""README and pages: generated parts are current, and commands, files and links exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtrain.cli.verbs import NAMES
from tests import pages
from tests.support.commands import ROOT
from tests.support.covering import some
from tests.walks import LEFT, walks

README = (ROOT / "README.md").read_text()
PAGES = {str(path.relative_to(ROOT)): path for path in pages.pages()}
PROSE = {name: path.read_text() for name, path in PAGES.items()}
WITH_CONSOLES = [name for name, text in PROSE.items() if pages.CONSOLE.search(text)]
WITH_PLANS = [name for name, text in PROSE.items() if pages.PLANS.search(text)]
FOLDERS = (
    "conf|docs|examples|recipes|tests|kernels|benchmarks|config|convert|mcore|devices|models|train"
)
"""Folders in which a page names files: of the repository, of the package and of `kernels`."""
SLOWEST = "docs/which_parallelism.md"
"""A page with so many plans that only `make test-all` makes it again."""
MOST_LINES = 250
AGAIN = "make it again: python -m tests.pages"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", WITH_CONSOLES)
def test_readme_console_blocks_are_what_commands_print(name: str) -> None:
    for command, shown in pages.CONSOLE.findall(PROSE[name]):
        if pages.is_printed(command):
            assert shown == pages.printed(command), AGAIN


@pytest.mark.parametrize("name", some(WITH_PLANS, set(WITH_PLANS) - {SLOWEST}))
def test_readme_plan_tables_are_what_plan_predicts(name: str) -> None:
    for rows, table in pages.PLANS.findall(PROSE[name]):
        assert table == pages.plan_table(rows), AGAIN


def test_readme_picture_is_what_plan_draws() -> None:
    assert pages.PICTURE.read_text() == pages.picture(), AGAIN


@pytest.mark.parametrize("words", pages.SCHEMAS)
def test_readme_schema_page_is_what_schema_prints(words: str) -> None:
    page = ROOT / pages.SCHEMAS[words]
    assert page.read_text() == pages.printed(f"python launch.py schema {words}"), AGAIN


def test_readme_generator_fills_a_changed_page_again() -> None:
    name = WITH_CONSOLES[0]
    changed = pages.CONSOLE.sub(r"```console\n$ \1\nstale\n```", PROSE[name])
    assert "stale" in changed
    assert pages.generated(changed) == PROSE[name]


def test_readme_quickstarts_are_parts_of_tutorials() -> None:
    known = [command for walk in walks() for command in walk.commands]
    section = re.search(r"\n## Four quickstarts\n(.*?)\n## ", README, re.DOTALL)
    assert section is not None
    commands = [line for line in section[1].splitlines() if line.startswith("python ")]
    assert len(commands) == 19
    assert [command for command in commands if command not in known] == []


def test_readme_tutorials_state_what_holds_after_them() -> None:
    assert [walk.title for walk in walks()] == list(LEFT)


def in_pages(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield each page and text of it that a pattern finds."""
    return ((page, found) for page, text in PROSE.items() for found in re.findall(pattern, text))


def test_readme_page_commands_are_verbs_or_overrides() -> None:
    for page, words in in_pages(r"`python launch.py([^`]*)`"):
        for word in shlex.split(words)[:1]:
            assert word in {*NAMES, "help"} or "=" in word or word.startswith("["), (page, word)


def test_readme_page_files_exist() -> None:
    for page, name in in_pages(rf"`((?:{FOLDERS})/[\w./-]+)`"):
        assert "NAME" in name or _exists(name), (page, name)


def _exists(name: str) -> bool:
    """Return whether a page means a file of the repository, or of the package."""
    return any((place / name).exists() for place in (ROOT, ROOT / "src/mtrain", ROOT / "kernels"))


def test_readme_page_links_lead_to_files() -> None:
    for page, text in PROSE.items():
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"`[^`]*`", "", text)):
            if "://" not in target:
                assert (PAGES[page].parent / target).exists(), (page, target)


def test_readme_site_lists_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").rglob("*.md"):
        assert str(path.relative_to(ROOT / "docs")) in navigation, path


def test_readme_snippets_are_files_of_the_repository() -> None:
    for name in ("changelog", "contributing"):
        (included,) = re.findall(r'--8<-- "(.*)"', PROSE[f"docs/{name}.md"])
        assert Path(ROOT / included).is_file()
