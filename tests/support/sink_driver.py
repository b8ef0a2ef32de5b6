"""One attempt of a run without training: events go to a sink, and the process may be killed.

    python -m tests.support.sink_driver RUN_FOLDER SINK BEGUN LAST [kill | kill_at_once]

The variable LIBRARIES names a folder of packages, which come behind the installed ones. Step `n`
has the loss `n / 8`, each second step an evaluation with the loss `n`, each third step an alert and
a sample of the memory of two ranks, `n` bytes at the most.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

from mtrain.config.rules import apply
from mtrain.events import feed, log
from mtrain.events.feed import Feed, Mark
from mtrain.events.log import Journal, Writer
from mtrain.train.sinks import sink_class
from tests.support.runs import tiny_run

SECONDS = {"step_s": 0.5, "data_s": 0.1, "forward_backward_s": 0.3, "optimizer_s": 0.1}
WAIT_S = 120.0


def main(home: Path, name: str, begun: int, last: int, kill: str = "") -> None:
    """Make the steps after `begun` up to `last`."""
    run = apply(tiny_run(), {"log.prometheus_port": int(os.environ.get("PORT", "9464"))})
    feed.PAUSE_S = 0.05
    feed.CLOSE_S = WAIT_S
    writer = Writer([Journal(log.next_attempt(home), lambda event: event)])
    writer.put(log.START, begun)
    writer.settle(5)
    one = Feed(name, sink_class(name), run, home, begun)
    for step in range(begun + 1, last + 1):
        values = {"loss": step / 8, "lr": 0.5, "skipped": step == 2, **SECONDS}
        writer.put(log.STEP, step, values=values)
        if step % 2 == 0:
            writer.put(log.EVALUATION, step, values={"valid_loss": float(step)}, seconds=0.25)
            writer.put(log.CHECKPOINT, step, name=f"step_{step}", seconds=0.125)
        if step % 3 == 0:
            writer.put(log.ALERT, step, name="loss", text=f"high at {step}")
            writer.put(log.MEMORY, step, by_rank={"allocated_bytes": [1, step], "x_bytes": [None]})
    writer.settle(5)
    until = time.monotonic() + WAIT_S
    while Mark.read(one.file).step < last and kill != "kill_at_once" and time.monotonic() < until:
        time.sleep(0.05)
    if name == "prometheus" and kill != "kill_at_once":
        with urllib.request.urlopen(f"http://127.0.0.1:{os.environ['PORT']}/metrics") as page:
            print(page.read().decode())
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    writer.put(log.END, last, how="finished")
    writer.close()
    feed.close([one], WAIT_S)


if __name__ == "__main__":
    sys.path.append(os.environ["LIBRARIES"])
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
