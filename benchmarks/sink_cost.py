"""The time of a step next to a server that takes everything, refuses, is slow or hangs, and next to
sinks that are full or fail.

    python benchmarks/sink_cost.py [--rounds 7] [--steps 40] [--out FILE] [OVERRIDES ...]

One run trains in this process, on one rank with one thread. In blocks of `--steps` steps it has no
sink or one of a kind, in an order that rotates with each round. Ratios are of medians to those of
the steps without a sink: the CPU seconds of the thread that trains, those of the whole process
(also of the sink's thread), and wall seconds. Servers are processes of their own, to which a sink
posts events over HTTP. At the end, the stream must have every step.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import Process
from pathlib import Path
from typing import Any, ClassVar

from step_overhead import DEFAULTS, circumstances, mtrain_step

from mtrain.events.feed import Feed
from mtrain.events.log import STEP
from mtrain.events.read import Event, events
from mtrain.events.sink import Sink

SLOW_S = 10.0
CLOCKS = {"thread": time.thread_time, "process": time.process_time, "wall": time.perf_counter}


class Good(Sink):
    """A server that takes everything."""

    port: ClassVar[int] = 0

    def send(self, events: Sequence[Event]) -> None:
        """Post events, and wait for the answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=6 * SLOW_S)
        try:
            connection.request("POST", "/", json.dumps(list(events), default=str))
            connection.getresponse().read()
        finally:
            connection.close()


class Refusing(Good):
    """A port on which nothing listens."""


class Slow(Good):
    """A server that takes `SLOW_S` seconds for each request."""


class Hanging(Good):
    """A server that accepts connections and never answers."""


class Full(Sink):
    """A full disk."""

    def send(self, events: Sequence[Event]) -> None:
        """Fail."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Failing(Sink):
    """A library that raises."""

    def send(self, events: Sequence[Event]) -> None:
        """Fail."""
        raise RuntimeError("the library failed")


KINDS: dict[str, type[Sink]] = {
    "good": Good,
    "refusing": Refusing,
    "slow": Slow,
    "hanging": Hanging,
    "full": Full,
    "failing": Failing,
}


@contextmanager
def servers() -> Iterator[None]:
    """Serve the ports of the sinks, until the end."""
    ports = {kind: socket.socket() for kind in (Good, Refusing, Slow, Hanging)}
    for kind, port in ports.items():
        port.bind(("127.0.0.1", 0))
        kind.port = port.getsockname()[1]
        if kind is not Refusing:
            port.listen()
    made = [
        Process(target=serve, args=(ports[kind], seconds), daemon=True)
        for kind, seconds in ((Good, 0.0), (Slow, SLOW_S))
    ]
    for process in made:
        process.start()
    try:
        yield
    finally:
        for process in made:
            process.kill()
        for port in ports.values():
            port.close()


def serve(port: socket.socket, seconds: float) -> None:
    """Answer each request after some seconds."""

    class Answer(BaseHTTPRequestHandler):
        """A request."""

        def do_POST(self) -> None:
            """Take what was posted."""
            self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(seconds)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(port.getsockname(), Answer, bind_and_activate=False)
    server.socket = port
    server.serve_forever()


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", help="keys of the configuration")
    options = parser.parse_args()
    with servers():  # before torch is imported, which its processes do not need
        result = measured(DEFAULTS + options.overrides, options.rounds, options.steps)
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measured(words: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Return the ratios of each kind of sink by clock, and the steps that the stream has."""
    from mtrain import mcore as adapter
    from mtrain.api import load
    from mtrain.devices import registry

    os.environ["OMP_NUM_THREADS"] = "1"
    adapter.install(registry.get("cpu"))
    from mtrain.world.init import joined

    run = load(words).run
    names = ["none", *KINDS]
    seconds = {clock: {name: [] for name in names} for clock in CLOCKS}
    made = 0
    with joined(run) as world, tempfile.TemporaryDirectory() as home:
        step, stop = mtrain_step(run, world, Path(home))
        for _ in range(5):
            step()
        made += 5
        for number in range(rounds):
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                feed = Feed(name, KINDS[name], run, Path(home), 0) if name in KINDS else None
                for _ in range(steps):
                    begun = {clock: now() for clock, now in CLOCKS.items()}
                    step()
                    for clock, now in CLOCKS.items():
                        seconds[clock][name].append(now() - begun[clock])
                made += steps
                if feed is not None:
                    feed.end()
        stop()
        kept = [event["step"] for event in events(Path(home)) if event["kind"] == STEP]
    assert kept == list(range(1, made + 1)), f"the stream has {len(kept)} of {made} steps"
    return {
        **{clock: _ratios(values) for clock, values in seconds.items()},
        "rounds": rounds,
        "steps_of_a_block": steps,
        "steps_in_stream": len(kept),
        "steps_made": made,
        "load_average": os.getloadavg()[0],
        **circumstances(),
    }


def _ratios(values: dict[str, list[float]]) -> dict[str, float]:
    medians = {name: statistics.median(found) for name, found in values.items()}
    ratios = {name: round(medians[name] / medians["none"], 4) for name in KINDS}
    return {"seconds_without": medians["none"], **ratios}


if __name__ == "__main__":
    raise SystemExit(main())
