"""`checkpoint list`, `inspect`, `verify`, `prune` and `copy`, on checkpoints made without torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mtrain import locks
from mtrain.ckpt import folder
from mtrain.ckpt.retention import Policy, prune, retention
from mtrain.cli.main import main
from mtrain.config.resolve.resolution import resolve
from tests.support.configs import LAPTOP, tiny
from tests.support.forked import run_without_privileges
from tests.support.saved import committed

SHARD = "rank_00000.safetensors"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run folder with checkpoints of steps 1, 2 and 3, of which the run keeps two."""
    monkeypatch.chdir(tmp_path)
    run = resolve(
        tiny(
            model__num_layers=1,
            model__hidden_size=64,
            model__ffn_hidden_size=128,
            model__vocab_size=128,
            parallel__tp=2,
            parallel__ranks=2,
            checkpoint__keep=2,
        ),
        LAPTOP,
    )
    for step in (1, 2, 3):
        path = committed(run, tmp_path / "runs/a/checkpoints", step)
    shutil.copy(path / "run.yaml", tmp_path / "runs/a/run.yaml")
    return Path("runs/a")


def step_of(home: Path, step: int) -> Path:
    return home / "checkpoints" / folder.folder_name(step)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, words)]) == code
    found = capsys.readouterr()
    return found.out + found.err


def test_checkpoint_list_says_which_are_complete(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (step_of(home, 2) / SHARD).unlink()
    (step_of(home, 3) / "manifest.json").unlink()
    (home / "checkpoints/.saving-step_00000004").mkdir()
    rows = json.loads(said(capsys, "list", str(home), "--json"))["checkpoints"]
    assert [row["state"] for row in rows] == [
        "complete",
        "damaged",
        "not committed",
        "not committed",
    ]
    assert [row["layout"] for row in rows[:2]] == ["tp2", "tp2"]
    assert rows[0]["model"] == rows[1]["model"]
    lines = said(capsys, "list", str(home))
    assert f"{SHARD} is missing" in lines


def test_checkpoint_inspect_prints_every_tensor(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(said(capsys, "inspect", str(home), "--json"))
    assert (found["step"], found["format"], found["layout"]["tp"]) == (3, folder.FORMAT, 2)
    table = next(
        one for one in found["tensors"] if one["name"] == "model/embedding.word_embeddings.weight"
    )
    assert (table["shape"], table["bytes"], table["pieces"]) == ([128, 64], 4 * 128 * 64, 2)
    assert len(found["tensors"]) == 27
    assert "9 of exp_avg_sq" in said(capsys, "inspect", str(step_of(home, 1)))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit": (lambda path: _flip(path / SHARD, -1), SHARD),
    "a header": (lambda path: _flip(path / SHARD, 100), SHARD),
    "a cut": (lambda path: os.truncate(path / SHARD, 100), SHARD),
    "a hole": (lambda path: (path / SHARD).unlink(), SHARD),
    "a stranger": (lambda path: _copy(path / SHARD, "rank_00007.safetensors"), "rank_00007"),
    "another run.yaml": (lambda path: _flip(path / "run.yaml", 30), "run.yaml"),
}


def _flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(bytes(content))


def _copy(file: Path, name: str) -> None:
    shutil.copy(file, file.with_name(name))


@pytest.mark.parametrize("name", DAMAGE)
def test_checkpoint_verify_names_the_damaged_file(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, word = DAMAGE[name]
    assert "as it was written" in said(capsys, "verify", str(home))
    damage(step_of(home, 3))
    found = said(capsys, "verify", str(home), code=4)
    assert word in found.splitlines()[0]
    assert "1 fault" in found
    body = json.loads(said(capsys, "verify", str(home), "--json", code=4))
    assert (body["ok"], len(body["damage"])) == (False, 1)


def test_checkpoint_verify_names_every_damaged_file(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        _flip(step_of(home, 3) / folder.shard_name(rank), -1)
    found = said(capsys, "verify", str(home), code=4)
    assert all(folder.shard_name(rank) in found for rank in (0, 1))


def test_checkpoint_words_refuse_what_is_no_checkpoint(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "empty").mkdir()
    for word in ("inspect", "verify"):
        assert "MT502" in said(capsys, word, "nowhere", code=2)
        assert "not a committed checkpoint" in said(capsys, word, str(home / "empty"), code=4)
        assert "MT002" in said(capsys, word, code=2)
    assert "MT502" in said(capsys, "list", "nowhere", code=2)
    assert "MT502" in said(capsys, "prune", str(home / "empty"), code=2)
    assert "MT002" in said(capsys, "copy", str(home), code=2)


def test_checkpoint_verify_unreadable_file_is_of_the_environment(home: Path) -> None:
    (step_of(home, 3) / SHARD).chmod(0)
    assert run_without_privileges(lambda: main(["checkpoint", "verify", str(home)])) == 3


def test_checkpoint_prune_dry_run_deletes_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, "prune", str(home), "--dry-run")
    assert "step_00000001: would be deleted" in found
    assert len(folder.committed(home / "checkpoints")) == 3
    assert said(capsys, "prune", str(home), "--dry-run", "keep=null").count("deleted") == 1


def test_checkpoint_prune_deletes_what_keep_says(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "prune", str(home))
    assert [folder.step_of(p) for p in folder.committed(home / "checkpoints")] == [2, 3]
    said(capsys, "prune", str(home), "keep=1")
    assert [p.name for p in (home / "checkpoints").iterdir()] == ["step_00000003"]


def test_checkpoint_prune_keeps_what_others_need(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = home.parent / "b"
    other.mkdir()
    path = step_of(home.absolute(), 1)
    (other / "run.yaml").write_text(f"checkpoint:\n  init_from: {path}\n")
    assert "stays, another run starts from it" in said(capsys, "prune", str(home))
    assert step_of(home, 1).exists()
    (other / "run.yaml").unlink()
    with folder.reading(step_of(home, 1)):
        assert "stays, a process reads it" in said(capsys, "prune", str(home))
        prune(home / "checkpoints", Policy(2))
        assert step_of(home, 1).exists()
    prune(home / "checkpoints", Policy(2))
    assert not step_of(home, 1).exists()


def test_checkpoint_prune_keeps_the_only_complete_one(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (2, 3):
        (step_of(home, step) / SHARD).unlink()
    assert "stays, it is the only complete one" in said(capsys, "prune", str(home))
    assert step_of(home, 1).exists()


def test_checkpoint_prune_leaves_a_running_run_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    descriptor = os.open(home / ".lock", os.O_RDWR | os.O_CREAT)
    held = locks.lock(descriptor, home / ".lock")
    assert "MT501" in said(capsys, "prune", str(home), code=2)
    assert len(folder.committed(home / "checkpoints")) == 3
    held.release()
    os.close(descriptor)


def test_checkpoint_retention_keeps_newest_and_reasons() -> None:
    paths = [Path(f"step_{n:08d}") for n in range(4)]
    found = retention(paths, Policy(1), complete=paths, read=paths[:1], named=paths[1:2])
    assert [kept.path for kept in found.newest] == [paths[3]]
    assert found.doomed == (paths[2],)
    assert [kept.path for kept in found.kept] == paths[:2]
    assert retention(paths, Policy(None), complete=[]).doomed == ()
    assert retention(paths, Policy(1), complete=paths[:2]).doomed == (paths[0], paths[2])


def test_checkpoint_copy_is_whole_and_new(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "as it was written" in said(capsys, "copy", str(home), "archive/old")
    copied = {p.name: p.read_bytes() for p in Path("archive/old").iterdir()}
    assert copied == {p.name: p.read_bytes() for p in step_of(home, 3).iterdir()}
    assert "MT507" in said(capsys, "copy", str(home), "archive/old", code=2)


def test_checkpoint_copy_of_damage_leaves_nothing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _flip(step_of(home, 3) / SHARD, -1)
    found = said(capsys, "copy", str(home), "archive", code=4)
    assert str(step_of(home, 3) / SHARD) in found
    assert not Path("archive").exists()
    assert not list(Path().glob(".copying*"))


@pytest.mark.parametrize("name", ["rank_00007.safetensors", "notes.txt", ".metadata"])
def test_checkpoint_verify_names_a_further_file(
    name: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (step_of(home, 3) / name).write_bytes(b"of somebody else")
    assert f"{name} does not belong to the checkpoint" in said(capsys, "verify", str(home), code=4)


class Killed(BaseException):
    """The end of a process between two calls."""


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_checkpoint_saved_again_replaces_the_old_one_whole(
    renames: int, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = step_of(home, 3)
    old = folder.parse_manifest(final)
    draft = folder.draft_of(final.parent, 3)
    shutil.copytree(final, draft)
    body = {key: value for key, value in old.items() if key not in ("format", "sha256")}
    body["state"] = body["state"] | {"schedule_steps": 99}
    rename = Path.rename
    made: list[None] = []

    def renamed(self: Path, target: Path) -> Path:
        if len(made) == renames:
            raise Killed
        made.append(None)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renamed)
        if renames < 2:
            with pytest.raises(Killed):
                folder.commit(draft, final, body)
        else:
            folder.commit(draft, final, body)
    folder.sweep(final.parent)
    expected = 99 if renames == 2 else old["state"]["schedule_steps"]
    found = folder.read_manifest(final, verify=True)
    assert found["state"]["schedule_steps"] == expected
    assert all(path.name.startswith("step_") for path in final.parent.iterdir())
