"""Variants of kernels are what was measured, the same wherever the record is, and repeatable on
request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mtrain_kernels import tune, tuning
from mtrain_kernels.attention import tiles as attention_tiles
from mtrain_kernels.grouped_gemm import tiles
from mtrain_kernels.linear_cross_entropy import tiles as loss_tiles

CPU = torch.device("cpu")
X = torch.empty(64, 32, dtype=torch.bfloat16)
SIZES = {"rows": 64, "n": 96, "k": 32, "groups": 4}
SHAPES = tiles.shape_class(X, **SIZES)


@pytest.fixture(autouse=True)
def no_record() -> Iterator[None]:
    tuning.use({})
    yield
    tuning.use({})


def taken(**other: Any) -> tiles.Tile:
    return tiles.tile_for("rows", X, **SIZES | other, descriptors=False)


def test_tuning_takes_measured_else_first() -> None:
    first, second = tiles.candidates("rows", X, descriptors=False)
    assert taken().warps == first.warps
    tuning.use({"grouped_gemm.rows": {SHAPES: second.name}})
    assert second.warps != first.warps
    assert taken().warps == second.warps
    assert taken(n=128).warps == first.warps, "another layer was not measured"
    assert taken(rows=64 + 8).warps == first.warps, "nor were so many rows"
    tuning.use({"grouped_gemm.rows": {SHAPES: "a tile that is not there any more"}})
    assert taken().warps == first.warps


def test_tuning_repeatable_ignores_measurements() -> None:
    first, second = tiles.candidates("rows", X, descriptors=False)
    tuning.use({"grouped_gemm.rows": {SHAPES: second.name}})
    torch.use_deterministic_algorithms(True)
    try:
        assert taken().warps == first.warps
    finally:
        torch.use_deterministic_algorithms(False)
    assert taken().warps == second.warps


def test_tuning_descriptors_need_capable_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, tma in ((80, False), (90, True), (100, True)):
        monkeypatch.setattr(tiles, "capability", lambda device, c=capability: c)
        for product in tiles.TABLES:
            found = tiles.candidates(product, X, descriptors=True)
            assert any(tile.tma for tile in found) == tma
            assert not any(tile.tma for tile in tiles.candidates(product, X, descriptors=False))
            assert not any(
                tile.tma for tile in tiles.candidates(product, X[:, :3], descriptors=True)
            )
            assert not any(
                tile.tma for tile in tiles.candidates(product, X.float(), descriptors=True)
            )


def test_tuning_layer_is_measured_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tuning.FOLDER, str(tmp_path))
    path = tuning.file_of(CPU)
    slow = itertools.count(1000, -50)  # each call is faster than the one before
    found = tune.measure(
        path, CPU, 16, 2, 32, 24, torch.bfloat16, lambda call: (call(), float(next(slow)))[1]
    )
    assert len(found) == len(tune.products(16, 2, 32, 24))
    noted = tuning.read(path)
    assert {
        f"{kernel} {shapes}": tile for kernel, own in noted.items() for shapes, tile in own.items()
    } == found
    for what, name in found.items():
        kind = what.partition(" ")[0].removeprefix("grouped_gemm.")
        assert name == tiles.candidates(kind, X, descriptors=False)[-1].name


def test_tuning_attention_measures_windows_too(tmp_path: Path) -> None:
    slow = itertools.count(1000, -50)
    path = tmp_path / "record.json"
    called = []

    def seconds(call: Any) -> float:
        called.append(call)
        return float(next(slow))

    found = tune.measure_attention(path, CPU, 2, 1, (16, 8), 16, torch.bfloat16, seconds)
    q = torch.empty(1, 2, 16, 16, dtype=torch.bfloat16)
    v = torch.empty(1, 1, 16, 8, dtype=torch.bfloat16)
    assert len(found) == 6
    for windowed in (False, True):
        for pass_ in ("forward", "queries", "keys"):
            tried = attention_tiles.candidates(pass_, q, v)
            what = f"attention.{pass_}", attention_tiles.shape_class(q, v, windowed)
            assert found[" ".join(what)] == tuning.read(path)[what[0]][what[1]] == tried[-1].name
    tuning.use(tuning.read(path))
    assert (
        attention_tiles.tile_for("keys", q, v, True).name
        == found["attention.keys bfloat16 d16 e8 s16 window"]
    )
    called[0]()


def test_tuning_logits_owner_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = itertools.count(1000, -50)
    path = tmp_path / "record.json"
    for table in ("TILES", "EXACT"):
        monkeypatch.setattr(loss_tiles, table, (loss_tiles.Tile(16, 32, 16, 4, 1),))
    found = tune.measure_loss(
        path, CPU, 20, 16, 60, torch.float32, lambda call: (call(), float(next(slow)))[1]
    )
    assert found == {
        "linear_cross_entropy.kept float32 h16 v64": "16x32x16 w4 s1",
        "linear_cross_entropy.alone float32 h16 v64": "16x32x16 w4 s1",
    }
    tuning.use(tuning.read(path))
    assert loss_tiles.way_for(torch.empty(5, 16), 60, True).name == "16x32x16 w4 s1"


def test_tuning_unlaunchable_tile_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    tried = []
    tuning.add(path, "other", "shapes", "variant")

    def seconds(call: Any) -> float:
        tried.append(call)
        if len(tried) % 2 or len(tried) > 4:
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    with pytest.raises(
        RuntimeError, match="out of resource"
    ):  # of the third product no tile can be launched
        tune.measure(path, CPU, 16, 2, 32, 24, torch.bfloat16, seconds)
    assert tuning.recorded("other", "shapes") == "variant", "what counted before counts again"
    noted = tuning.read(path)
    assert set(noted) == {"other", "grouped_gemm.gated", "grouped_gemm.rows"}
    assert set(noted["grouped_gemm.rows"].values()) == {
        tiles.candidates("rows", X, descriptors=False)[1].name
    }


def test_tuning_first_of_nearly_equal_is_taken() -> None:
    times = {"a": 1.02, "b": 1.0, "c": 1.5}
    assert tuning.fastest(times) == "a"
    assert tuning.fastest({**times, "a": 1.2}) == "b"


def test_tuning_non_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert tuning.read(path) == {}
    for text in ("{", "[1]", '{"a": 1}', '{"a": {"b": 1}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"not JSON|does not map"):
            tuning.read(path)
    path.unlink()
    tuning.add(path, "kernel", "shapes", "variant")
    tuning.add(path, "kernel", "others", "variant")
    assert tuning.read(path) == {"kernel": {"shapes": "variant", "others": "variant"}}
    assert path.stat().st_mode & 0o777 == 0o644, "others may read it"


def test_tuning_without_gpu_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["--model", "tiny"]) == 1
    assert "no GPU" in capsys.readouterr().err
