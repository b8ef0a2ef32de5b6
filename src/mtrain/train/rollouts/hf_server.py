"""A server of rollouts that samples with transformers, in its own process: the oracle of tests.

It computes every token of a text anew and keeps no keys and values, so it is slow. Requests whose
texts have the same length are computed together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mtrain import strict_json
from mtrain.errors import TrainingError
from mtrain.processes import die_with
from mtrain.train.generate.request import Sampling

LOAD = "/load"
"""Route that reads weights: `path` of a folder and the `version` to report."""
MODEL = "policy"
"""Name of the only model."""


def begun() -> tuple[subprocess.Popen[bytes], str]:
    """Start the process, which ends with this one; return it and its URL.

    Raises:
        TrainingError: it ends before it listens.
    """
    command = [sys.executable, "-m", "mtrain.train.rollouts.hf_server", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    port = process.stdout.readline().decode().strip()
    if not port:
        process.kill()
        process.wait()
        text = "rollout.engine=transformers: cannot sample answers because the process of"
        raise TrainingError(f"{text} transformers ended at its start; its output says why")
    return process, f"http://127.0.0.1:{port}"


class Text:
    """A request, and the text as far as it was sampled."""

    def __init__(self, body: dict[str, Any]) -> None:
        import torch

        self.body = body
        self.ids: list[int] = list(body["prompt"])
        self.values: list[float] = []
        self.generator = torch.Generator().manual_seed(body["seed"])
        names = ("temperature", "top_k", "top_p", "min_p", "reports")
        self.sampling = Sampling(body["max_tokens"], **{name: body[name] for name in names})
        self.among: list[list[int]] = []
        self.answer: Future[dict[str, Any]] = Future()

    @property
    def added(self) -> list[int]:
        """Return the sampled tokens."""
        return self.ids[len(self.ids) - len(self.values) :]

    def add(self, logits: Any, version: str) -> bool:
        """Draw a token from logits [vocabulary]; return whether it ends the text, and answer."""
        from mtrain.train.generate.sampling import draw, draw_among

        if self.sampling.reports:
            token, value, ids = draw_among(logits, self.sampling, self.generator)
            self.among.append(ids)
        else:
            token, value = draw(logits, self.sampling, self.generator)
        self.ids.append(token)
        self.values.append(value)
        ends = token in self.body["stop_token_ids"]
        if not ends and len(self.values) < self.sampling.tokens:
            return False
        choice = {
            "token_ids": self.added,
            "prompt_token_ids": self.body["prompt"],
            "finish_reason": "stop" if ends else "length",
            "logprobs": {"token_logprobs": self.values},
            "among": self.among,
        }
        name = self.body["request_id"]
        self.answer.set_result({"id": name, "choices": [choice], "weight_version": version})
        return True


class Sampler(threading.Thread):
    """The thread that computes: requests join between two tokens."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.asked: SimpleQueue[Text | tuple[dict[str, Any], Future[None]]] = SimpleQueue()
        self.texts: list[Text] = []
        self.model: Any = None
        self.version = ""

    def run(self) -> None:
        """Compute until the process ends."""
        while True:
            self._join()
            try:
                self._step()
            except Exception as error:
                for text in self.texts:
                    text.answer.set_exception(error)
                self.texts = []

    def _join(self) -> None:
        """Take what was requested, and wait for it if there is nothing to do."""
        while True:
            try:
                asked = self.asked.get(block=not self.texts)
            except Empty:
                return
            if isinstance(asked, Text):
                self.texts.append(asked)
                continue
            body, loaded = asked
            try:
                self._load(Path(body["path"]), body["version"])
                loaded.set_result(None)
            except Exception as error:
                loaded.set_exception(error)

    def _load(self, folder: Path, version: str) -> None:
        from transformers import AutoModelForCausalLM

        kinds = {"attn_implementation": "eager", "local_files_only": True}
        found = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", trust_remote_code=False, **kinds
        )
        self.model = found.eval()
        self.version = version

    def _step(self) -> None:
        """Read the shortest texts, and draw a token of each."""
        import torch

        if not self.texts:
            return
        shortest = min(len(text.ids) for text in self.texts)
        group = [text for text in self.texts if len(text.ids) == shortest]
        with torch.inference_mode():
            ids = torch.tensor([text.ids for text in group])
            logits = self.model(input_ids=ids).logits[:, -1].float()
        rows = zip(group, logits, strict=True)
        ended = {id(text) for text, row in rows if text.add(row, self.version)}
        self.texts = [text for text in self.texts if id(text) not in ended]


def handler_of(sampler: Sampler) -> type[BaseHTTPRequestHandler]:
    """Return a handler of requests that gives them to a sampler."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Write nothing."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = 200
            try:
                if self.path == LOAD:
                    loaded: Future[None] = Future()
                    sampler.asked.put((body, loaded))
                    loaded.result()
                    found: dict[str, Any] = {}
                else:
                    text = Text(body)
                    sampler.asked.put(text)
                    found = text.answer.result()
            except Exception as error:
                status = 400
                found = {"error": f"{type(error).__name__}: {error}"}
            data = strict_json.dumps(found).encode()
            # A client that waited long enough has gone.
            with suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

    return Handler


class Listener(ThreadingHTTPServer):
    """A listener for many connections at once."""

    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    """Serve until the process that is the first argument ends; write the port first."""
    die_with(int(sys.argv[1]))
    out = os.dup(1)
    # What a library prints is not the port.
    os.dup2(2, 1)
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sampler = Sampler()
    sampler.start()
    listener = Listener(("127.0.0.1", 0), handler_of(sampler))
    os.write(out, f"{listener.server_address[1]}\n".encode())
    listener.serve_forever()


if __name__ == "__main__":
    main()
