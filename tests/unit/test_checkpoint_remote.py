"""Checkpoints in an object store, fsspec's `memory://`: no partial or altered one is taken for
whole, whatever fails on the way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mtrain.ckpt import folder
from mtrain.ckpt.remote import transfer
from mtrain.ckpt.remote.place import OWNER, Place
from mtrain.ckpt.retention import Policy
from mtrain.cli.main import main
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, CorruptData
from tests.support.configs import LAPTOP, tiny
from tests.support.saved import committed

URL = "memory://bucket/run"
STEP_1 = f"{URL}/step_00000001"
SHARDS = [folder.shard_name(rank) for rank in (0, 1)]
FILES = {*SHARDS, "run.yaml", "manifest.json"}


@pytest.fixture
def run() -> RunConfig:
    sizes = {"num_layers": 1, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 128}
    model = {f"model__{key}": value for key, value in sizes.items()}
    return resolve(tiny(**model, parallel__tp=2, parallel__ranks=2), LAPTOP)


@pytest.fixture
def saved(run: RunConfig, tmp_path: Path) -> Path:
    return committed(run, tmp_path / "runs/a/checkpoints")


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, words)]) == code
    found = capsys.readouterr()
    return found.out + found.err


def failing_at(monkeypatch: pytest.MonkeyPatch, n: int, *, cut: bool) -> None:
    """Let the n-th request that writes fail, either before or after a part was written."""
    calls = iter(range(1000))
    put = MemoryFileSystem.put_file
    pipe = MemoryFileSystem.pipe_file

    def fails() -> bool:
        return next(calls) == n

    def put_file(self: Any, source: str, path: str, **more: Any) -> None:
        if not fails():
            put(self, source, path, **more)
            return
        if cut:
            pipe(self, path, Path(source).read_bytes()[:100])
        raise OSError("https://signed.example/?token=secret")

    def pipe_file(self: Any, path: str, data: bytes, **more: Any) -> None:
        if fails():
            raise OSError("https://signed.example/?token=secret")
        pipe(self, path, data, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)


@pytest.mark.parametrize("cut", [False, True])
def test_remote_failed_upload_is_no_checkpoint(
    cut: bool, store: Any, saved: Path, tmp_path: Path
) -> None:
    for n in range(len(FILES)):
        if store.exists("/bucket"):
            store.rm("/bucket", recursive=True)
        with pytest.MonkeyPatch.context() as patch:
            failing_at(patch, n, cut=cut)
            with pytest.raises(BadEnvironment) as caught:
                transfer.upload(saved, Place(STEP_1))
            assert "secret" not in str(caught.value)
            assert "OSError" in str(caught.value)
        assert Place(URL).committed() == []
        assert Place(URL).newest() is None
        with pytest.raises(CorruptData, match="not a committed checkpoint"):
            transfer.download(Place(STEP_1), tmp_path / "out")
        assert not (tmp_path / "out").exists()
    # The last try came as far as the manifest.
    sent = transfer.upload(saved, Place(STEP_1))
    assert (sent.files, sent.present) == (1, len(FILES) - 1)
    assert transfer.verified(Place(STEP_1)).damage == ()


def test_remote_silently_cut_object_is_not_committed(
    store: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(self: Any, source: str, path: str, **more: Any) -> None:
        self.pipe_file(path, Path(source).read_bytes()[:100])

    monkeypatch.setattr(MemoryFileSystem, "put_file", cut)
    with pytest.raises(BadEnvironment, match="has 100 bytes after its upload"):
        transfer.upload(saved, Place(STEP_1))
    assert Place(URL).committed() == []


def test_remote_second_upload_sends_what_is_missing(
    store: Any, saved: Path, tmp_path: Path
) -> None:
    place = Place(STEP_1)
    assert transfer.upload(saved, place).files == len(FILES)
    assert transfer.upload(saved, place).files == 0
    store.rm(f"{STEP_1}/{SHARDS[1]}")
    sent = transfer.upload(saved, place)
    assert (sent.files, sent.nbytes) == (1, (saved / SHARDS[1]).stat().st_size)
    # The file of another step has the same size.
    other = bytearray((saved / SHARDS[0]).read_bytes())
    other[60] ^= 1
    store.pipe_file(f"{STEP_1}/{SHARDS[0]}", bytes(other))
    assert transfer.upload(saved, place).files == 1
    transfer.download(place, tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == FILES
    for name in FILES:
        assert (tmp_path / "out" / name).read_bytes() == (saved / name).read_bytes()


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [_cut, _flipped])
@pytest.mark.parametrize("name", sorted(FILES))
def test_remote_altered_object_is_named_and_refused(
    name: str,
    change: Any,
    store: Any,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    transfer.upload(saved, Place(STEP_1))
    store.pipe_file(f"{STEP_1}/{name}", change(store.cat_file(f"{STEP_1}/{name}")))
    with pytest.raises(CorruptData, match=name):
        transfer.download(Place(STEP_1), tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == []
    assert f"{STEP_1}/{name}" in said(capsys, "verify", URL, code=4)


def test_remote_commands_take_addresses(
    store: Any, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert STEP_1 in said(capsys, "copy", saved, URL)
    store.pipe_file(f"{URL}/step_00000002/{SHARDS[0]}", b"partial")
    rows = json.loads(said(capsys, "list", URL, "--json"))["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(1, "complete"), (2, "not committed")]
    local = json.loads(said(capsys, "list", saved.parent, "--json"))["checkpoints"]
    assert rows[0] == local[0]
    facts = json.loads(said(capsys, "inspect", URL, "--json"))
    here = json.loads(said(capsys, "inspect", saved, "--json"))
    assert facts | {"checkpoint": ""} == here | {"checkpoint": ""}
    assert "as it was written" in said(capsys, "verify", URL)
    assert "as it was written" in said(capsys, "copy", URL, tmp_path / "back")
    assert "as it was written" in said(capsys, "verify", tmp_path / "back")
    assert "as it was written" in said(capsys, "copy", URL, "memory://bucket/other")
    store.pipe_file(f"{STEP_1}/rank_00007.safetensors", b"")
    assert "rank_00007.safetensors does not belong" in said(capsys, "verify", URL, code=4)


def test_remote_commands_refuse_what_is_no_checkpoint(
    store: Any, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("list", "inspect", "verify"):
        assert "MT502" in said(capsys, word, "memory://bucket/nothing", code=2)
    assert "not a committed" in said(capsys, "verify", f"{URL}/step_00000009", code=4)
    shown = said(capsys, "verify", "s3://key:secret@bucket/run", code=2)
    assert "MT459" in shown
    assert "secret" not in shown
    for wrong in ("ftp://bucket/run", "s3://", "s3://bucket", "s3://bucket/a/../b"):
        assert "MT459" in said(capsys, "list", wrong, code=2)


def test_remote_copy_reads_back_before_it_commits(
    store: Any, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put = MemoryFileSystem.put_file

    def wrong(self: Any, source: str, path: str, **more: Any) -> None:
        put(self, source, path, **more)
        if path.endswith(SHARDS[1]):
            self.pipe_file(path, _flipped(Path(source).read_bytes()))

    monkeypatch.setattr(MemoryFileSystem, "put_file", wrong)
    assert SHARDS[1] in said(capsys, "copy", saved, URL, code=4)
    assert Place(URL).committed() == []
    # The next try finds the header of the right file, and the wrong bytes behind it.
    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    said(capsys, "copy", saved, URL)
    assert transfer.verified(Place(STEP_1)).damage == ()


def test_remote_other_checkpoint_is_never_mixed(
    run: RunConfig, store: Any, saved: Path, tmp_path: Path
) -> None:
    other = committed(run.model_copy(update={"title": "another"}), tmp_path / "b", consumed=7)
    place = Place(STEP_1)
    transfer.upload(saved, place)
    with pytest.raises(ConfigError, match="another checkpoint"):
        transfer.upload(other, place)
    assert transfer.verified(place).damage == ()
    # The run itself saves a step again after it went back: the old manifest goes first.
    with pytest.MonkeyPatch.context() as patch:
        failing_at(patch, 0, cut=True)
        with pytest.raises(BadEnvironment):
            transfer.upload(other, place, replace=True)
    assert place.newest() is None
    transfer.upload(other, place, replace=True)
    assert place.read("manifest.json") == (other / "manifest.json").read_bytes()
    assert transfer.verified(place).damage == ()


def test_remote_marker_of_two_writers_is_created_once(
    store: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = MemoryFileSystem.put_file

    def late(self: Any, source: str, path: str, **more: Any) -> None:
        put(self, source, path, **more)
        # Meanwhile another process commits.
        self.pipe_file(f"{STEP_1}/manifest.json", b"{}")

    monkeypatch.setattr(MemoryFileSystem, "put_file", late)
    with pytest.raises(ConfigError, match="another checkpoint"):
        transfer.upload(saved, Place(STEP_1))


def test_remote_owner_refuses_another_run(store: Any) -> None:
    place = Place(URL)
    place.claim({"id": "1", "run": "runs/a", "host": "here"})
    place.claim({"id": "1", "run": "runs/a", "host": "there"})
    with pytest.raises(ConfigError, match="runs/a of here writes its checkpoints"):
        place.claim({"id": "2", "run": "runs/b", "host": "here"})
    place.claim({"id": "2", "run": "runs/b", "host": "here"}, take_over=True)
    with pytest.raises(ConfigError, match="runs/b"):
        place.claim({"id": "1", "run": "runs/a", "host": "here"})
    assert OWNER not in {one.name for one in place.checkpoints()}


def test_remote_prune_command_needs_a_policy(
    run: RunConfig, store: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        transfer.upload(saved := committed(run, tmp_path / "c", step), Place(URL) / saved.name)
    assert "MT002" in said(capsys, "prune", URL, code=2)
    assert "MT002" in said(capsys, "prune", URL, "keep=1", "keep_best=valid_loss", code=2)
    assert "MT502" in said(capsys, "prune", "memory://bucket/nothing", "keep=1", code=2)
    words = ("prune", URL, "keep=1", "keep_every=2", "--json")
    found = json.loads(said(capsys, *words, "--dry-run"))
    assert (found["checkpoints"], found["deleted"]) == (["step_00000001"], False)
    assert found["bytes"] == sum(Place(STEP_1).sizes().values())
    assert len(Place(URL).committed()) == 3
    assert json.loads(said(capsys, *words))["deleted"] is True
    assert [one.step for one in Place(URL).committed()] == [2, 3]


def test_remote_prune_keeps_what_the_policy_keeps(
    run: RunConfig, store: Any, tmp_path: Path
) -> None:
    for step in range(1, 7):
        saved = committed(run, tmp_path / "c", step)
        transfer.upload(saved, Place(URL) / saved.name)
        shutil.rmtree(tmp_path / "c")
    store.pipe_file(f"{URL}/step_00000000/{SHARDS[0]}", b"of an interrupted upload")
    losses = {1: 3.0, 2: 2.0, 3: 2.5}
    transfer.pruned(Place(URL), Policy(1, 4, "valid_loss"), losses)
    assert [one.step for one in Place(URL).checkpoints()] == [2, 4, 6]
