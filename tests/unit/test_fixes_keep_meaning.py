"""No fix throws away a path, a name, a text or a list that somebody wrote, and none names other
data.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.config.compose.composer import compose
from mtrain.config.compose.grammar import parse_value
from mtrain.config.messages.codes import codes
from mtrain.config.messages.keys import is_content
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import ConfigError, Problem
from mtrain.launching.resume import weights_of
from tests.support.configs import LAPTOP
from tests.support.launched import light
from tests.support.tables import tables

TABLES = tables("fixes_keep_meaning")

NOT_KEPT = re.compile(r"=(null|\[1\.0,0\.0\]|\[1,1\]|assistant|0\.9)( |$)")
"""Values that were taken for what somebody wrote: null, a default, another number."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "wiki.txt").write_text("a line of text\n" * 1000)
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "r1.yaml").write_text("defaults: [{override /model: llama_tiny}]\n")
    (tmp_path / "small.yaml").write_text("defaults: [llama_tiny, _self_]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _found(*words: str) -> list[Problem]:
    try:
        return list(load(words, LAPTOP, {}, to_run=False).warnings)
    except ConfigError as error:
        return list(error.problems)


def _first(*words: str) -> Problem:
    return _found(*words)[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("words", "fix"),
    TABLES["kept"],
)
def test_fixes_keep_meaning_or_are_absent(words: str, fix: str) -> None:
    problem = _first(*shlex.split(words))
    assert fix in problem.fix if fix else not problem.fix, problem
    assert not NOT_KEPT.search(problem.fix), problem


@pytest.mark.parametrize(
    ("name", "fix"), [("1.10", "1.10"), ("3.0", "3.0"), ("1e-5", "1e-5"), ("0x10", "0x10")]
)
def test_fixes_keep_quoting_of_names_in_files(name: str, fix: str) -> None:
    Path("mine.yaml").write_text(f"trainer: {{seed: 1}}\nlog:\n  name: {name}\n")
    problem = _first("recipe=mine.yaml")
    assert problem.fix == f"""'log.name="{fix}"'"""
    assert compose(["recipe=mine.yaml", *shlex.split(problem.fix)]).run.log.name == name


HOSTILE = TABLES["hostile"]


@pytest.mark.full
def test_fixes_keep_command_line_values() -> None:
    """Try the fixes for every code's example, and for inputs that are wrong in several places."""
    lines = [*(code.example for code in codes().values() if code.example), *HOSTILE]
    seen = 0
    for line in lines:
        words = shlex.split(line)
        said = {word.partition("=")[0]: word.partition("=")[2] for word in words}
        for problem in _found(*words):
            for change in _changes(problem.fix):
                lost = [
                    key
                    for key, value in change.items()
                    if is_content(key)
                    and said.get(key) not in (None, "", "null", "[]")
                    and value in (None, [], {}, "")
                ]
                assert not lost, (line, problem)
                if change.get("data.kind") == "mock":
                    assert "data.kind" not in said, (line, problem)
                    assert said.get("data") in (None, "auto"), (line, problem)
                seen += 1
    assert seen > 100


def _changes(fix: str) -> list[dict[str, object]]:
    """Return the alternatives of a fix that are settings."""
    out = []
    for text in fix.split(" or "):
        try:
            pairs = [word.partition("=") for word in shlex.split(text)]
            out.append(
                {key: parse_value(value) for key, equals, value in pairs if equals and "." in key}
            )
        except ValueError:
            continue
    return out


def test_fixes_keep_missing_file_suggests_similar(folder: Path) -> None:
    found = light("check", "data=sft", "data.path=chatz.jsonl", cwd=folder)
    assert found.returncode == 2
    assert " Use data.path=chats.jsonl.\n" in found.stderr
    assert "mock" not in found.stderr
    assert "null\n" not in found.stderr.replace("data.tokenizer=null", "")


def test_fixes_keep_missing_checkpoint_is_not_random(folder: Path) -> None:
    (folder / "began").mkdir()
    (folder / "began" / "run.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        weights_of(resolve(compose(["checkpoint.init_from=began"]).run, LAPTOP))
    (problem,) = caught.value.problems
    assert problem.code == "MT502"
    assert "null" not in problem.fix
    assert "wait until it has saved one" in problem.fix
