"""The reward of a server: limits, repetitions with one id, and replies that do not count."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mtrain.train.rewards import Sampled
from mtrain.train.rewards.http import VARIABLE, reward
from mtrain.train.rollouts.http_json import ServerFault
from mtrain.train.rollouts.judges import Judges

SECRET = "a-secret-key"
REPLIES: dict[str, Any] = {
    "none": {"reward": None},
    "text": {"reward": "1"},
    "true": {"reward": True},
    "other": {"id": "0" * 32},
    "infinite": {"reward": float("inf")},
}


class Judge(BaseHTTPRequestHandler):
    """A judge that gives the length of an answer, or fails as the answer says."""

    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.seen.append((self.path, dict(self.headers), body))
        kind = body["answer"]
        found = {"id": body["id"], "reward": len(kind)} | REPLIES.get(kind, {})
        status = 200
        data = json.dumps(found).encode()
        if kind == "busy" and len(server.seen) < 3:
            status = 503
        if kind == "refused":
            status = 403
            data = str(self.headers["Authorization"]).encode()
        if kind == "long":
            data = b" " * (2 << 20)
        if kind == "slow":
            server.ended.wait(20)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def judge() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    server.seen = []
    server.ended = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/judge/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


def asked(url: str, text: str, seconds: float = 2.0) -> Sampled:
    settings = {"reward_url": url, "reward_seconds": seconds}
    record = {"prompt": "2 + 2", "answer": "4", "level": 3}
    return Sampled(text, record, 3, 8, True, settings)


def test_http_reward_repeats_with_one_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    with judge() as server:
        assert reward(asked(server.url, "busy")) == 4.0
        paths, headers, bodies = zip(*server.seen, strict=True)
    assert paths == ("/judge/v1",) * 3
    assert {body["id"] for body in bodies} == {headers[0]["Idempotency-Key"]}
    assert headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert bodies[0]["prompt"] == "2 + 2"
    assert bodies[0]["columns"] == {"answer": "4", "level": 3}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("none", "no number as reward: None"),
        ("text", "no number as reward: '1'"),
        ("true", "no number as reward: True"),
        ("other", "the id of another request"),
        ("long", "more than 1048576 bytes"),
        ("refused", r"status 403: Bearer \*\*\*"),
    ],
)
def test_http_reward_wrong_reply_is_named(
    text: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    with judge() as server, pytest.raises(ServerFault, match=why):
        reward(asked(server.url, text, 0.3))


@pytest.mark.full
def test_http_reward_failures_count_in_processes() -> None:
    judges = Judges(2, seconds=1.0, memory_gib=2.0)
    try:
        with judge() as server:
            texts = ["good", "slow", "infinite", "none"]
            rows = judges.verdicts(["http"], [asked(server.url, text, 1.0) for text in texts])
            gone = server.url
        rows += judges.verdicts(["http"], [asked(gone, "good", 1.0)])
    finally:
        judges.close()
    found = [row[0] for row in rows]
    assert [verdict.value for verdict in found[:1]] == [4.0]
    for verdict, why in zip(
        found[1:],
        ("in time|more than 1 s", "returned inf", "no number", "nothing listens"),
        strict=True,
    ):
        assert any(part in verdict.why for part in why.split("|")), verdict
