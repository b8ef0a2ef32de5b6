"""A cluster in a box: SLURM's controller and four virtual nodes on this machine, without a service.

One process runs the daemons, adopts every process of a job and ends them all with itself, so a test
that is killed leaves nothing behind.

Sources: `man slurm.conf` (multiple slurmd, `NodeHostname`), `man slurmd` (`-N`, `-d`).
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from mtrain.processes import PR_SET_PDEATHSIG
from tests.support.commands import ROOT, environment, wait_for
from tests.support.launched import free_port
from tests.support.patience import patient
from tests.support.slurm_packages import unpacked

# Ranks look up the first node's name: these are addresses of this machine, and /etc/hosts needs no
# entry for them.
NODES = tuple(f"127.0.0.{number}" for number in range(1, 5))
PR_SET_CHILD_SUBREAPER = 36
# States of a job after which it has no other
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONFIGURATION = """\
ClusterName=box
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
ReturnToService=2
EnforcePartLimits=ANY
# seconds after which a silent node is down; sites have five minutes
SlurmdTimeout=5
SlurmUser={user}
SlurmdUser={user}
MailProg=/bin/true
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs={cores} RealMemory=1000"
)
PARTITION = "PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP"
SHORT = "PartitionName=short Nodes={names} MaxTime=10 State=UP"


class Box:
    """A cluster of four nodes; a context manager that ends every process of it."""

    def __init__(self, folder: Path) -> None:
        """Write the configuration of a cluster into an empty folder.

        Raises:
            Unavailable: SLURM's packages cannot be had here.
        """
        self.folder = folder
        self.tree = unpacked()
        (self.plugins,) = self.tree.glob("usr/lib/*/slurm-wlm")
        (folder / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        user = psutil.Process().username()
        values = {"folder": folder, "plugins": self.plugins, "user": user, "host": host}
        # Ranks derive their port from the job's number: two boxes on a machine need different ones.
        first = random.randrange(1, 1_000_000)
        lines = [CONFIGURATION.format(**values, port=free_port(), first=first)]
        cores = os.cpu_count()
        for name in NODES:
            (folder / f"spool-{name}").mkdir()
            lines.append(NODE.format(name=name, host=host, port=free_port(), cores=cores))
        lines += [one.format(names=",".join(NODES)) for one in (PARTITION, SHORT)]
        (folder / "slurm.conf").write_text("\n".join([*lines, ""]))

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a user of this cluster."""
        libraries = (self.plugins.parent, self.plugins, os.environ.get("LD_LIBRARY_PATH"))
        programs = (self.tree / "usr/bin", Path(sys.executable).parent, os.environ["PATH"])
        return {
            **{k: v for k, v in environment().items() if not k.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LD_LIBRARY_PATH": os.pathsep.join(str(path) for path in libraries if path),
            "PATH": os.pathsep.join(str(path) for path in programs),
        }

    def __enter__(self) -> Box:
        self.daemons = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.folder), str(self.tree), str(os.getpid())],
            cwd=ROOT,
            env=self.environment,
        )
        try:
            wait_for(self._ready, 30)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.daemons.terminate()
        self.daemons.wait(30)

    def _ready(self) -> bool:
        if self.daemons.poll() is not None:
            raise AssertionError(self.said())
        return self.states() == dict.fromkeys(NODES, "idle")

    def said(self) -> str:
        """Return the last lines of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)

    def run(self, *words: str, cwd: Path | None = None, **variables: str) -> str:
        """Run a program of SLURM, with more variables, and return what it prints.

        Raises:
            AssertionError: it fails.
        """
        done = self.tried(*words, cwd=cwd, **variables)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def tried(
        self, *words: str, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of SLURM to its end."""
        environment = self.environment | variables
        return subprocess.run(
            words, env=environment, cwd=cwd, capture_output=True, text=True, check=False
        )

    def states(self) -> dict[str, str]:
        """Return the state of each node; {} while the controller does not answer."""
        done = self.tried("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in done.stdout.splitlines())

    def job(self, number: int) -> dict[str, str]:
        """Return what the controller reports about a job."""
        text = self.run("scontrol", "show", "job", "--oneliner", str(number))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait_for_state(self, number: int, state: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait until a job has this state, and return what is reported then.

        Raises:
            AssertionError: it ends in another state.
        """
        deadline = time.monotonic() + patient(timeout_s)
        while (job := self.job(number))["JobState"] != state:
            assert job["JobState"] not in ENDS, f"{job}\n{self.said()}"
            assert time.monotonic() < deadline, f"{job}\n{self.said()}"
            time.sleep(0.1)
        return job

    def wait_until_idle(self) -> None:
        """Wait until no job has a node."""
        wait_for(lambda: set(self.states().values()) <= {"idle", "down", "down*"}, 60)

    def reset(self) -> None:
        """Cancel every job, and start the daemons of lost nodes again."""
        self.run("scancel", "--user", str(os.getuid()))
        self.daemons.send_signal(signal.SIGUSR1)
        wait_for(self._ready, 60)

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once, as a power failure does."""
        victims = {
            process
            for process in psutil.Process(self.daemons.pid).children(recursive=True)
            if _node_of(process) == name
        }
        # Daemons first: one that outlives its task would report a failure to the controller.
        daemons = {parent for process in victims if (parent := process.parent()) is not None}
        daemons = {process for process in daemons if process.name().startswith("slurmstepd")}
        for process in (*daemons, *victims):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _node_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        words = process.cmdline()
        if "-N" in words:
            return words[words.index("-N") + 1]
        return process.environ().get("SLURMD_NODENAME")
    return None


def serve(folder: Path, tree: Path, parent: int) -> None:
    """Run the daemons until TERM or the end of `parent`, and end every process that they have
    started. USR1 starts those daemons again that have ended.
    """
    stops: list[int] = []
    starts = [signal.SIGUSR1.value]
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: starts.append(number))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    running: dict[int, str] = {}
    while not stops and os.getppid() == parent:
        _reap(running)
        if starts:
            starts.pop()
            for name, words in _commands(tree).items():
                if name not in running.values():
                    running[_started(words, folder / f"{name}.out")] = name
        time.sleep(0.05)
    # A process that is killed leaves its children to this one, so look until there are none.
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        _reap(running)
        time.sleep(0.01)


def _commands(tree: Path) -> dict[str, list[str]]:
    """Return the command of each daemon by its name."""
    controller, daemon, step = (
        str(tree / f"usr/sbin/{name}-wlm") for name in ("slurmctld", "slurmd", "slurmstepd")
    )
    nodes = {f"slurmd-{name}": [daemon, "-D", "-N", name, "-d", step] for name in NODES}
    return {"slurmctld": [controller, "-D"], **nodes}


def _started(words: list[str], output: Path) -> int:
    with output.open("a") as file:
        actions = [(os.POSIX_SPAWN_DUP2, file.fileno(), number) for number in (1, 2)]
        return os.posix_spawn(words[0], words, os.environ, file_actions=actions)


def _reap(running: dict[int, str]) -> None:
    """Collect every process that has ended."""
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            running.pop(pid, None)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
