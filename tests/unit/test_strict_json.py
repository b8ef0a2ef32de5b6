"""Output for machines: it is standard JSON, whatever numbers are in it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mtrain import strict_json
from mtrain.cli.main import main
from mtrain.cli.multirun import _row, _table
from mtrain.config.compose.composer import compose
from mtrain.config.compose.overrides import Job
from mtrain.config.resolve.resolution import resolve
from tests.support.configs import LAPTOP


def strictly(text: str) -> Any:
    """Parse JSON without the words that Python adds to it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_strict_json_non_finite_is_null_anywhere(number: float) -> None:
    text = strict_json.dumps(
        {"a": number, "b": [1.5, (number, "NaN")], "c": {"d": {"e": number}}}, sort_keys=True
    )
    assert strictly(text) == {"a": None, "b": [1.5, [None, "NaN"]], "c": {"d": {"e": None}}}


@pytest.mark.parametrize(
    "words", ["optim.lr=nan", "data.split=[nan,1,1]", "cluster.peak_tflops={bf16:inf}"]
)
def test_strict_json_check_reports_nan_to_machines(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--json", words]) == 2
    assert strictly(capsys.readouterr().out)["ok"] is False


def test_strict_json_closed_reader_ends_failed_check_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    assert main(["check", "--json", "parallel=tp3"]) == 141


def test_strict_json_sweep_table_reads_null_numbers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    lines = [
        {"step": 1, "loss": 2.0, "tokens_per_s": None},
        {"step": 2, "loss": None, "tokens_per_s": 7.0},
    ]
    (tmp_path / "a/metrics.jsonl").write_text(
        "".join(strict_json.dumps(line) + "\n" for line in lines)
    )
    run = resolve(compose([f"log.runs_dir={tmp_path}"]).run, LAPTOP)
    row = _row(Job((), {"x": "1"}), "a", 5, run)
    assert (row.loss, row.tokens_per_s) == (None, 7.0)
    assert "-" in _table([row], 1)
