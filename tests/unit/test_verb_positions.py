"""The verb: it is found in any position, and a misspelt one never starts training."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain import __version__
from mtrain.cli.main import main, parse
from mtrain.errors import ConfigError
from tests.support.launched import light
from tests.support.tables import tables

TABLES = tables("verb_positions")


@pytest.mark.parametrize(
    "line",
    [
        "data=mock check parallel=tp2",
        "check data=mock parallel=tp2",
        "data=mock parallel=tp2 check",
        "--debug data=mock check",
        "data=mock --json check",
    ],
)
def test_verb_after_settings_and_flags_is_found(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert "digest" in out
    assert "step " not in out


def test_verb_flags_before_it_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "choices", "trainer"]) == 0
    assert capsys.readouterr().out.startswith("{")


@pytest.mark.parametrize(
    "line", ["version", "--version", "check --version", "tune --version", "recipe show --version"]
)
def test_verb_version_has_many_spellings(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    assert capsys.readouterr().out == f"mtrain {__version__}\n"


@pytest.mark.parametrize(
    ("line", "begin"),
    [
        ("help", "[VERB]"),
        ("-h", "[VERB]"),
        ("help check", "check"),
        ("check -h", "check"),
        ("data=mock check -h", "check"),
        ("recipe -h", "recipe"),
        ("recipe show -h", "recipe show"),
        ("help data", "data"),
    ],
)
def test_verb_page_has_many_spellings(
    line: str, begin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 0
    assert (
        capsys.readouterr().out.partition(".py ")[2].startswith(begin) or "usage: mtrain" in begin
    )


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("data=mock chekc", "check"),
        ("chekc data=mock", "check"),
        ("data=mock chekc trainer.train_iters=1", "check"),
        ("explian data", "explain"),
        ("recpie show x", "recipe"),
        ("Version", "version"),
        ("data=mock zzzzzz", "python launch.py --help, which lists the verbs"),
    ],
)
def test_verb_unknown_is_named_not_dropped(
    line: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert f" Use {fix}.\n" in capsys.readouterr().err


def test_verb_settings_before_check_start_nothing(tmp_path: Path) -> None:
    found = light("data=indexed", "data.path=nowhere/corpus", "check", cwd=tmp_path)
    assert found.returncode == 2
    assert "MT306" in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "same"),
    TABLES["positions"],
)
def test_verb_folder_is_found_before_it(line: str, same: str, tmp_path: Path) -> None:
    words, expected = (
        [str(tmp_path) if word == "HERE" else word for word in each.split()]
        for each in (line, same)
    )
    assert parse(words) == parse(expected)


@pytest.mark.parametrize(
    "line", ["nowhere resume", "HERE HERE resume", "HERE check", "chekc resume HERE"]
)
def test_verb_one_existing_path_may_precede_it(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is neither a verb nor key=value"):
        parse([str(tmp_path) if word == "HERE" else word for word in line.split()])


@pytest.mark.parametrize("word", ["max_new_tokens", "max_length", "max_tokens", "n_predict"])
def test_verb_generate_knows_foreign_names(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("")
    assert main(["generate", str(tmp_path), f"{word}=5"]) == 2
    assert " Use tokens=5.\n" in capsys.readouterr().err
