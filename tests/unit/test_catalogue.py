"""The catalogue of bad input: each is refused with key, value, origin, numbers, and a fix that
makes it valid.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.overrides import jobs
from mtrain.config.messages.keys import is_content
from mtrain.config.messages.suggestions import NOTHING, SWEPT
from mtrain.config.messages.validate import whole
from mtrain.errors import Problem
from tests.support.catalogue import HARMLESS, OWN_ROWS, ROWS, Row, validated
from tests.support.patience import patient
from tests.unit.test_catalogue_before_ranks import BEFORE_RANKS

ROOT = Path(__file__).resolve().parents[2]
REPLACED = ("MT010", "MT011", "MT012", "MT016")
"""Codes whose fix takes the place of the argument."""
CUT = ("delete", "write", "keep one", "leave it out", "indent", "- override")
"""Beginnings of fixes that are no setting: they remove the line or the argument."""


def fixed(words: list[str], problem: Problem, file: Path) -> list[str]:
    """Return the command line with the first fix of a problem applied; cut a line that no setting
    can correct.
    """
    first = problem.fix.split(" or ")[0]
    if first == SWEPT:
        return list(jobs(words)[0].argv)
    if problem.code in REPLACED and not problem.source.startswith(str(file)):
        key = problem.path or re.split(r"[=: ]", problem.detail)[0]
        words = [word for word in words if key not in word]
    if first == NOTHING and problem.source == COMMAND_LINE:
        words = [word for word in words if word.partition("=")[0] != problem.path]
    added = [] if first.startswith(CUT) else shlex.split(first)
    for key in (
        word.partition("=")[0] for word in added
    ):  # a setting takes the place of those that say it
        words = [word for word in words if not _says(word.partition("=")[0], key)]
    again = {(p.code, p.path, p.source) for p in validated([*words, *added])}
    if (problem.code, problem.path, problem.source) in again and file.stat().st_size:
        lines = file.read_bytes().split(b"\n")
        number = int(problem.source.rpartition(":")[2])
        file.write_bytes(b"\n".join(lines[: number - 1] + lines[number:]))
        if b":" not in re.sub(rb"(?m)#.*", b"", file.read_bytes()):  # nothing is left to say
            file.write_text("log: {interval: 10}\n")
    return [*words, *added]


WRONG_VALUES = "MT012", "MT013", "MT014"


def is_for_a_person(problem: Problem) -> bool:
    """Tell if only somebody can say what is to stand there: a file, or which of the choices."""
    words = problem.fix.startswith(("python launch.py choices", "set again the values to keep"))
    return words or "there is no such file or folder" in problem.rule


def _says(path: str, key: str) -> bool:
    """Return whether setting `path`, which is no group, also sets `key` or a part of it."""
    return (
        path == key
        or ("." in path and f"{key}.".startswith(f"{path}."))
        or path.startswith(f"{key}.")
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "row", [row for row in (*ROWS, *OWN_ROWS) if row.code], ids=lambda row: row.name
)
def test_catalogue_bad_input_is_fixed_by_first_fix(row: Row, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(row.text.encode("utf-8", "surrogateescape"))
    words = [word.replace("{file}", str(file)) for word in row.words]
    problems = validated(words)
    found = [p for p in problems if (p.code, p.path) == (row.code, row.path)]
    assert found, problems
    problem = found[0]
    assert problem.severity == row.severity
    assert problem.source == (f"{file}:{row.line}" if row.line else row.origin)
    assert all(piece in problem.rule for piece in row.says), problem.rule
    if (
        not problem.fix
    ):  # nothing takes the place of a path or a list that somebody wrote, or of a word for a number
        assert is_content(whole(problem.path)) or problem.code in WRONG_VALUES
        return
    for _ in range(len(problems) + 2):  # a line that is cut may leave half of what it began
        if not problems or is_for_a_person(problems[0]):
            return
        words = fixed(words, problems[0], file)
        problems = validated(words)
    assert not problems or is_for_a_person(problems[0]), problems


@pytest.mark.parametrize(
    "row", [row for row in (*ROWS, *HARMLESS) if not row.code], ids=lambda row: row.name
)
def test_catalogue_working_input_is_accepted(row: Row, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(row.text)
    assert (
        validated([word.replace("{file}", str(tmp_path / "mine.yaml")) for word in row.words]) == []
    )


def test_catalogue_indivisible_vocabulary_is_padded_with_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", *next(row.words for row in ROWS if row.number == 6)]) == 0
    assert "vocabulary 129 padded to 256" in capsys.readouterr().out


def test_catalogue_terminal_escapes_are_shown(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('log:\n  name: "a\\e[31mb\\a"\n')
    (problem,) = validated([f"recipe={tmp_path / 'mine.yaml'}"])
    assert "a\\x1b[31mb\\x07" in problem.render()
    assert "\x1b" not in problem.render()


def test_catalogue_misspelt_key_keeps_other_findings(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "parallel:\n  tp: 3\noptim:\n  learning_rate: 1e-3\n  lr: fast\n"
    )
    found = {
        (p.code, p.path): p.source.rpartition(":")[2]
        for p in validated([f"recipe={tmp_path / 'mine.yaml'}"])
    }
    expected = {
        ("MT012", "optim.learning_rate"): "4",
        ("MT013", "optim.lr"): "5",
        ("MT101", "parallel.tp"): "2",
    }
    assert expected.items() <= found.items()


def test_catalogue_every_number_is_tested() -> None:
    assert {row.number for row in ROWS} | set(BEFORE_RANKS) == set(range(1, 95))
    assert len({(row.words, row.text) for row in OWN_ROWS}) >= 95


@pytest.mark.full
def test_catalogue_imports_no_torch() -> None:
    code = (
        "import sys\nfrom tests.support.catalogue import ROWS, validated\n"
        "for row in ROWS: validated(list(row.words))\n"
        "print([m for m in ('torch', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=patient(120)
    )
    assert done.stdout.strip() == "[]", done.stderr
