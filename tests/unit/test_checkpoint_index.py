"""The index of a checkpoint of many ranks: in files of groups, of which a reader opens few, and any
fault of one is found and named.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain.ckpt import folder, index
from mtrain.ckpt.index import Index, filled
from mtrain.ckpt.pieces import Region, parts
from mtrain.cli.checkpoint.verdict import answered
from mtrain.cli.main import main
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import CorruptData
from tests.support.configs import LAPTOP, tiny
from tests.support.saved import committed, manifest_of

GROUPS = [f"index_{group:05d}.json" for group in range(4)]


def run_of() -> RunConfig:
    """Return a run whose optimizer's state is in flat parts of eight ranks."""
    small = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 512}
    model = {f"model__{key}": value for key, value in small.items()}
    model["data__tokenizer_vocab_size"] = 512
    layout = {"parallel__tp": 2, "parallel__ranks": 8, "parallel__distributed_optimizer": True}
    return resolve(tiny(**model, **layout), LAPTOP)


@pytest.fixture
def groups_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MOST_WHOLE", 4)
    monkeypatch.setattr(index, "GROUP", 2)


@pytest.fixture
def home(groups_of_two: None, tmp_path: Path) -> Path:
    """Return a run folder with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        path = committed(run_of(), tmp_path / "runs/a/checkpoints", step)
    shutil.copy(path / "run.yaml", tmp_path / "runs/a/run.yaml")
    return tmp_path / "runs/a"


@pytest.fixture
def checkpoint(home: Path) -> Path:
    return home / "checkpoints/step_00000001"


def test_index_of_groups_has_all_pieces(checkpoint: Path) -> None:
    manifest = folder.read_manifest(checkpoint, verify=True)
    expected = manifest_of(run_of())
    assert filled(checkpoint, manifest)["tensors"].keys() == expected["tensors"].keys()
    for key, tensor in filled(checkpoint, manifest)["tensors"].items():
        assert tensor["pieces"] == expected["tensors"][key]["pieces"], key
    assert {*GROUPS, "run.yaml", *expected["files"]} == manifest["files"].keys()
    assert {path.name for path in checkpoint.iterdir()} == {"manifest.json", *manifest["files"]}


def test_index_reader_opens_groups_of_its_elements(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = folder.read_manifest(checkpoint, verify=False)
    opened: list[str] = []
    real = index._bytes_of
    monkeypatch.setattr(
        index, "_bytes_of", lambda path, size: (opened.append(path.name), real(path, size))[1]
    )
    dice = random.Random(0)
    fewest = len(GROUPS)
    for key, tensor in manifest["tensors"].items():
        shape = tuple(tensor["shape"])
        for _ in range(4):
            low = dice.randrange(math.prod(shape))
            high = dice.randrange(low, math.prod(shape)) + 1
            region = Region((0,) * len(shape), shape, (low, high))
            opened.clear()
            pieces = Index(checkpoint, manifest).pieces(key, region)
            list(parts(region, pieces, 1 << 20, key))  # they cover it
            assert len(set(opened)) == len(opened), "a file is read once"
            fewest = min(fewest, len(opened))
    assert fewest == 1


def test_index_small_world_has_no_files_of_groups(tmp_path: Path) -> None:
    path = committed(run_of(), tmp_path)
    manifest = folder.read_manifest(path, verify=True)
    assert not list(path.glob("index_*"))
    assert all(tensor["pieces"] for tensor in manifest["tensors"].values())


def _cut(checkpoint: Path, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _flip(checkpoint: Path, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def _swap(checkpoint: Path, file: Path) -> None:
    other = checkpoint / GROUPS[2]
    mine = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def _of_another_step(checkpoint: Path, file: Path) -> None:
    # of the same size, with hashes of that step's files
    body = json.loads((checkpoint.parent / "step_00000002" / file.name).read_text())
    name = next(iter(body["files"]))
    body["files"][name]["header_sha256"] = body["files"][name]["header_sha256"][::-1]
    file.write_text(json.dumps(body, separators=(",", ":")))


DAMAGE: dict[str, Callable[[Path, Path], None]] = {
    "missing": lambda checkpoint, file: file.unlink(),
    "cut": _cut,
    "flipped": _flip,
    "swapped": _swap,
    "of another step": _of_another_step,
    "a folder": lambda checkpoint, file: (file.unlink(), file.mkdir())[0],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_index_damaged_group_is_named(kind: str, home: Path, checkpoint: Path) -> None:
    before = folder.read_manifest(checkpoint, verify=False)
    file = checkpoint / GROUPS[1]
    DAMAGE[kind](checkpoint, file)
    with pytest.raises(CorruptData, match=GROUPS[1]):
        folder.read_manifest(checkpoint, verify=False)
    # a reader on another rank has the manifest from rank 0
    with pytest.raises(CorruptData, match=GROUPS[1]):
        filled(checkpoint, before)
    found = answered([str(checkpoint)])
    assert found.exit_code == CorruptData.exit_code
    assert any(GROUPS[1] in problem.detail for problem in found.problems)
    assert main(["checkpoint", "verify", str(checkpoint)]) == CorruptData.exit_code


def test_index_foreign_group_is_reported(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(checkpoint / GROUPS[1], checkpoint / "index_00009.json")
    assert main(["checkpoint", "verify", str(checkpoint)]) == CorruptData.exit_code
    assert "index_00009.json does not belong to the checkpoint" in capsys.readouterr().out


def test_index_of_groups_is_read_by_every_command(
    home: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "inspect", str(checkpoint), "--json"]) == 0
    tensors = {one["name"]: one for one in json.loads(capsys.readouterr().out)["tensors"]}
    for key, tensor in manifest_of(run_of())["tensors"].items():
        assert tensors[key]["pieces"] == len(tensor["pieces"]), key
    assert main(["checkpoint", "copy", str(checkpoint), str(tmp_path / "copy")]) == 0
    folder.read_manifest(tmp_path / "copy", verify=True)
    answer = answered([str(home)])
    assert answer.outcome == "same", answer.problems
    assert answer.reading is not None
    assert not answer.reading.resharded


def test_index_of_draft_waits_for_each_rank(groups_of_two: None, tmp_path: Path) -> None:
    def write(rank: int) -> None:
        file = {"name": str(rank), "bytes": 1, "header_sha256": ""}
        index.write(tmp_path, rank, 5, [{"pieces": [], "file": file}])

    leads = {rank: index.of_group(tmp_path, rank, 5) for rank in range(5)}
    assert [rank for rank, awaited in leads.items() if awaited] == [0, 2, 4]
    assert leads[2] is not None
    assert leads[2].missing() == {2, 3}
    for rank in (3, 0, 1, 4):
        write(rank)
    assert leads[2].missing() == {2}
    for rank in (0, 4):
        index.gather(tmp_path, rank, 5)
    assert index.of_all(tmp_path, 5).missing() == {2}
    write(2)
    index.gather(tmp_path, 2, 5)
    assert not index.of_all(tmp_path, 5).missing()
    files = index.merged(tmp_path, 5)["files"]
    assert {name for name in files if not name.startswith("index")} == set("01234")
    assert sorted(path.name for path in tmp_path.iterdir()) == GROUPS[:3]
