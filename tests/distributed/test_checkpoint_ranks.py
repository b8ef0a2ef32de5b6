"""Checkpoints of many ranks: ranks meet over a store, and each one touches only its own files."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import random
import stat
import threading
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mtrain.errors import BadEnvironment, CorruptData, TrainingError
from tests.support.commands import wait_for
from tests.support.forked import run_ranks, run_without_privileges
from tests.support.many_ranks import in_turn, meetings, metadata_calls, on_ranks
from tests.support.patience import patient
from tests.support.runs import tiny_run, train_steps


def flat_shard(
    rank: int, size: int, whole: torch.Tensor, memory: torch.Tensor | None = None
) -> Any:
    """Return the part of a matrix's state that one of `size` data-parallel ranks has."""
    from mtrain.mcore.state.sharding import TensorShard

    n = whole.numel()
    lo = n * rank // size
    hi = n * (rank + 1) // size
    shape = tuple(whole.shape)
    own = whole.reshape(-1)[lo:hi] if memory is None else memory
    return TensorShard("optim/exp_avg/weight", shape, (0,) * len(shape), shape, own, flat=(lo, hi))


def save_part(place: Any, root: Path, whole: torch.Tensor) -> Path:
    """Save a checkpoint as the rank of a place."""
    from mtrain.ckpt import store

    extra = {"rng/torch": torch.arange(4)}
    return store.save(
        root, 1, [flat_shard(place.rank, place.size, whole)], extra, {}, "a: 1\n", place
    )


def saved_by(size: int, root: Path, whole: torch.Tensor) -> Path:
    """Save a checkpoint of `size` ranks."""
    (path,) = set(in_turn(size, lambda place: save_part(place, root, whole)))
    assert isinstance(path, Path), path
    return path


@pytest.mark.full
def test_checkpoint_1024_ranks_make_constant_metadata_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt.store import Checkpoint

    monkeypatch.setattr(os, "fsync", lambda file: None)
    made: dict[int, tuple[float, float]] = {}
    # Both are several groups, each of which merges the index of its 64 ranks.
    for size in (128, 1024):
        whole = torch.arange(4 * size, dtype=torch.float32).view(2, -1)
        with metadata_calls() as saving:
            path = saved_by(size, tmp_path / str(size), whole)

        def load(place: Any, path: Path = path, whole: torch.Tensor = whole) -> None:
            opened = Checkpoint.open_together(path, place)
            own = torch.empty(4)
            opened.load([flat_shard(place.rank, place.size, whole, own)])
            assert own.tolist() == flat_shard(place.rank, place.size, whole).tensor.tolist()
            assert opened.rank_tensors(place.rank)["rng/torch"].tolist() == [0, 1, 2, 3]

        with metadata_calls() as loading:
            assert set(in_turn(size, load)) == {None}
        made[size] = saving.total() / size, loading.total() / size
    (few_saving, few_loading), (many_saving, many_loading) = made.values()
    # More groups need a few calls more, which all their ranks share.
    assert many_saving <= few_saving + 0.1, f"calls of a rank: {made}"
    # of 16 files of an index it reads the one that has its elements
    assert many_loading <= few_loading + 1.1, f"calls of a rank: {made}"
    assert many_saving < 20
    assert many_loading < 4


def test_checkpoint_one_rank_verifies_saved_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from types import SimpleNamespace

    from mtrain.train.hooks import checkpoints

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(checkpoints.ckpt_state, "save", lambda *_: tmp_path)
    said: list[str] = []
    for rank in (0, 1):
        hook = checkpoints.Checkpoints(tmp_path, SimpleNamespace(note=said.append), {})  # type: ignore[arg-type]
        world = SimpleNamespace(is_rank0=rank == 0, rank=rank)
        state = SimpleNamespace(step=3)
        clock = SimpleNamespace(done=lambda bit: None)
        with metadata_calls() as counted:
            hook._save(
                SimpleNamespace(
                    run=None,
                    world=world,
                    state=state,
                    by_time=clock,
                    hooks=SimpleNamespace(state_dict=dict, call=lambda *moment: None),
                )
            )  # type: ignore[arg-type]
        assert (counted.total() > 0) == (rank == 0)
        assert (hook.saved_step, hook.path) == (3, tmp_path)


@pytest.mark.parametrize("grouped", [False, True])
def test_checkpoint_lacking_a_piece_is_not_committed(
    grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import index, store

    if grouped:
        monkeypatch.setattr(index, "MOST_WHOLE", 1)
        monkeypatch.setattr(index, "GROUP", 2)
    whole = torch.arange(32.0).view(2, -1)
    places = meetings(4)

    def save(rank: int) -> None:
        # as if two ranks each left this piece to the other
        shard = dataclasses.replace(flat_shard(rank, 4, whole), primary=rank != 1)
        store.save(tmp_path, 1, [shard], {}, {}, "", places[rank])

    for error in on_ranks(4, save):
        assert isinstance(error, TrainingError)
        assert "the ranks wrote 24 of the 32 elements of optim/exp_avg/weight" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_disk_error_on_one_rank_ends_all_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import store

    whole = torch.arange(32.0).view(2, -1)
    places = meetings(4)

    real = store._begin

    def begun_with_a_fault(*words: Any) -> None:
        real(*words)
        (tmp_path / ".saving-step_00000001/rank_00002.safetensors").mkdir()

    def save(rank: int) -> None:
        store.save(tmp_path, 1, [flat_shard(rank, 4, whole)], {}, {}, "", places[rank])

    monkeypatch.setattr(store, "_begin", begun_with_a_fault)
    errors = on_ranks(4, save)
    assert {type(error) for error in errors} == {TrainingError}
    assert {str(error) for error in errors} == {str(errors[2])}
    assert "rank_00002" in str(errors[0])
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_slow_rank_is_awaited_and_absent_named() -> None:
    places = meetings(3)
    impatient = meetings(3, timeout_s=patient(0.5))

    def late(rank: int) -> str:
        time.sleep(0.2 if rank == 1 else 0.0)
        return str(places[rank].barrier("full" if rank == 2 else ""))

    assert on_ranks(3, late) == ["full"] * 3
    errors = on_ranks(3, lambda rank: None if rank == 1 else impatient[rank].barrier())
    assert "rank 1 did not come" in str(errors[0])
    assert "checkpoint.barrier_timeout_s" in str(errors[2])


@pytest.mark.parametrize("call", ["barrier", "tell"])
def test_checkpoint_waiting_rank_is_not_named_as_missing(call: str) -> None:
    from mtrain.world import stacks

    places = meetings(2)
    seen = []

    def late() -> None:
        time.sleep(0.3)
        seen.append(stacks.is_waiting(stacks.main_frame()))
        places[0].tell("text") if call == "tell" else places[0].barrier()

    thread = threading.Thread(target=late)
    thread.start()
    assert (places[1].tell("") if call == "tell" else places[1].barrier()) == (
        "text" if call == "tell" else ""
    )
    thread.join()
    assert seen == [True]
    assert not stacks.is_waiting(stacks.main_frame())


@pytest.mark.full
def test_checkpoint_store_keys_do_not_accumulate() -> None:
    places = meetings(2)
    sizes = []
    text = os.urandom(
        5 << 20
    ).hex()  # more than a store takes in one message, also when it is compressed
    for _ in range(4):
        told = on_ranks(2, lambda rank: places[rank].tell(text if rank == 0 else ""))
        assert told == [text, text]
        assert on_ranks(2, lambda rank: places[rank].barrier()) == ["", ""]
        sizes.append(places[0].store.num_keys())
    assert sizes == sizes[:1] * 4


def test_checkpoint_tcp_store_takes_large_manifest() -> None:
    from mtrain.ckpt.meeting import Meeting

    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", served.port, is_master=False)
    places = [Meeting(served, 0, 2, 30.0), Meeting(other, 1, 2, 30.0)]
    text = os.urandom(5 << 20).hex()
    assert on_ranks(2, lambda rank: places[rank].tell(text if rank == 0 else "")) == [text, text]


def test_checkpoint_long_save_shows_liveness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mtrain.ckpt import meeting
    from mtrain.world.heartbeat import heartbeat

    monkeypatch.setattr(meeting, "ALIVE_S", 0.01)
    before = heartbeat.ticks
    with meeting.alive(600.0):
        wait_for(lambda: heartbeat.ticks > before + 3)
    with meeting.alive(0.0):
        time.sleep(0.1)
        before = heartbeat.ticks
        time.sleep(0.1)
        assert heartbeat.ticks == before, "a disk that never answers is a hang, too"


@pytest.mark.parametrize("readers", [1, 2, 5, 8, 32])
def test_checkpoint_rank_reads_its_share_for_any_dp(
    readers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import hashes
    from mtrain.ckpt.store import Checkpoint

    monkeypatch.setattr(hashes, "BLOCK_BYTES", 1 << 10, raising=False)
    whole = torch.randn(61, 1000)
    path = saved_by(8, tmp_path, whole)
    headers = sum(file.stat().st_size for file in path.glob("rank_*")) - whole.nbytes
    hashed: list[int] = []

    def noting(real: Any) -> Any:
        def noted(data: Any, *more: Any) -> str:
            hashed.append(memoryview(data).nbytes)
            return str(real(data, *more))

        return noted

    for name in ("hash_bytes", "hash_block"):
        monkeypatch.setattr(hashes, name, noting(getattr(hashes, name)))
    for rank in range(readers):
        hashed.clear()
        hashes._sound.clear()  # what is read is hashed
        own = torch.empty(flat_shard(rank, readers, whole).tensor.numel())
        Checkpoint.open(path, verify=False).load([flat_shard(rank, readers, whole, own)])
        assert torch.equal(own, flat_shard(rank, readers, whole).tensor)
        # blocks of pieces of which only some numbers are its own
        ends = 2 * 1024 * (8 // readers + 2)
        assert own.nbytes <= sum(hashed) <= own.nbytes + headers + ends, (
            rank,
            sum(hashed),
            own.nbytes,
        )


def test_checkpoint_rank_holds_few_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import hashes
    from mtrain.ckpt.store import Checkpoint

    whole = torch.randn(4, 64)
    path = saved_by(16, tmp_path, whole)
    monkeypatch.setattr(hashes.resource, "getrlimit", lambda _: (20, 20))
    opened = Checkpoint.open(path, verify=False)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert torch.equal(opened.whole("optim/exp_avg/weight"), whole)
    assert len(os.listdir("/proc/self/fd")) - before <= 10
    del opened
    assert len(os.listdir("/proc/self/fd")) <= before


def test_checkpoint_box_is_assembled_from_any_pieces() -> None:
    from mtrain.ckpt.pieces import Region, parts

    dice = random.Random(0)
    for _ in range(200):
        shape = tuple(dice.randrange(1, 7) for _ in range(dice.randrange(1, 4)))
        whole = torch.arange(math.prod(shape)).view(shape)
        pieces: list[Any] = []
        data: dict[str, torch.Tensor] = {}
        for number, (offset, size) in enumerate(cut_in_boxes(shape, dice)):
            box = (
                whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
                .reshape(-1)
                .clone()
            )
            bounds = sorted(
                {
                    0,
                    box.numel(),
                    *(dice.randrange(box.numel() + 1) for _ in range(dice.randrange(3))),
                }
            )
            for lo, hi in pairwise(bounds):
                name = f"{number}@{lo}"
                flat = [lo, hi] if len(bounds) > 2 else None
                data[name] = box[lo:hi]
                pieces.append(
                    {"entry": name, "offset": list(offset), "shape": list(size), "flat": flat}
                )
        lows = [dice.randrange(n) for n in shape]
        size = tuple(dice.randrange(1, n - lo + 1) for n, lo in zip(shape, lows, strict=True))
        wanted = whole[tuple(slice(o, o + n) for o, n in zip(lows, size, strict=True))].reshape(-1)
        lo = dice.randrange(wanted.numel())
        flat_range = (lo, dice.randrange(lo, wanted.numel()) + 1) if dice.random() < 0.5 else None
        region = Region(tuple(lows), size, flat_range)
        out = torch.full((region.size,), -1)
        dice.shuffle(pieces)
        for part in parts(region, pieces, dice.choice([1, 3, 100]), "it"):
            found = data[part.piece["entry"]][part.start : part.stop]
            out.as_strided(part.shape, part.here, part.at).copy_(
                found.as_strided(part.shape, part.there)
            )
        assert torch.equal(out, wanted[slice(*flat_range)] if flat_range else wanted)
        lacking = [p for p in pieces if int(out[0]) not in data[p["entry"]].tolist()]
        with pytest.raises(CorruptData, match="cover"):
            list(parts(region, lacking, 100, "it"))


def cut_in_boxes(
    shape: tuple[int, ...], dice: random.Random
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the offset and shape of boxes that make up a tensor."""
    axes = []
    for n in shape:
        bounds = sorted({0, n, dice.randrange(n + 1)})
        axes.append([(lo, hi - lo) for lo, hi in pairwise(bounds)])
    return [(tuple(o for o, _ in box), tuple(n for _, n in box)) for box in product(*axes)]


def test_checkpoint_files_follow_umask(
    tmp_path: Path,
) -> None:
    from mtrain.ckpt import store
    from mtrain.ckpt.contents import Contents
    from mtrain.ckpt.export import export
    from mtrain.ckpt.store import Checkpoint

    before = os.umask(0o002)
    try:
        contents = Contents.of("shard.safetensors", [], {"rng": torch.arange(4)})
        store._written(tmp_path / "shard.safetensors", contents)
        run_ranks(1, lambda: train_steps(tiny_run(), 0, save_to=tmp_path / "saved"))
        checkpoint = tmp_path / "saved/step_00000000"
        export(Checkpoint.open(checkpoint), tmp_path / "whole")
    finally:
        os.umask(before)
    files = [tmp_path / "shard.safetensors", *checkpoint.iterdir(), *(tmp_path / "whole").iterdir()]
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        p.name: "0o664" for p in files
    }


@pytest.mark.parametrize(
    "number", [errno.EPERM, errno.EOPNOTSUPP, errno.EIO], ids=errno.errorcode.get
)
def test_checkpoint_unsettable_mode_is_reported_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mtrain import durable
    from mtrain.ckpt import shards

    def refuse(path: Any, mode: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable, "_reported", set())
    monkeypatch.setattr(os, "chmod", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            shards.write(tmp_path / "a", {"a": torch.arange(4)}, {})
        return
    for name in ("a", "b"):
        shards.write(tmp_path / name, {"a": torch.arange(4)}, {})
    assert capsys.readouterr().err.count("cannot change the mode of a file") == 1


def test_checkpoint_equal_modes_are_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mtrain.ckpt import shards

    def refuse(path: Any, mode: int) -> None:
        raise AssertionError("the file already has the requested mode")

    monkeypatch.setattr(os, "chmod", refuse)
    before = os.umask(0o177)  # every file has the mode 600, as on a disk that was mounted so
    try:
        shards.write(tmp_path / "a", {"a": torch.arange(4)}, {})
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["manifest.json", "run.yaml", "rank_00000.safetensors"])
def test_checkpoint_unreadable_file_is_not_damaged(name: str, tmp_path: Path) -> None:
    from mtrain.ckpt import hashes
    from mtrain.ckpt.store import Checkpoint

    path = saved_by(1, tmp_path, torch.arange(8.0).view(2, 4))
    (path / name).chmod(0)
    hashes._sound.clear()

    def refusal() -> tuple[str, str]:
        try:
            Checkpoint.open(path).whole("optim/exp_avg/weight")
        except (BadEnvironment, CorruptData) as error:
            return type(error).__name__, str(error)
        return "", ""

    kind, text = run_without_privileges(refusal)
    assert kind == "BadEnvironment", text
    assert f"{name} cannot be read: permission denied" in text
    assert "chmod" in text
