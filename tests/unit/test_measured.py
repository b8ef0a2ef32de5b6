"""All ranks take the variants of kernels that rank 0's file names, and a damaged file
stops nobody.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mtrain_kernels import tuning

from mtrain.assembly.kernel_variants import use_measured
from tests.support.configs import tiny

RECORD = {"a kernel": {"some shapes": "a variant"}}


class World:
    """A rank that hears what rank 0 says."""

    torch_device = "a GPU"

    def __init__(self, rank: int, said: str = "") -> None:
        self.is_rank0 = rank == 0
        self.said = said

    def tell(self, text: str) -> str:
        self.said = text if self.is_rank0 else self.said
        return self.said


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(RECORD))
    monkeypatch.setattr(tuning, "file_of", lambda device: path)
    tuning.use({})
    yield path
    tuning.use({})


def taken(rank: int = 0, said: str = "", **keys: Any) -> str | None:
    tuning.use({})
    use_measured(tiny(**({"cluster__device": "cuda"} | keys)), World(rank, said))  # type: ignore[arg-type]
    return tuning.recorded("a kernel", "some shapes")


def test_measured_rank_0_reads_and_others_receive(file: Path) -> None:
    assert taken() == "a variant"
    file.unlink()  # another machine has none
    assert taken(1, json.dumps(RECORD)) == "a variant"
    assert taken(1, "{}") is None


def test_measured_deterministic_or_cpu_takes_nothing() -> None:
    assert taken(trainer__deterministic=True) is None
    assert taken(cluster__device="cpu") is None


def test_measured_damaged_file_warns(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("{")
    assert taken() is None
    assert "not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("error", [PermissionError("not yours"), RuntimeError("no home")])
def test_measured_unreadable_file_warns(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise error

    monkeypatch.setattr(tuning, "read", refuse)
    assert taken() is None
    assert str(error) in capsys.readouterr().err
