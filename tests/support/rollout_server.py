"""A server of rollouts in a thread: the routes of vLLM or SGLang, with injected faults.

Its policy is a function of its weights, the prompt and the seed, so tests know each right answer.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

VOCABULARY = 50
ENDS = frozenset({0, 1})
LATE_S = 0.6
"""Delay of a slow answer; clients of tests wait for half of it."""


def policy(weights: str, ids: list[int], seed: int, most: int) -> tuple[list[int], list[float]]:
    """Return the tokens after a prompt, and their log-probabilities."""
    draws = random.Random(repr((weights, ids, seed % 2**31)))
    tokens: list[int] = []
    while len(tokens) < most and not (tokens and tokens[-1] in ENDS):
        tokens.append(draws.randrange(VOCABULARY))
    return tokens, [-draws.random() for _ in tokens]


def digest(folder: Path) -> tuple[str, dict[str, tuple[tuple[int, ...], str]]]:
    """Return a hash of the weights of a folder, and shape and hash of each tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in sorted(index["weight_map"].items()):
        with safe_open(folder / file, "pt") as held:
            tensor = held.get_tensor(name)
        data = tensor.flatten().view(torch.uint8).numpy()
        found[name] = (tuple(tensor.shape), hashlib.sha256(data.tobytes()).hexdigest())
    return hashlib.sha256(repr(found).encode()).hexdigest(), found


class FakeServer:
    """The state of a server."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.weights = "first"
        self.version = "default"
        self.paused = False
        self.tokenizer = 0
        self.faults: list[str] = []
        """Faults of the next requests, one each, or ""."""
        self.always = ""
        """Fault of all requests."""
        self.routes: list[str] = []
        """Routes other than those of samples, in order."""
        self.bodies: list[dict[str, Any]] = []
        """Their bodies."""
        self.got: dict[str, tuple[tuple[int, ...], str]] = {}
        self.older = ("", "")
        """Weights and version before the last push."""
        self.versions: list[str] = []
        """The version of each answer, in order."""
        self.busiest = 0
        self.names: list[str] = []
        self._in_flight = 0
        self._last: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.over = threading.Event()
        self.url = ""

    def fault(self) -> str:
        """Return the fault of this request."""
        with self._lock:
            return self.always or (self.faults.pop(0) if self.faults else "")

    def sample(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        """Return an answer, made wrong by some faults."""
        assert not self.paused
        if self.dialect == "sglang":
            given = body["sampling_params"]
            ids = body["input_ids"]
            name = body["rid"]
            seed = given["sampling_seed"]
            most = given["max_new_tokens"]
            assert given["stop_token_ids"] == sorted(ENDS)
        else:
            ids, name, seed, most = (
                body[key] for key in ("prompt", "request_id", "seed", "max_tokens")
            )
            assert body["return_token_ids"]
            assert body["stop_token_ids"] == sorted(ENDS)
            assert body["model"] == "tiny"
        with self._lock:
            assert name not in self.names
            self.names.append(name)
        weights = "others" if fault == "version" else self.weights
        version = "default" if fault == "version" else self.version
        seen = [*ids[::-1], 7] if fault == "prompt" else ids
        if fault == "older":
            weights, version = self.older
        with self._lock:
            self.versions.append(version)
        tokens, values = policy(weights, seen, seed, most)
        if fault == "logprobs":
            values = values[:-1]
        elif fault == "nan":
            values = [float("nan"), *values[1:]]
        elif fault == "vocabulary":
            tokens = [*tokens[:-1], VOCABULARY]
        elif fault == "short":
            tokens, values = (tokens[:1], values[:1]) if tokens[0] not in ENDS else ([], [])
        elif fault == "after the end":
            tokens = [0, *tokens[: most - 1]]
            values = [-1.0, *values[: most - 1]]
        reason = "stop" if tokens and tokens[-1] in ENDS else "length"
        reason = "abort" if fault == "abort" else reason
        answer: dict[str, Any]
        if self.dialect == "sglang":
            drawn = [[value, token, None] for value, token in zip(values, tokens, strict=False)]
            meta = {"id": name, "prompt_tokens": len(seen), "weight_version": version}
            meta |= {"finish_reason": {"type": reason}, "output_token_logprobs": drawn}
            answer = {"output_ids": tokens, "meta_info": meta}
        else:
            choice = {"token_ids": tokens, "prompt_token_ids": seen, "finish_reason": reason}
            choice["logprobs"] = {"token_logprobs": values}
            answer = {"id": f"cmpl-{name}", "choices": [choice]}
        with self._lock:
            before, self._last = self._last, answer
        return before if fault == "repeated" and before else answer

    def control(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a route that is not one of samples."""
        if path == "/v1/models":
            return {"data": [{"id": "tiny"}]}
        if path == "/tokenize":
            return {"tokens": [ord(c) % VOCABULARY + self.tokenizer for c in body["prompt"]]}
        self.routes.append(path)
        self.bodies.append(body)
        assert not self._in_flight
        if path in ("/pause", "/pause_generation"):
            self.paused = True
        elif path in ("/resume", "/continue_generation"):
            self.paused = False
        elif path == "/collective_rpc":
            assert self.paused
            assert body["method"] == "reload_weights"
            self.weights, self.got = digest(Path(body["kwargs"]["weights_path"]))
        elif path == "/update_weights_from_disk":
            assert self.paused
            if self.always == "refused":
                return {"success": False, "message": "no memory"}
            self.older = (self.weights, self.version)
            self.weights, self.got = digest(Path(body["model_path"]))
            self.version = body["weight_version"]
        else:
            assert path == "/reset_prefix_cache", path
        return {"success": True}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the samples in flight."""
        with self._lock:
            self._in_flight += 1
            self.busiest = max(self.busiest, self._in_flight)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Write nothing."""

        def do_GET(self) -> None:
            self._send(json.dumps(server.control(self.path, {})).encode())

        def do_POST(self) -> None:
            if self.path == "/die" or server.always == "dead":
                server.always = "dead"
                self._send(b"no memory", status=503)
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path not in ("/v1/completions", "/generate"):
                self._send(json.dumps(server.control(self.path, body)).encode())
                return
            fault = server.fault()
            with server.counted():
                data = json.dumps(server.sample(body, fault)).encode()
                if fault == "slow":
                    server.over.wait(LATE_S)
                time.sleep(0.002)
            if fault == "busy":
                self._send(b"later", status=503)
            elif fault == "cut":
                self._send(data[: len(data) // 2], length=len(data))
            elif fault == "half":
                self._send(data[: len(data) // 2])
            else:
                self._send(data)

        def _send(self, data: bytes, status: int = 200, length: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            # A client that waited long enough has gone.
            with suppress(OSError):
                self.wfile.write(data)

    return Handler


@contextmanager
def serving(dialect: str) -> Iterator[FakeServer]:
    """Yield a server that listens, until the end of the block."""
    state = FakeServer(dialect)
    listener = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    # Its threads end with it: later tests fork.
    listener.daemon_threads = False
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{listener.server_address[1]}/v1"
    try:
        yield state
    finally:
        state.over.set()
        listener.shutdown()
        listener.server_close()
        thread.join()
