"""The process of one machine, as `srun --ntasks-per-node=1` starts it, which starts the machine's
ranks itself.

The process of the first machine composes the configuration and serves the store of all ranks; the
others read from the store how many ranks to start.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from mtrain import strict_json
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.paths import RUN_FILE
from mtrain.config.resolve.defaults import usual_join_timeout_s
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, MtrainError, Preempted
from mtrain.launching.signals import scratch_folder
from mtrain.launching.start import PARENT, execute, importable, placed, python, without_launcher
from mtrain.launching.supervise import Supervisor
from mtrain.launching.torchrun import RUN_GIVEN
from mtrain.world.launchers import Launched
from mtrain.world.stacks import ERRORS

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# The key of the number of ranks, or of the reason why there are no ranks
SHARE = "mtrain/share"
# The key of the number of machines that have read it
READ = "mtrain/share read"
# Seconds that the first machine stays, so that the others can read why it ends
FAREWELL_S = 5.0


def launch(place: Launched, argv: list[str], compose: Callable[[int], RunConfig]) -> int:
    """Start the ranks of this machine and watch them to the end; return the exit code of the first
    that failed.

    `compose`, given the number of machines, returns a configuration whose share this machine can
    run.

    Raises:
        MtrainError: no configuration can be run, or the first machine does not answer.
    """
    if place.rank:
        return _start(place, argv, None, _share(place), None)
    run: RunConfig | None = None
    failure: MtrainError | None = None
    try:
        run = compose(place.size)
        _divide(run, place.size)
    except MtrainError as error:
        failure = error
    store = _serve(place, run, failure)
    if failure is not None:
        deadline = time.monotonic() + FAREWELL_S
        while store.add(READ, 0) < place.size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        raise failure
    assert run is not None
    return _start(place, argv, run, run.parallel.ranks, store)


def _divide(run: RunConfig, machines: int) -> None:
    """Refuse a number of ranks that the number of machines does not divide.

    Raises:
        BadEnvironment: names both numbers.
    """
    ranks = run.parallel.ranks
    if ranks % machines:
        raise BadEnvironment(
            f"the layout has {ranks} ranks, and one process was started on each of {machines}"
            " machines: as many ranks run on each",
            f"  fix: a number of machines that divides {ranks}, or a task for each rank",
        )


def _serve(place: Launched, run: RunConfig | None, failure: MtrainError | None) -> TCPStore:
    from torch.distributed import TCPStore

    share = {
        "ranks": run.parallel.ranks if run is not None else 0,
        "failure": str(failure or ""),
    }
    try:
        store = TCPStore(place.host, place.port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise BadEnvironment(
            f"port {place.port} of this machine cannot serve the ranks:"
            f" {str(error).splitlines()[0]}",
            "  fix: MASTER_PORT=PORT, one that is free, on every machine",
        ) from None
    store.set(SHARE, strict_json.dumps(share))
    return store


def _share(place: Launched) -> int:
    """Read the number of all ranks from the first machine.

    Raises:
        BadEnvironment: the machine does not answer, or has no configuration to run.
    """
    from torch.distributed import TCPStore

    patience_s = usual_join_timeout_s(place.size)
    deadline = time.monotonic() + patience_s
    why = ""
    while time.monotonic() < deadline:
        try:  # torch's own attempts to connect are loud
            socket.create_connection((place.host, place.port), timeout=1.0).close()
            store = TCPStore(place.host, place.port, is_master=False, wait_for_workers=False)
            store.wait([SHARE], timedelta(seconds=patience_s))
            share = json.loads(store.get(SHARE))
            store.add(READ, 1)
            break
        except (OSError, RuntimeError) as error:
            why = str(error).splitlines()[0]
            time.sleep(0.2)
    else:
        raise BadEnvironment(
            f"the process of the first machine, {place.host}:{place.port}, did not answer within"
            f" {patience_s:g} s: {why}",
            "  fix: see whether it runs there; MASTER_ADDR and MASTER_PORT name another place",
        )
    if share["failure"]:
        text = f"the first machine has no configuration to run: {share['failure']}"
        raise BadEnvironment(*text.split("\n"))
    ranks: int = share["ranks"]
    return ranks


def _start(
    place: Launched, argv: list[str], run: RunConfig | None, ranks: int, store: TCPStore | None
) -> int:
    here = ranks // place.size
    first = place.rank * here
    with scratch_folder() as scratch:
        given = scratch / RUN_FILE
        if run is not None:
            given.write_text(run_yaml(run))

        def start(local_rank: int) -> int:
            values = {
                **importable(without_launcher(os.environ)),  # each rank sets what its run needs
                **placed(first + local_rank, ranks, place.host, place.port, first, here),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                PARENT: str(os.getpid()),
            }
            if first + local_rank == 0:
                values[RUN_GIVEN] = str(given)
            return execute(python("mtrain", *argv), values)

        supervisor = Supervisor(scratch / ERRORS, "")
        supervisor.start(start, here)
        try:
            supervisor.wait()
        except Preempted as stop:
            return stop.exit_code
        except MtrainError:  # each rank has printed its own error
            pass
    codes = [ended.code for ended in supervisor.ended if ended.code]
    del store  # it served the ranks to their end
    return codes[0] if codes else 0
