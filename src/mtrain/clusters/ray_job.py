"""The program of a Ray job: it places one launcher on each machine, and exits with the code of the
first that fails.

`render` copies this file into a job, next to `run.yaml` and `job.json`, so it imports only Ray and
the standard library. The machines of the Ray cluster need Ray and mtrain, with equal versions.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The option of prctl that sends a process a signal when its parent ends
PR_SET_PDEATHSIG = 1
PATIENCE_S = 60.0
"""Seconds in which the other machines end by themselves after one has failed."""
REFUSED = 3
"""Exit code if a machine lacks what the run needs."""
LOST = 1
"""Exit code if a machine is lost."""
PLACE = "FILE"


class Machine:
    """One machine of the run, as an actor of Ray."""

    def __init__(self, job: Mapping[str, Any], configuration: str) -> None:
        self.job = job
        self.configuration = configuration
        self.process: subprocess.Popen[bytes] | None = None
        self.stopping = False

    def address(self) -> tuple[str, int]:
        """Return the address of this machine, and a free port."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, index: int, host: str, port: int) -> int:
        """Start the launcher of this machine, and return its exit code."""
        lacking = [name for name in self.job["needed"] if not os.environ.get(name)]
        if lacking:
            text = f"{' '.join(lacking)} is not set: the run needs it (launch.env)"
            _tell(text)
            return REFUSED
        folder = os.path.expanduser(self.job["folder"] or ".")
        with tempfile.TemporaryDirectory(prefix="mtrain-", dir="/tmp") as scratch:
            file = Path(scratch, "run.yaml")
            file.write_text(self.configuration, encoding="utf-8")
            words = [
                f"run={file}" if word == f"run={PLACE}" else word for word in self.job["words"]
            ]
            try:
                self.process = subprocess.Popen(
                    words,
                    cwd=folder,
                    env=self._environment(index, host, port),
                    preexec_fn=_ends_with_parent,
                )
            except OSError as error:
                _tell(f"{error.filename}: {error.strerror}")
                return REFUSED
            if self.stopping:
                self.stop()
            code = self.process.wait()
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """Ask the launcher to save and end."""
        self.stopping = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def _environment(self, index: int, host: str, port: int) -> dict[str, str]:
        # Ray sets it to the number of cores that the actor reserves: one.
        inherited = {key: os.environ[key] for key in os.environ if key != "OMP_NUM_THREADS"}
        return {
            **inherited,
            **self.job["variables"],
            "MTRAIN_MACHINE": str(index),
            "MTRAIN_MACHINES": str(self.job["machines"]),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }


def _ends_with_parent() -> None:
    """Let a lost actor end its launcher, which then saves."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _tell(text: str) -> None:
    plain = text.encode("ascii", "backslashreplace")
    os.write(2, plain.replace(b"\x1b", b"") + b"\n")


def main() -> int:
    """Place the launchers and wait for them; return the exit code of the first that fails."""
    import ray

    here = Path(__file__).resolve().parent
    job = json.loads((here / "job.json").read_text(encoding="utf-8"))
    configuration = (here / "run.yaml").read_text(encoding="utf-8")
    ray.init(ignore_reinit_error=True)
    stopped = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    machines = _placed(job, configuration)
    host, port = ray.get(machines[0].address.remote())
    waiting = [machine.run.remote(index, host, port) for index, machine in enumerate(machines)]
    code = 0
    asked = False
    deadline = float("inf")
    while waiting:
        done, waiting = ray.wait(waiting, timeout=0.5)
        for one in done:
            code = code or _code(one)
        if code:
            deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if not asked and (stopped or time.monotonic() > deadline):
            asked = True
            for machine in machines:
                machine.stop.remote()
    return code


def _placed(job: Mapping[str, Any], configuration: str) -> list[Any]:
    """Return an actor on each of as many machines as the run has."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    count = job["machines"]
    devices = job["devices"]
    bundle = {"CPU": 1.0, **({"GPU": float(devices)} if devices else {})}
    group = placement_group([bundle] * count, strategy="STRICT_SPREAD")
    while not group.wait(timeout_seconds=PATIENCE_S):
        needs = f"{count} machines with {devices} GPUs and a core each"
        _tell(f"waiting for {needs}")
    # Two calls at a time: one waits for the launcher while another may stop it.
    actor = ray.remote(num_cpus=1, num_gpus=devices, max_concurrency=2)(Machine)
    return [
        actor.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
        ).remote(job, configuration)
        for index in range(count)
    ]


def _code(result: Any) -> int:
    import ray

    try:
        return int(ray.get(result))
    except ray.exceptions.RayError as error:
        _tell(f"a machine is lost: {error}")
        return LOST


if __name__ == "__main__":
    sys.exit(main())
