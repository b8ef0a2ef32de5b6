"""The first machine's launcher and who connects to it: others, strangers, and the same twice."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mtrain.config.resolve.resolution import resolve
from mtrain.errors import BadEnvironment
from mtrain.launching import machines
from mtrain.launching.machines import Director, connected
from mtrain.world.launchers import Launched
from tests.support.configs import LAPTOP, tiny
from tests.support.launched import free_port

RUN = resolve(tiny(parallel__ranks=2, trainer__join_timeout_s=1), LAPTOP)


@pytest.fixture
def director(monkeypatch: pytest.MonkeyPatch) -> Iterator[Director]:
    monkeypatch.setattr(machines, "FAREWELL_S", 0.1)
    place = Launched("job", 0, 2, 0, 1, "127.0.0.1", free_port(), machines=2)
    with Director(place) as one:
        yield one


def test_machines_strangers_and_second_claims_are_sent_away(director: Director) -> None:
    address = ("127.0.0.1", director.place.port)
    second = replace(director.place, rank=1)
    with socket.create_connection(address) as stranger, socket.create_connection(address) as wrong:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wrong.sendall(json.dumps({"machine": 7, "host": "m7"}).encode() + b"\n")
        first = connected(second, 1.0)
        director.begin(RUN, ["run=a.yaml"])
        assert first.receive()[0]["words"] == ["run=a.yaml"]
        assert list(director.peers) == [1]
        # One claims the number that another has, while a third machine is still absent.
        twice = connected(second, 1.0)
        director.place = replace(director.place, size=3)
        assert director._gather(0.2) == [2]
        assert "machine 1 is given twice" in twice.receive()[0]["text"]
        for refused in (stranger, wrong):
            assert refused.recv(1) == b""


def test_machines_absent_machine_is_named(director: Director) -> None:
    with pytest.raises(BadEnvironment, match=r"no process of machine 1 of 0 to 1 came within 1 s"):
        director.begin(RUN, [])


def test_machines_taken_port_is_named(director: Director) -> None:
    with pytest.raises(BadEnvironment, match=f"port {director.place.port} of this machine"):
        Director(director.place).__enter__()


def test_machines_silent_first_machine_is_not_lost(
    director: Director, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "SEND_S", 0.05)
    first = connected(replace(director.place, rank=1), 1.0)
    later = threading.Timer(0.2, director.begin, (RUN, ["run=a.yaml"]))
    later.start()
    assert first.receive()[0]["words"] == ["run=a.yaml"]
    later.join()
