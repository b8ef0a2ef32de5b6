"""The copies of local checkpoints on other machines, as the launchers see them: a process of each
machine makes them while ranks train, and between two attempts a launcher gives a part back to a
machine that lacks it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt import local as ckpt_local
from mtrain.ckpt.replication import wire
from mtrain.ckpt.replication.wire import Line, Refused
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, MtrainError, first_line
from mtrain.launching.start import ANY_HOST, execute, importable, listening, python
from mtrain.processes import kill

MODULE = "mtrain.ckpt.replication.process"
COME_S = 60.0
"""Seconds that a machine without its part waits for the giver."""


class Replication:
    """The copies that a machine gives to others and has of them."""

    def __init__(self, machine: int, machines: int, token: str) -> None:
        """Listen at a free port.

        Raises:
            BadEnvironment: there is none.
        """
        self.machine = machine
        self.machines = machines
        self.token = token
        try:
            self.listener = listening(ANY_HOST)
        except OSError as error:
            text = f"no port can be opened for copies of local checkpoints: {error.strerror}"
            raise BadEnvironment(text) from None

    @property
    def port(self) -> int:
        """Return the port at which other machines reach this one."""
        return int(self.listener.getsockname()[1])

    def close(self) -> None:
        """Close the port, also in a process that was forked from this one."""
        self.listener.close()

    @contextmanager
    def running(
        self, run: RunConfig, home: Path, addresses: Sequence[wire.Address], *, barred: bool = False
    ) -> Iterator[None]:
        """Copy local checkpoints to other machines in this block, and delete all copies here if the
        run left no local checkpoint.

        Raises:
            BadEnvironment: no process can be started.
        """
        place = ckpt_local.place_of(home, run.checkpoint.local_dir, self.machine)
        if place is None:
            yield
            return
        task = {
            "machine": self.machine,
            "machines": self.machines,
            "replicas": run.checkpoint.local_replicas,
            "root": str(place.root),
            "owner": place.owner,
            "token": self.token,
            "addresses": list(addresses),
            "lead": "\n" if barred else "",
        }
        pid = self._started(strict_json.dumps(task))
        try:
            yield
        finally:
            kill(pid)
            # The last rank has deleted all, and a copy may have come after that.
            if not ckpt_folder.committed(place.root):
                ckpt_local.clear(place)

    def _started(self, task: str) -> int:
        given, giving = os.pipe()
        end = self.listener.fileno()
        # One that was killed reads nothing.
        with suppress(BrokenPipeError), os.fdopen(giving, "w") as pipe:
            try:
                command = python(MODULE, str(os.getpid()), str(given), str(end))
                pid = execute(command, importable(os.environ), given, end)
            except OSError as error:
                text = f"no process can be started: {error.strerror or error}"
                raise BadEnvironment(text) from None
            finally:
                os.close(given)
            pipe.write(task)
        return pid

    def act(self, order: Mapping[str, Any]) -> str:
        """Follow an order of the first machine about a part; return why that failed."""
        home = Path(order["home"])
        if order["do"] == "take":
            return self.take(home, order["step"])
        if order["do"] == "give":
            return self.give(home, order["of"], order["step"], order["to"])
        return self.vouch(home, order["of"], order["step"])

    def vouch(self, home: Path, of: int, step: int) -> str:
        """Return why this machine cannot give a part back; empty: its copy is intact."""
        path = self._copy(home, of, step)
        return ckpt_local.fault_of(path) if path is not None else "it has no copy of it"

    def give(self, home: Path, of: int, step: int, address: wire.Address) -> str:
        """Send a part back to the machine that lacks it; return why that failed."""
        path = self._copy(home, of, step)
        try:
            if path is None:
                return "it has no copy of it"
            wire.send(address, self.token, path, of)
        except Refused as error:
            return str(error)
        return ""

    def take(self, home: Path, step: int) -> str:
        """Wait until another machine has sent back our part of a step; return why it failed."""
        why = f"nobody has sent it within {COME_S:g} s"
        deadline = time.monotonic() + COME_S
        try:
            root = ckpt_local.root_for(home, self.machine)
            while (left_s := deadline - time.monotonic()) > 0:
                self.listener.settimeout(left_s)
                end, _ = self.listener.accept()
                # Also connections of an earlier attempt, and of strangers, wait there.
                refusals = (Refused, OSError, ValueError, KeyError, TypeError)
                with suppress(*refusals), Line(end, self.token) as line:
                    request = wire.request_of(line)
                    known = {key: request[key] for key in ("do", "of", "step")}
                    if known == {"do": "keep", "of": self.machine, "step": step}:
                        wire.keep(line, request, root, root.parent.name, self.machines)
                        return ""
        except TimeoutError:
            return why
        except (MtrainError, OSError) as error:
            return first_line(error)
        finally:
            self.listener.settimeout(None)
        return why

    def _copy(self, home: Path, of: int, step: int) -> Path | None:
        found = ckpt_local.replicas(home, 0, self.machine).get(of, [])
        return next((path for path in found if ckpt_folder.step_of(path) == step), None)
