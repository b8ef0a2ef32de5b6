"""The process of a machine that keeps copies of local checkpoints on other machines:
`python -m mtrain.ckpt.replication.process`.

It needs no torch. It sends the part that this machine's ranks have committed to the next machines
of a ring, and takes theirs. No step waits for it, and it ends with the launcher that started it.

Machines differ in speed, and a restart needs the parts of one step. So all of them send the same
steps: the process of machine 0 names the newest one once every machine has sent the one before.
Each holds its own parts of both meanwhile, because the ranks delete older ones.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder
from mtrain.ckpt.local import replica_root
from mtrain.ckpt.replication import wire
from mtrain.ckpt.replication.wire import Line, Refused
from mtrain.errors import say_page, warn
from mtrain.processes import die_with, guarded

POLL_S = 0.5
"""Seconds between two looks for a new step."""
AGAIN_S = 5.0
"""Seconds between two tries to reach a machine, which may be gone without harm at a run's end."""
COMMIT_S = 60.0
"""Seconds that a machine waits for its own part of a step."""
SILENT_S = 600.0
"""Seconds after which no step waits for a machine that does not ask for one."""
MOST_CONNECTIONS = 256
NICE = 10
SILENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the run: its launcher ends this process."""


def next_machines(machine: int, machines: int, replicas: int) -> list[int]:
    """Return the machines that hold copies of a machine's part."""
    return [(machine + number) % machines for number in range(1, replicas + 1)]


@dataclass
class Turns:
    """The steps that all machines send, one after the other; machine 0 has them."""

    root: Path
    machines: int
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    """The step that is being sent."""
    _sent: dict[int, int] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._asked = dict.fromkeys(range(self.machines), self.clock())

    def next(self, machine: int, sent: int) -> int:
        """Return the step that a machine sends now, which has dealt with step `sent`."""
        with self._lock:
            now = self.clock()
            self._sent[machine] = sent
            self._asked[machine] = now
            waits = any(
                self._sent.get(number, 0) < self.step and now - self._asked[number] < SILENT_S
                for number in range(self.machines)
            )
            # Those between are left out: a network may be slower than the ranks save.
            newest = folder.committed(self.root)[-1:]
            if newest and not waits:
                self.step = max(self.step, folder.step_of(newest[0]))
            return self.step


@dataclass
class Replicator:
    """The copies that a machine sends and takes."""

    machine: int
    machines: int
    replicas: int
    root: Path
    """The folder of this machine's parts."""
    owner: str
    """The run's name in their manifests."""
    token: str
    addresses: list[wire.Address]
    """The address of each machine."""
    lead: str = ""
    """Begins each line: a new line where the progress bar of a terminal may stand."""
    pause: Callable[[float], None] = time.sleep
    _warned: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.root = Path(self.root)
        self.turns = Turns(self.root, self.machines)
        self._taking = {
            number: threading.Lock()
            for number in range(self.machines)
            if self.machine in next_machines(number, self.machines, self.replicas)
        }

    def serve(self, listener: socket.socket) -> None:
        """Answer other machines for ever."""
        free = threading.Semaphore(MOST_CONNECTIONS)
        while True:
            free.acquire()
            try:
                end, _ = listener.accept()
            except OSError:  # no descriptor is left, or who connected has gone
                free.release()
                self.pause(POLL_S)
                continue
            threading.Thread(target=self._answer, args=(end, free), daemon=True).start()

    def _answer(self, end: socket.socket, free: threading.Semaphore) -> None:
        # Who sends reports a refusal; a stranger gets no answer.
        refusals = (Refused, OSError, ValueError, KeyError, TypeError)
        try:
            with suppress(*refusals), Line(end, self.token) as line:
                self.answer(line, wire.request_of(line))
        finally:
            free.release()

    def answer(self, line: Line, request: dict[str, Any]) -> None:
        """Answer a request."""
        if request["do"] == "turn":
            line.say({"step": self.turns.next(int(request["machine"]), int(request["sent"]))})
        elif request["do"] == "keep":
            of = int(request["of"])
            with self._taking[of]:
                root = replica_root(self.root, of, self.machine)
                wire.keep(line, request, root, self.owner, self.machines)

    def send(self) -> None:
        """Send the part of each step whose turn it is, for ever."""
        held: deque[ExitStack] = deque()
        sent = 0
        while True:
            step = self._turn(sent)
            if step <= sent:
                self.pause(POLL_S)
                continue
            # A new step means that all have the one before, so older ones may go.
            while len(held) > 1:
                held.popleft().close()
            held.append(ExitStack())
            path = self._committed(step)
            if path is not None:
                held[-1].enter_context(folder.reading(path))
                for number in next_machines(self.machine, self.machines, self.replicas):
                    self._send(path, number)
            sent = step

    def _turn(self, sent: int) -> int:
        """Return the step whose turn it is; that which was sent last if nobody knows."""
        if self.machine == 0:
            return self.turns.next(0, sent)
        request = {"do": "turn", "machine": self.machine, "sent": sent}
        try:
            with wire.requested(self.addresses[0], self.token, request) as line:
                return int(line.hear()["step"])
        except Refused:  # the run may be at its end
            return sent

    def _committed(self, step: int) -> Path | None:
        """Wait for this machine's part of a step; None: it has none, because a save failed."""
        path = self.root / folder.folder_name(step)
        for _ in range(round(COMMIT_S / POLL_S)):
            saved = folder.committed(self.root)
            if path in saved:
                return path
            if saved and folder.step_of(saved[-1]) > step:
                return None
            self.pause(POLL_S)
        return None

    def _send(self, path: Path, number: int) -> None:
        """Send a part to a machine, with a further try; warn of the first of several failures."""
        address = self.addresses[number]
        why = ""
        for pause_s in (0.0, AGAIN_S):
            self.pause(pause_s)
            try:
                wire.send(address, self.token, path, self.machine)
            except Refused as error:
                why = str(error)
                continue
            self._warned.discard(number)
            return
        if number not in self._warned:
            self._warned.add(number)
            host, port = address[:2]
            text = (
                f"{path} of machine {self.machine} is not copied to machine {number}"
                f" ({host}:{port}): {why}; the run goes on, and later ones are tried"
            )
            with suppress(OSError):
                if self.lead:
                    say_page("", error=True)
                warn(text)


def main(words: list[str]) -> None:
    """Replicate as the task in the descriptor `words[1]` says, with the listener `words[2]`."""
    die_with(int(words[0]))
    for number in SILENT:
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    with os.fdopen(int(words[1])) as given:
        task = json.loads(given.read())
    listener = socket.socket(fileno=int(words[2]))

    def work() -> None:
        replicator = Replicator(**task)
        threading.Thread(target=replicator.serve, args=(listener,), daemon=True).start()
        replicator.send()

    def ended(how: str) -> None:
        with suppress(OSError):
            warn(f"the process that copies local checkpoints ended with {how}; another goes on")

    guarded(work, ended)


if __name__ == "__main__":
    main(sys.argv[1:])
