"""A checkpoint that is not what was written is refused, by the name of the file."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from mtrain.errors import Damaged
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two data-parallel ranks with the distributed optimizer."""
    root = tmp_path_factory.mktemp("saved")
    run = tiny_run(ranks=2, distributed_optimizer=True)
    run_ranks(2, lambda: train_steps(run, 2, save_to=root))
    return root / "step_00000002"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def _open(path: Path) -> None:
    from mtrain.ckpt.store import Checkpoint

    Checkpoint.open(path)


def test_a_whole_checkpoint_opens(checkpoint: Path) -> None:
    _open(checkpoint)
    assert whole_tensors(checkpoint)["decoder.final_layernorm.weight"].shape == (64,)


def test_any_flipped_bit_of_any_file_is_found(checkpoint: Path) -> None:
    dice = random.Random(0)
    files = sorted(p for p in checkpoint.iterdir())
    for _ in range(60):
        file = dice.choice(files)
        original = file.read_bytes()
        place, bit = dice.randrange(len(original)), dice.randrange(8)
        damaged = bytearray(original)
        damaged[place] ^= 1 << bit
        file.write_bytes(bytes(damaged))
        with pytest.raises(Damaged) as caught:
            _open(checkpoint)
        assert file.name in str(caught.value), (file.name, place, bit)
        file.write_bytes(original)


@pytest.mark.parametrize("cut", [0, 1, 1000])
@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.safetensors", "rank_00001.safetensors", "run.yaml"])
def test_a_cut_file_is_named(checkpoint: Path, name: str, cut: int) -> None:
    file = checkpoint / name
    content = file.read_bytes()
    file.write_bytes(content[: min(cut, len(content) - 1)])
    with pytest.raises(Damaged, match=name):
        _open(checkpoint)


@pytest.mark.parametrize("name", ["manifest.json", "rank_00001.safetensors"])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(Damaged, match=name):
        _open(checkpoint)


def test_swapped_shards_are_found(checkpoint: Path) -> None:
    a, b = checkpoint / "rank_00000.safetensors", checkpoint / "rank_00001.safetensors"
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    with pytest.raises(Damaged, match="rank_0000"):
        _open(checkpoint)


def test_a_manifest_cannot_point_outside_its_folder(checkpoint: Path) -> None:
    from mtrain.ckpt import folder

    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["../secret"] = {"bytes": 1, "sha256": "0"}
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    file.write_text(json.dumps(body | {"sha256": folder.digest(body)}))
    with pytest.raises(Damaged, match="no plain file name"):
        _open(checkpoint)


def test_a_missing_piece_is_not_filled_with_anything(checkpoint: Path) -> None:
    from mtrain.ckpt import folder

    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    key = next(k for k, v in manifest["tensors"].items() if k.startswith("exp_avg.") and len(v["pieces"]) > 1)
    del manifest["tensors"][key]["pieces"][0]
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    file.write_text(json.dumps(body | {"sha256": folder.digest(body)}))
    with pytest.raises(Damaged, match="cover"):
        whole_tensors(checkpoint)
