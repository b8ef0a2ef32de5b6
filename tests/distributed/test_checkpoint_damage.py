"""A checkpoint that is not what was written is refused, by the name of the file."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from mtrain.errors import CorruptData
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two data-parallel ranks with the distributed optimizer."""
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


def test_checkpoint_whole_opens(checkpoint: Path) -> None:
    _open(checkpoint)
    assert whole_tensors(checkpoint)["model/decoder.final_layernorm.weight"].shape == (64,)


def test_checkpoint_flipped_bit_is_found(checkpoint: Path) -> None:
    dice = random.Random(0)
    files = sorted(p for p in checkpoint.iterdir())
    for _ in range(60):
        file = dice.choice(files)
        original = file.read_bytes()
        place = dice.randrange(len(original))
        bit = dice.randrange(8)
        damaged = bytearray(original)
        damaged[place] ^= 1 << bit
        file.write_bytes(bytes(damaged))
        with pytest.raises(CorruptData) as caught:
            _open(checkpoint)
        assert file.name in str(caught.value), (file.name, place, bit)
        file.write_bytes(original)


@pytest.mark.parametrize("cut", [0, 1, 1000])
@pytest.mark.parametrize(
    "name", ["manifest.json", "rank_00000.safetensors", "rank_00001.safetensors", "run.yaml"]
)
def test_checkpoint_cut_file_is_named(checkpoint: Path, name: str, cut: int) -> None:
    file = checkpoint / name
    content = file.read_bytes()
    file.write_bytes(content[: min(cut, len(content) - 1)])
    with pytest.raises(CorruptData, match=name):
        _open(checkpoint)


@pytest.mark.parametrize("name", ["manifest.json", "rank_00001.safetensors"])
def test_checkpoint_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(CorruptData, match=name):
        _open(checkpoint)


def test_checkpoint_swapped_shards_are_found(checkpoint: Path) -> None:
    a = checkpoint / "rank_00000.safetensors"
    b = checkpoint / "rank_00001.safetensors"
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    with pytest.raises(CorruptData, match="rank_0000"):
        _open(checkpoint)


def test_checkpoint_manifest_stays_inside_folder(checkpoint: Path) -> None:
    from mtrain.ckpt import folder

    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["../secret"] = {"bytes": 1, "sha256": "0"}
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    file.write_text(json.dumps(body | {"sha256": folder.digest(body)}))
    with pytest.raises(CorruptData, match="no plain file name"):
        _open(checkpoint)


def test_checkpoint_missing_piece_is_not_filled(checkpoint: Path) -> None:
    from mtrain.ckpt import folder

    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    key = next(
        k
        for k, v in manifest["tensors"].items()
        if k.startswith("optim/exp_avg/") and len(v["pieces"]) > 1
    )
    del manifest["tensors"][key]["pieces"][0]
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    file.write_text(json.dumps(body | {"sha256": folder.digest(body)}))
    with pytest.raises(CorruptData, match="cover"):
        whole_tensors(checkpoint)


def _sizes(checkpoint: Path) -> dict[tuple[str, str], int]:
    """Return the bytes of every entry of every shard."""
    from safetensors import safe_open

    found = {}
    for file in checkpoint.glob("rank_*.safetensors"):
        with safe_open(file, framework="pt") as f:
            for entry in f.keys():  # noqa: SIM118
                tensor = f.get_tensor(entry)
                found[file.name, entry] = tensor.numel() * tensor.element_size()
    return found


def test_checkpoint_rank_hashes_only_its_reads_once(tmp_path: Path) -> None:
    run = tiny_run(ranks=2, tp=2)
    run_ranks(2, lambda: train_steps(run, 1, save_to=tmp_path))
    checkpoint = tmp_path / "step_00000001"

    def resume_and_sample() -> tuple[list[tuple[str, str]], int, int]:
        from mtrain.ckpt import hashes
        from mtrain.ckpt import state as ckpt_state
        from mtrain.ckpt.store import Checkpoint
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        read = []
        hashed = []
        real_read = hashes.Shard.read
        real_hash = hashes.hash_bytes
        real_block = hashes.hash_block
        real_file = hashes.hash_file
        hashes.Shard.read = lambda shard, name, start, stop: (  # type: ignore[method-assign]
            read.append((Path(shard.name).name, name)),
            real_read(shard, name, start, stop),
        )[1]
        hashes.hash_bytes = lambda data: (hashed.append(memoryview(data).nbytes), real_hash(data))[
            1
        ]
        hashes.hash_block = lambda data, algorithm: (
            hashed.append(memoryview(data).nbytes),
            real_block(data, algorithm),
        )[1]
        hashes.hash_file = lambda path: (hashed.append(path.stat().st_size), real_file(path))[1]
        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            opened = Checkpoint.open(checkpoint, verify=False)
            assert ckpt_state.load(opened, world, parts.state, seed=1)
            first = sum(hashed)
            ckpt_state.load_model(Checkpoint.open(checkpoint, verify=False), parts.state.chunks)
        return read, first, sum(hashed)

    sizes = _sizes(checkpoint)
    # headers, run.yaml, ...
    small_files = sum(p.stat().st_size for p in checkpoint.iterdir()) - sum(sizes.values())
    for read, first, both in run_ranks(2, resume_and_sample):
        expected = sum(sizes[entry] for entry in set(read))
        assert expected <= first <= expected + small_files
        assert first < 0.7 * sum(sizes.values()), "a rank of two hashed what the other reads"
        assert len(set(read)) < len(read), "the sample reads the weights again"
        assert both <= first + small_files, "no more than headers is hashed again"


def _as_format_1(checkpoint: Path) -> None:
    """Write a checkpoint as the first format was: bare keys of weights, and one hash a file."""
    import hashlib

    from safetensors.torch import load_file, save_file

    from mtrain.ckpt import folder

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        path = checkpoint / name
        if name.endswith(".safetensors"):
            save_file(load_file(path), path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256}
    old = {
        k.removeprefix("model/").removeprefix("optim/").replace("/", "."): v
        for k, v in manifest["tensors"].items()
    }
    body = {k: v for k, v in manifest.items() if k != "sha256"} | {"format": 1, "tensors": old}
    assert {
        "exp_avg.output_layer.weight",
        "exp_avg_sq.output_layer.weight",
        "output_layer.weight",
    } <= set(old)
    (checkpoint / "manifest.json").write_text(json.dumps(body | {"sha256": folder.digest(body)}))


def test_checkpoint_second_format_is_read_and_verified(saved: Path, checkpoint: Path) -> None:
    """Read the second format: a hash of each entry, without blocks."""
    import hashlib

    from safetensors import safe_open
    from safetensors.torch import save_file

    from mtrain.ckpt import folder
    from mtrain.ckpt.store import Checkpoint

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in (name for name in manifest["files"] if name.endswith(".safetensors")):
        path = checkpoint / name
        with safe_open(path, framework="pt") as file:
            held = {entry: file.get_tensor(entry) for entry in file.keys()}  # noqa: SIM118
        hashed = {
            entry: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            for entry, tensor in held.items()
        }
        save_file(held, path, metadata={"sha256": json.dumps(hashed)})
        data = path.read_bytes()
        header = data[: 8 + int.from_bytes(data[:8], "little")]
        manifest["files"][name] = {
            "bytes": len(data),
            "header_sha256": hashlib.sha256(header).hexdigest(),
        }
    body = {k: v for k, v in manifest.items() if k != "sha256"} | {"format": 2}
    (checkpoint / "manifest.json").write_text(json.dumps(body | {"sha256": folder.digest(body)}))
    old = whole_tensors(checkpoint)
    new = whole_tensors(saved)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[key], tensor) for key, tensor in new.items())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptData, match=path.name):
        Checkpoint.open(checkpoint)


HEADER_OF_FORMAT_3 = (
    r'{"__metadata__":{"sha256_of_blocks":"{\"block_bytes\": 262144, \"entries\": {\"model/w@0\": '
    r"\"8a39d2abd3999ab73c34db2476849cddf303ce389b35826850f9a700589b4a90bb69c13592b60b52ac3e7fdf1af"
    r"af808d941b727bc7b5b6c34c57720feb0e45b\", \"rank/rng/torch\": \"054edec1d0211f624fed0cbca9d4f9"
    r'400b0e491c43742af2c5b0abebf0c990d8\"}}"},"model/w@0":{"dtype":"F32","shape":[70000],"data_of'
    r'fsets":[0,280000]},"rank/rng/torch":{"dtype":"U8","shape":[4],"data_offsets":[280000,280004]'
    r"}}"
)
MANIFEST_OF_FORMAT_3 = (
    '{"format":3,"step":7,"ranks":1,"state":{"weights_only":true},"tensors":{"model/w":{"shape":[7'
    '0000],"dtype":"float32","pieces":[{"file":"rank_00000.safetensors","entry":"model/w@0","offset'
    '":[0],"shape":[70000],"flat":null}]}},"files":{"rank_00000.safetensors":{"bytes":280476,"heade'
    'r_sha256":"dffcf7ac1210f56cd9be150d6fe8f796563c8cf16164169959e82109f22bb7cc"},"run.yaml":{"byt'
    'es":5,"sha256":"37b128c59f1f5097f73f82691cb519f1f568667faab5ced1b4ab979d36837eae"}},"sha256":"'
    '7e2d3591b010f927146a2df7597198302f1ce0b89b521f3c8b2078bfbc280570"}'
)
"""A checkpoint of zeros and of a generator's bytes 0 to 3, as the last release of format 3 wrote
it.
"""


def test_checkpoint_third_format_is_read_and_verified(tmp_path: Path) -> None:
    from mtrain.ckpt.store import Checkpoint

    path = tmp_path / "step_00000007"
    path.mkdir()
    header = HEADER_OF_FORMAT_3.encode()
    data = len(header).to_bytes(8, "little") + header + bytes(280000) + bytes(range(4))
    (path / "rank_00000.safetensors").write_bytes(data)
    (path / "manifest.json").write_text(MANIFEST_OF_FORMAT_3)
    (path / "run.yaml").write_text("a: 1\n")
    opened = Checkpoint.open(path)
    assert torch.equal(opened.whole("model/w"), torch.zeros(70_000))
    assert opened.rank_tensors(0)["rng/torch"].tolist() == [0, 1, 2, 3]
    # a bit of the second block of the first entry
    (path / "rank_00000.safetensors").write_bytes(data[:-100] + b"\1" + data[-99:])
    damaged = Checkpoint.open(path, verify=False)
    with pytest.raises(CorruptData, match=r"rank_00000.* the sha256 of model/w@0 differs"):
        damaged.whole("model/w")


def test_checkpoint_first_format_is_read_and_verified(
    saved: Path, checkpoint: Path, tmp_path: Path
) -> None:
    from mtrain.ckpt.export import export, read
    from mtrain.ckpt.store import Checkpoint

    _as_format_1(checkpoint)
    old = whole_tensors(checkpoint)
    new = whole_tensors(saved)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[key], tensor) for key, tensor in new.items())
    export(Checkpoint.open(checkpoint), tmp_path / "out")
    assert {f"model/{name}" for name, _ in read(tmp_path / "out")} == {
        key for key in new if key.startswith("model/")
    }
    run = tiny_run(ranks=2, distributed_optimizer=True)
    run_ranks(2, lambda: train_steps(run, 1, load_from=checkpoint))
    shard = checkpoint / "rank_00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(CorruptData, match=shard.name):
        Checkpoint.open(checkpoint, verify=False).rank_tensors(1)


def test_checkpoint_unknown_state_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    from mtrain.ckpt import folder
    from mtrain.ckpt.export import export
    from mtrain.ckpt.store import Checkpoint

    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["tensors"] = {
        k.replace("exp_avg_sq", "second_order"): v for k, v in manifest["tensors"].items()
    }
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    file.write_text(json.dumps(body | {"sha256": folder.digest(body)}))
    weights = sum(key.startswith("model/") for key in manifest["tensors"])
    assert export(Checkpoint.open(checkpoint), tmp_path / "out").tensors == weights


def test_checkpoint_reads_bypass_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job() -> tuple[list[str], list[str]]:
        synced = []
        entries = []
        real = os.fsync

        def noted(fd: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            synced.append(path.name)
            entries.extend(str(p.name) for p in path.iterdir()) if path.is_dir() else None
            real(fd)

        os.fsync = noted  # type: ignore[assignment]
        train_steps(tiny_run(), 0, save_to=tmp_path / "checkpoints")
        os.fsync = real
        return synced, entries

    synced, entries = run_ranks(1, job)[0]
    assert {"run.yaml", "manifest.json", "rank_00000.safetensors"} <= set(synced)
    assert {
        "run.yaml",
        "manifest.json",
        "rank_00000.safetensors",
        "step_00000000",
        "checkpoints",
    } <= set(entries)
