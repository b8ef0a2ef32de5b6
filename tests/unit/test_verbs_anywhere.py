"""The verb is found wherever it stands, and a word that is none never starts training."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain import __version__
from mtrain.cli.main import main
from tests.support.commands import mtrain


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
def test_a_verb_is_found_behind_settings_and_flags(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert "digest" in out
    assert "step " not in out


def test_flags_before_a_verb_of_its_own_words_reach_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "choices", "trainer"]) == 0
    assert capsys.readouterr().out.startswith("{")


@pytest.mark.parametrize(
    "line", ["version", "--version", "check --version", "tune --version", "recipe show --version"]
)
def test_the_version_is_asked_for_in_any_way(line: str, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_page_is_asked_for_in_any_way(line: str, begin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    assert capsys.readouterr().out.partition(".py ")[2].startswith(begin) or "usage: mtrain" in begin


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("data=mock chekc", "check"),
        ("chekc data=mock", "check"),
        ("data=mock chekc trainer.train_iters=1", "check"),
        ("explian data", "explain"),
        ("recpie show x", "recipe"),
        ("Version", "version"),
        ("data=mock zzzzzz", "python launch.py --help lists the verbs"),
    ],
)
def test_a_word_that_is_no_verb_is_named_and_leaving_it_out_is_not_the_fix(
    line: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert f"  fix: {fix}\n" in capsys.readouterr().err


def test_settings_before_check_check_them_and_start_nothing(tmp_path: Path) -> None:
    found = mtrain("data=indexed", "data.path=nowhere/corpus", "check", cwd=tmp_path)
    assert found.returncode == 2
    assert "MT306" in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["max_new_tokens", "max_length", "max_tokens", "n_predict"])
def test_generate_knows_what_others_call_its_words(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("")
    assert main(["generate", str(tmp_path), f"{word}=5"]) == 2
    assert "  fix: tokens=5\n" in capsys.readouterr().err
