"""Whole weights out of a sharded checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.plan.count import parameters
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "dp2 distributed": {"ranks": 2, "distributed_optimizer": True},
}


def _exported(folder: Path, layout: dict[str, Any], **run: Any) -> dict[str, torch.Tensor]:
    from mtrain.ckpt import export
    from mtrain.ckpt.store import Checkpoint

    job = tiny_run(**layout, **run)
    run_ranks(job.parallel.ranks, lambda: train_steps(job, 0, save_to=folder))
    saved = folder / "step_00000000"
    done = export.export(Checkpoint.open(saved), folder / "out")
    assert done.elements == parameters(job.model)
    tensors = dict(export.read(folder / "out"))
    index = json.loads((folder / "out" / export.INDEX).read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"] == {
        "total_size": sum(t.numel() * t.element_size() for t in tensors.values()),
        "vocab_size": 300,
        "padded_vocab_size": 384,
        "mask_padded_vocab": job.model.mask_padded_vocab,
    }
    assert done.padding == job.model.padding_in_words
    everything = whole_tensors(saved)
    assert all(torch.equal(tensor, everything[f"model/{key}"]) for key, tensor in tensors.items())
    return tensors


def test_export_is_equal_from_every_layout(tmp_path: Path) -> None:
    one, *others = (_exported(tmp_path / name, layout) for name, layout in LAYOUTS.items())
    for other in others:
        assert other.keys() == one.keys()
        assert all(torch.equal(other[key], tensor) for key, tensor in one.items())


def test_export_records_padding_in_softmax(tmp_path: Path) -> None:
    _exported(tmp_path, {}, model={"mask_padded_vocab": False})


def test_export_splits_large_weights_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import export

    monkeypatch.setattr(export, "SHARD_BYTES", 50_000)
    _exported(tmp_path, {}, model={"tie_word_embeddings": True})
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"


def test_export_refuses_existing_folder(tmp_path: Path) -> None:
    _exported(tmp_path, {})
    from mtrain.ckpt import export
    from mtrain.ckpt.store import Checkpoint

    with pytest.raises(FileExistsError):
        export.export(Checkpoint.open(tmp_path / "step_00000000"), tmp_path / "out")
