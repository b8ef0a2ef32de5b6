"""The library of a CPU's products: measured once, kept, and the one that a run began with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.config.compose.dump import run_yaml
from mtrain.config.rules import apply
from mtrain.errors import ConfigError
from mtrain.launching import matmul


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    calls: list[str] = []

    def faster() -> tuple[str, float]:
        calls.append("measured")
        return "onednn", 1.9

    monkeypatch.setenv("MTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mtrain_kernels.linear.faster", faster)
    monkeypatch.setattr(matmul, "_MEASURED", {})
    return calls


def test_matmul_faster_is_measured_once_and_reported(measured: list[str]) -> None:
    run = load([]).run
    assert run.kernels.cpu_matmul is None
    assert not matmul.is_known(run)
    for _ in range(2):
        assert matmul.chosen(run).kernels.cpu_matmul == "onednn"
    assert measured == ["measured"]
    assert matmul.is_known(run)
    assert "1.90 of the BLAS' rate" in (matmul.reason(matmul.chosen(run)) or "")


def test_matmul_named_library_is_taken(measured: list[str]) -> None:
    run = matmul.chosen(load(["kernels.cpu_matmul=blas"]).run)
    assert run.kernels.cpu_matmul == "blas"
    assert matmul.reason(run) == "named, or taken from the checkpoint"
    assert not measured


def test_matmul_resumed_run_keeps_its_library(measured: list[str], tmp_path: Path) -> None:
    began = load(["kernels.cpu_matmul=blas"]).run
    (tmp_path / "run.yaml").write_text(run_yaml(began.recorded()))
    assert matmul.chosen(load([]).run, tmp_path).kernels.cpu_matmul == "blas"
    assert not measured


@pytest.mark.parametrize("change", [{"precision.dtype": "bf16"}, {"cluster.device": "cuda"}])
def test_matmul_other_products_are_not_chosen(change: dict[str, str], measured: list[str]) -> None:
    run = matmul.chosen(apply(load([]).run, change))
    assert run.kernels.cpu_matmul is None
    assert matmul.reason(run) is None
    assert not measured


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', "\x00"])
def test_matmul_broken_cache_is_remeasured(text: str, measured: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/matmul.json").write_text(text)
    assert matmul.chosen(load([]).run).kernels.cpu_matmul == "onednn"
    assert measured


PLACES: dict[str, dict[str, str | None]] = {
    "closed": {"MTRAIN_CACHE": "/proc/none"},
    "file": {"MTRAIN_CACHE": __file__},
    "below a file": {"MTRAIN_CACHE": f"{__file__}/cache"},
    "no home": {"MTRAIN_CACHE": None, "HOME": "/proc/none"},
    "nobody": {"MTRAIN_CACHE": "~no-such-user/cache"},
}


@pytest.mark.parametrize("place", PLACES)
def test_matmul_unwritable_cache_ends_no_run(
    place: str, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PLACES[place].items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    run = load(["data=mock"]).run
    assert not matmul.is_known(run)
    for _ in range(2):
        assert matmul.chosen(run).kernels.cpu_matmul == "onednn"
    assert measured == ["measured"], "once for this process, where nothing is kept"
    assert matmul.is_known(run)


def test_matmul_child_measurement_is_taken(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTRAIN_CACHE", "/proc/none")
    run = load(["data=mock"]).run
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, json.dumps(matmul.measure(run)).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        told = json.loads(pipe.read())
    assert not matmul.is_known(run), "nothing of it reaches this process by a file"
    run = matmul.chosen(run, measured=told)
    assert run.kernels.cpu_matmul == "onednn"
    assert measured == []
    assert "1.90 of the BLAS' rate" in (matmul.reason(run) or "")


def test_matmul_child_measurement_is_verified(measured: list[str]) -> None:
    run = load([]).run
    assert matmul.chosen(run, measured={"library": "numpy"}).kernels.cpu_matmul == "onednn"
    assert measured == ["measured"]


def test_matmul_only_cached_data_needs_writable_cache() -> None:
    closed = ["data.cache_dir=/proc/none"]
    assert load(["data=mock", *closed]).run.data.kind == "mock"
    with pytest.raises(ConfigError, match="MT432"):
        load(["data=stdlib", *closed])
