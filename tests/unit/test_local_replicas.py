"""Copies of local checkpoints on other machines: what is sent, taken, refused and given back."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from mtrain.ckpt import folder, local
from mtrain.ckpt.replication import process, wire
from mtrain.ckpt.replication.process import Replicator, Turns
from mtrain.ckpt.replication.wire import Refused
from mtrain.config.resolve.resolution import resolve
from mtrain.launching.replication import Replication
from tests.faults.promises import Record, measured
from tests.support.configs import LAPTOP, tiny
from tests.support.saved import committed, sign

RUN = resolve(tiny(model__num_layers=1, model__vocab_size=64), LAPTOP)
OWNER = "run-0-0"
TOKEN = "token"
MUTATIONS = 20


def part(place: Path, step: int, machine: int = 0, owner: str = OWNER) -> Path:
    """Return the part of a step that a machine of three has committed."""
    root = place / f"checkpoints_{machine}"
    facts = {"machine": [machine, 3], "local_of": owner}
    return committed(RUN, root, step, **facts)


@contextmanager
def serving(place: Path, machine: int = 1, token: str = TOKEN) -> Iterator[Replicator]:
    """Yield the process of a machine of three, each of which has two copies."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    root = place / f"checkpoints_{machine}"
    one = Replicator(machine, 3, 2, root, OWNER, token, [address] * 3, pause=lambda seconds: None)

    def serve() -> None:
        with listener:
            while not over:
                end, _ = listener.accept()
                one._answer(end, threading.Semaphore())

    over: list[bool] = []
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield one
    over.append(True)
    socket.create_connection(address).close()
    thread.join()


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_replica_is_the_part_and_the_newest_two_stay(tmp_path: Path) -> None:
    there = tmp_path / "there"
    with serving(there) as one:
        for step in (2, 4, 4, 6):
            path = tmp_path / f"checkpoints_0/step_{step:08d}"
            wire.send(one.addresses[1], TOKEN, path if path.exists() else part(tmp_path, step), 0)
    root = there / "replica_0_on_1"
    assert [one.name for one in root.iterdir() if one.name[0] == "."] == []
    assert [one.name for one in folder.folders(root)] == ["step_00000004", "step_00000006"]
    assert files(root / "step_00000006") == files(tmp_path / "checkpoints_0/step_00000006")


def test_replica_file_that_is_there_is_not_sent_again(tmp_path: Path) -> None:
    there = tmp_path / "there"
    with serving(there) as one:
        for step in (2, 4):
            wire.send(one.addresses[1], TOKEN, part(tmp_path, step), 0)
    first, second = (there / f"replica_0_on_1/step_{step:08d}" for step in (2, 4))
    # the tensors of this test are the same in every step
    assert (first / "rank_00000.safetensors").samefile(second / "rank_00000.safetensors")


@pytest.mark.parametrize("machine", [1, pytest.param(2, marks=pytest.mark.full)])
def test_replica_of_strangers_is_refused(machine: int, tmp_path: Path) -> None:
    there = tmp_path / "there"
    mine = part(tmp_path, 2)
    other = part(tmp_path / "other", 2, owner="run-1-1")
    with serving(there, machine) as one:
        address = one.addresses[1]
        with pytest.raises(Refused, match=r"closed|reset"):
            wire.send(address, "guess", mine, 0)
        with pytest.raises(Refused, match="not what was announced"):
            wire.send(address, TOKEN, other, 0)
        with pytest.raises(Refused, match="not what was announced"):
            wire.send(address, TOKEN, mine, 3 - machine)
        for number in (machine, 7, -1):
            with pytest.raises(Refused, match=r"closed|reset"):
                wire.send(address, TOKEN, mine, number)
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(64)
        assert not list(there.glob("replica_*/*"))
        wire.send(address, TOKEN, mine, 0)


def test_replica_is_sent_to_nobody_without_the_token(tmp_path: Path) -> None:
    mine = part(tmp_path, 2)
    heard = []

    def pretend() -> None:
        end, _ = listener.accept()
        with end:
            end.sendall(b"0" * 32 + b"\n")
            heard.append(end.recv(1 << 16))
            end.sendall(b"guess {}\n")
            heard.append(end.recv(1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(Refused, match="not signed"):
            wire.send(listener.getsockname(), TOKEN, mine, 0)
        thread.join()
    assert b"rank_00000" not in b"".join(heard)
    assert TOKEN.encode() not in heard[0]


@pytest.mark.parametrize("name", ["../out", "a/b", "..", "ABOVE/out", "manifest.json"])
def test_replica_file_outside_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    name = name.replace("ABOVE", str(tmp_path))
    mine = part(tmp_path, 2)
    manifest = json.loads((mine / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"].pop("rank_00000.safetensors")
    sign(mine, manifest)
    there = tmp_path / "there"
    with serving(there) as one, pytest.raises(Refused, match="no plain file name"):
        wire.send(one.addresses[1], TOKEN, mine, 0)
    assert [path for path in there.rglob("*") if path.is_file()] == []
    assert not (tmp_path / "out").exists()


def _mutated(path: Path, draw: random.Random) -> str:
    """Damage a file of a part; return its name."""
    file = draw.choice(sorted(path.iterdir()))
    size = file.stat().st_size
    how = draw.choice(("flip", "cut", "longer", "gone"))
    if how == "flip":
        with file.open("r+b") as opened:
            opened.seek(draw.randrange(size))
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 1 << draw.randrange(8)]))
    elif how == "cut":
        os.truncate(file, draw.randrange(size))
    elif how == "longer":
        os.truncate(file, size + draw.randint(1, 9))
    else:
        file.unlink()
    return file.name


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 6))]
)
def test_replica_mutations_are_refused_by_name(
    seed: int, tmp_path: Path, record_property: Record
) -> None:
    draw = random.Random(seed)
    whole = part(tmp_path, 2)
    there = tmp_path / "there"
    with serving(there) as one:
        for number in range(MUTATIONS):
            place = tmp_path / f"{number}/{OWNER}"
            copy = place / "replica_0_on_1/step_00000002"
            shutil.copytree(whole, copy)
            name = _mutated(copy, draw)
            # whoever holds it finds it, and so does whoever it is sent to
            assert name in local.fault_of(copy)
            with pytest.raises(Refused) as refused:
                wire.send(one.addresses[1], TOKEN, copy, 0)
            assert name in str(refused.value)
            shutil.rmtree(place.parent)
    assert not list(there.glob("replica_*/*"))
    measured(record_property, mutations=MUTATIONS, silent=0)


def _killed_at(call: int, work: Callable[[], object]) -> bool:
    """Work in a child that is killed as it is about to make its `call`-th call to the system that
    Python reports; return whether it was.
    """
    pid = os.fork()
    if pid == 0:
        calls = itertools.count(1)

        def hook(event: str, _: object) -> None:
            if event.split(".")[0] in ("open", "os", "shutil", "socket") and next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            with suppress(Refused, OSError):
                work()
        finally:
            os._exit(0)
    return bool(os.waitpid(pid, 0)[1])


@pytest.mark.full
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_replica_kill_points_leave_whole_copies(
    victim: str, tmp_path: Path, record_property: Record
) -> None:
    owned = tmp_path / OWNER
    mine = part(tmp_path, 4)
    part(owned, 2, 0).parent.rename(owned / "replica_0_on_1")
    root = owned / "replica_0_on_1"
    shutil.rmtree(root / "step_00000002")
    killed = True
    points = 0
    while killed:
        points += 1
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            there = Replicator(1, 3, 2, owned / "checkpoints_1", OWNER, TOKEN, [address] * 3)

            def send(address: Any = address, listener: socket.socket = listener) -> None:
                listener.close()
                wire.send(address, TOKEN, mine, 0)

            def take(there: Replicator = there, listener: socket.socket = listener) -> None:
                there._answer(listener.accept()[0], threading.Semaphore())

            other, own = (take, send) if victim == "sender" else (send, take)
            helper = os.fork()
            if helper == 0:
                with suppress(BaseException):
                    other()
                os._exit(0)
            killed = _killed_at(points, own)
            # the other one may still wait for it
            socket.create_connection(address).close()
        os.waitpid(helper, 0)
        for path in folder.committed(root):
            assert local.fault_of(path) == ""
        assert killed or [path.name for path in root.iterdir()] == ["step_00000004"]
        folder.sweep(root)
        assert [path for path in root.iterdir() if path.name != "step_00000004"] == []
        shutil.rmtree(root / "step_00000004", ignore_errors=True)
    assert points > 7
    measured(record_property, kill_points=points - 1)


class Stopped(Exception):
    """The end of a process that would go on for ever."""


def test_replica_steps_are_the_same_on_all_machines(tmp_path: Path) -> None:
    now = [0.0]
    turns = Turns(tmp_path / "checkpoints_0", 3, clock=lambda: now[0])
    assert turns.next(0, 0) == 0
    part(tmp_path, 2)
    assert [turns.next(number, 0) for number in (0, 1, 2)] == [2, 2, 2]
    part(tmp_path, 4)
    part(tmp_path, 6)
    assert [turns.next(0, 2), turns.next(1, 2), turns.next(1, 2)] == [2, 2, 2]
    # the last one has sent it: the newest is next, and none between
    assert [turns.next(2, 2), turns.next(0, 2)] == [6, 6]
    part(tmp_path, 8)
    now[0] = process.SILENT_S - 1
    assert [turns.next(0, 6), turns.next(1, 6)] == [6, 6]
    now[0] += 2
    assert turns.next(0, 6) == 8


def test_replica_sender_holds_its_parts_until_all_have_them(tmp_path: Path) -> None:
    paths = [part(tmp_path, step) for step in (2, 4, 6)]
    turns = iter((2, 2, 4, 6))
    sent = []

    class Sender(Replicator):
        def _turn(self, sent: int) -> int:
            try:
                return next(turns)
            except StopIteration:
                raise Stopped from None

        def _send(self, path: Path, number: int) -> None:
            sent.append((folder.step_of(path), number, [folder.is_read(one) for one in paths]))

    one = Sender(0, 3, 2, paths[0].parent, OWNER, TOKEN, [("", 0)] * 3, pause=lambda seconds: None)
    with pytest.raises(Stopped):
        one.send()
    held = {2: [True, False, False], 4: [True, True, False], 6: [False, True, True]}
    assert sent == [(step, number, held[step]) for step in held for number in (1, 2)]


def test_replica_peer_that_is_dead_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = part(tmp_path, 2)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    one = Replicator(0, 3, 1, mine.parent, OWNER, TOKEN, [address] * 3, pause=lambda seconds: None)
    for _ in range(3):
        one._send(mine, 1)
    (line,) = capfd.readouterr().err.splitlines()
    assert f"of machine 0 is not copied to machine 1 (127.0.0.1:{address[1]}): " in line
    assert "Connection refused" in line


def _given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Replication]]:
    """Return a run folder, and two machines of three, of which machine 1 has a copy of the other's
    part of step 4.
    """
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "run"
    home.mkdir()
    elsewhere = local.Elsewhere({}, 3, lambda home, than: {}, lambda *words: "")
    with local.asking(elsewhere):
        local.begin(home, None, "local")
    place = local.place_of(home, "local", 0)
    assert place is not None
    mine = part(place.root.parent, 4, owner=place.owner)
    copy = local.replica_root(place.root, 0, 1) / mine.name
    copy.parent.mkdir()
    shutil.move(mine, copy)
    return home, [Replication(number, 3, TOKEN) for number in range(2)]


def _taking(home: Path, taker: Replication) -> tuple[threading.Thread, list[str]]:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(taker.take(home, 4)))
    thread.start()
    return thread, found


def test_replica_is_given_back_to_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, (taker, giver) = _given(tmp_path, monkeypatch)
    assert giver.vouch(home, 0, 4) == ""
    assert giver.vouch(home, 2, 4) == "it has no copy of it"
    address: Any = ("127.0.0.1", taker.port)
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"x\n")
        thread, found = _taking(home, taker)
        assert giver.give(home, 0, 4, address) == ""
        thread.join()
    assert found == [""]
    place = local.place_of(home, "local", 0)
    assert place is not None
    assert local.fault_of(place.root / "step_00000004") == ""
    for one in (taker, giver):
        one.close()


def test_replica_that_nobody_gives_back_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, (taker, giver) = _given(tmp_path, monkeypatch)
    monkeypatch.setattr("mtrain.launching.replication.COME_S", 0.05)
    assert taker.take(home, 4) == "nobody has sent it within 0.05 s"
    (copy,) = Path("local").glob("*/replica_0_on_1/*/rank_00000.safetensors")
    os.truncate(copy, 100)
    assert "rank_00000.safetensors has 100 bytes" in giver.vouch(home, 0, 4)
    for one in (taker, giver):
        one.close()
