"""Stages of `first_touch.py` that start runs as a user does: the gate, and the small runs of
`gpu_runs.yaml`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from first_touch_device import Skipped
from first_touch_results import HERE, ROOT, RUNS, Results, Walk, read_yaml, tree_environment

Units = dict[str, Callable[[], Any]]
POLL_S = 0.05
WAIT_S = 150.0
"""The longest that a run waits for the one that it is compared with."""
COMMAND_S = 200.0
"""The longest that one command may take."""
DRY_WORDS = (
    "cluster=cpu",
    "data.seq_length=16",
    "trainer.train_iters=3",
    "trainer.global_batch_size=2",
)
"""Words that replace a run's own in a dry run: a CPU, short samples and few steps."""
SAVES = "checkpoint.save_interval="


@dataclass(frozen=True)
class Command:
    """One command of a run, and what must hold after it."""

    argv: tuple[str, ...]
    hold: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    torchrun: bool = False
    """True where torchrun starts it, with one rank."""
    program: str | None = None
    """A Python program of this repository that runs in place of `launch.py`."""
    kill_after_step: int | None = None
    """The launcher gets `signal` once this step is in the metrics."""
    signal: str = "SIGKILL"
    """A request to stop, such as SIGUSR1, in place of SIGKILL: the launcher then ends by itself."""

    @property
    def trains(self) -> bool:
        """Return true for `launch.py` without a verb."""
        return self.program is None and (not self.argv or "=" in self.argv[0])


@dataclass(frozen=True)
class Entry:
    """A run of `gpu_runs.yaml`: one command or several, one after the other."""

    name: str
    why: str
    commands: tuple[Command, ...]
    needs: Mapping[str, str] = field(default_factory=dict)
    dry: bool = False
    """True where a dry run does it as well."""


def entries(path: Path = RUNS) -> list[Entry]:
    """Return the runs of a list.

    Raises:
        ValueError: a key is unknown, a name comes twice, or a run is compared with one that does
            not come before it.
    """
    listed = read_yaml(path)
    found: list[Entry] = []
    for said in listed["runs"]:
        commands = [said, *said.get("then", ())]
        own = {"name", "why", "needs", "dry", "then"}
        made = tuple(
            _command(each, listed["common"], own if each is said else set()) for each in commands
        )
        entry = Entry(
            said["name"], said["why"], made, said.get("needs", {}), said.get("dry", False)
        )
        before = {other.name for other in found}
        if entry.name in before:
            raise ValueError(f"{path.name}: two runs are called {entry.name}")
        for command in made:
            other = command.hold.get("near", command.hold.get("same_as", {})).get("run")
            if other is not None and other not in before:
                raise ValueError(
                    f"{path.name}: {entry.name} is compared with {other}, which does not come"
                    " before it"
                )
        found.append(entry)
    return found


def _command(said: Mapping[str, Any], common: list[str], own: set[str]) -> Command:
    known = {"argv", "hold", "environment", "torchrun", "program", "kill_after_step", "signal"}
    unknown = set(said) - known - own
    if unknown:
        raise ValueError(
            f"unknown keys of a run: {', '.join(sorted(unknown))}; there are"
            f" {', '.join(sorted(known))}"
        )
    argv = tuple(said.get("argv", ()))
    picked = {key: said[key] for key in known - {"argv"} if key in said}
    made = Command(argv, **picked)
    return replace(made, argv=tuple(merged([*common, *argv]))) if made.trains else made


def merged(words: list[str]) -> list[str]:
    """Return the words with one value for each key, the last one."""
    found: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0]
        found[key] = word
    return list(found.values())


def gate(walk: Walk, folder: Path) -> Units:
    """Return the unit of one tiny run by plain `python launch.py`, with no variable of a launcher
    set by hand.
    """
    entry = next(entry for entry in entries() if entry.name == "gate")
    return {
        "launch.py": functools.partial(
            _tried, walk, folder / "runs" / "gate", entry, Results(folder)
        )
    }


def runs(walk: Walk, folder: Path) -> Units:
    """Return every run of the list; in a dry run a sample, and a unit that validates the words of
    all.
    """
    found: Units = {}
    for entry in entries():
        if entry.name == "gate":
            continue
        if not walk.dry or entry.dry:
            home = folder / "runs" / entry.name
            found[entry.name] = functools.partial(_tried, walk, home, entry, Results(folder))
    if walk.dry:
        found["words of all"] = _valid
    return found


def _valid() -> dict[str, Any]:
    """Compose and validate what every training of the list says, for one device of a
    node of H200.
    """
    from mtrain.api import load
    from mtrain.config.resolve.resolution import Machine
    from mtrain.errors import ConfigError

    machine = Machine(cpu_cores=16, memory_bytes=1 << 37, gpus=1, triton=True)
    valid: set[str] = set()
    wrong: dict[str, str] = {}
    for entry in entries():
        for command in entry.commands:
            named = any("{" in word for word in command.argv)  # a folder that is not there yet
            if not command.trains or named or _missing(entry):
                continue
            try:
                load(
                    [*command.argv, "cluster=h200", "cluster.devices_per_node=1"],
                    machine,
                    {},
                    to_run=False,
                )
                valid.add(entry.name)
            except ConfigError as error:
                wrong[entry.name] = str(error).strip().splitlines()[0]
    return {"valid": len(valid - wrong.keys()), **({"wrong": wrong} if wrong else {})}


def _missing(entry: Entry) -> str | None:
    """Return a sentence about a key or a module that a run needs and that is not here; None:
    nothing is missing.
    """
    key = entry.needs.get("key")
    module = entry.needs.get("module")
    if key is not None:
        from mtrain.config.messages.keys import field_of

        if field_of(key) is None:
            return f"there is no key {key} at this commit"
    if module is not None:
        try:
            absent = importlib.util.find_spec(module) is None
        except ModuleNotFoundError:
            absent = True
        if absent:
            return f"there is no module {module} here"
    return None


def _tried(walk: Walk, home: Path, entry: Entry, results: Results) -> dict[str, Any]:
    """Do the commands of a run and hold them to what they must.

    Raises:
        RuntimeError: something does not hold, with what was found.
        Skipped: the run needs what is not here.
    """
    missing = _missing(entry)
    if missing is not None:
        raise Skipped(missing)
    if not walk.dry and not Path("/dev/nvidiactl").exists():
        raise Skipped("there is no GPU here; --dry-run walks this on a CPU")
    if home.exists():  # of an earlier try: its run would be taken for this one's
        shutil.rmtree(home)
    home.mkdir(parents=True)
    said: dict[str, Any] = {"why": entry.why}
    for command in entry.commands:
        start = time.perf_counter()
        code, output = _execute(walk, home, command, said)
        said["seconds"] = round(said.get("seconds", 0.0) + time.perf_counter() - start, 2)
        said |= _figures(home)
        _hold(command, code, output, home, said, results)
    return said


def _execute(walk: Walk, home: Path, command: Command, said: dict[str, Any]) -> tuple[int, str]:
    """Run a command; return its exit code and all that it printed, and note when its first step was
    done.
    """
    words = [_filled(word, home) for word in command.argv]
    if command.trains:
        words += [f"log.runs_dir={home}"]
    if walk.dry and command.trains:
        if any(word.startswith(SAVES) and word != f"{SAVES}0" for word in words):
            saves = [f"{SAVES}2"]
        else:
            saves = []
        words = merged([*words, *DRY_WORDS, *saves])
    start = [sys.executable]
    if command.torchrun:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    start += [str(ROOT / (command.program or "launch.py")), *words]
    environment = tree_environment(
        {key: _filled(value, home) for key, value in command.environment.items()}
    )
    with (home / "output.txt").open("ab") as file:
        file.write(f"$ {shlex.join(start)}\n".encode())
        file.flush()
        begin = file.tell()  # behind the command itself, whose words would satisfy a pattern
        child = subprocess.Popen(
            start, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )
        try:
            code = _ended(child, home, command, said)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    return code, (home / "output.txt").read_bytes()[begin:].decode(errors="replace")


def _ended(
    child: subprocess.Popen[bytes], home: Path, command: Command, said: dict[str, Any]
) -> int:
    start = time.monotonic()
    sent = False
    while child.poll() is None:
        step = _last_step(home)
        if step:
            said.setdefault("first_step_s", round(time.monotonic() - start, 2))
        if command.kill_after_step is not None and step >= command.kill_after_step and not sent:
            child.send_signal(signal.Signals[command.signal])
            sent = True
        if time.monotonic() > start + COMMAND_S:
            raise RuntimeError(f"did not end within {COMMAND_S:g} s")
        time.sleep(POLL_S)
    if command.kill_after_step is not None and not sent:
        raise RuntimeError(
            f"ended with {child.returncode} before step {command.kill_after_step}, where it is"
            " killed"
        )
    return child.returncode


def _filled(word: str, home: Path) -> str:
    """Fill in `{home}`, `{bench}`, `{root}`, `{run}` (the newest) and `{checkpoint}` (its first) in
    a word.
    """
    if "{run}" in word or "{checkpoint}" in word:
        found = newest_run(home)
        if found is None:
            raise RuntimeError(f"there is no run folder in {home}")
        first = min(found.glob("checkpoints/step_*"), default=found / "checkpoints")
        word = word.replace("{run}", str(found)).replace("{checkpoint}", str(first))
    return (
        word.replace("{home}", str(home)).replace("{bench}", str(HERE)).replace("{root}", str(ROOT))
    )


def newest_run(home: Path) -> Path | None:
    """Return the run folder that was begun last."""
    found = [path.parent for path in home.glob("*/run.yaml")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics that are of steps, without one that is being written."""
    path = run / "metrics.jsonl"
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if "loss" in row:
            found.append(row)
    return found


def _last_step(home: Path) -> int:
    run = newest_run(home)
    return max((row["step"] for row in rows_of(run)), default=0) if run else 0


def _figures(home: Path) -> dict[str, Any]:
    """Return losses, the median step behind the first third, and memory of the newest run."""
    run = newest_run(home)
    rows = rows_of(run) if run else []
    if run is None or not rows:
        return {}
    late = rows[len(rows) // 3 :]
    said: dict[str, Any] = {
        "run": str(run),
        "losses": [row["loss"] for row in rows],
        "last_step": rows[-1]["step"],
    }
    said["steps"] = [row["step"] for row in rows]
    said["metrics"] = sorted(rows[-1])
    said["step_s"] = statistics.median(row["step_s"] for row in late)
    if (run / "memory.json").exists():
        said["memory"] = json.loads((run / "memory.json").read_text())
    return said


FRAMES = 6


def _places(home: Path) -> str:
    """Return the innermost places of the traceback that a rank wrote, for the machine is gone when
    somebody reads of it; empty without one.
    """
    written = max(home.glob("*/errors/rank_*.json"), default=None)
    if written is None:
        return ""
    lines = json.loads(written.read_text()).get("traceback", "").splitlines()
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    return "; at " + " < ".join(reversed(places[-FRAMES:])) if places else ""


def _hold(
    command: Command, code: int, output: str, home: Path, said: dict[str, Any], results: Results
) -> None:
    """Compare a command with what it must do.

    Raises:
        RuntimeError: with the first thing that does not hold.
    """
    hold = command.hold
    killed = command.kill_after_step is not None and command.signal == "SIGKILL"
    wanted = -signal.SIGKILL if killed else hold.get("exit", 0)
    if code != wanted:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        said_last = lines[-1] if lines else "it said nothing"
        raise RuntimeError(f"ended with {code}, not {wanted}: {said_last}{_places(home)}")
    losses = said.get("losses", [])
    if hold.get("falls"):
        third = max(1, len(losses) // 3)
        if len(losses) < 2 or not sum(losses[-third:]) < sum(losses[:third]):
            raise RuntimeError(f"the loss does not fall: {losses}")
    if "last_step" in hold and said.get("last_step") != hold["last_step"]:
        raise RuntimeError(f"the last step is {said.get('last_step')}, not {hold['last_step']}")
    if "metric" in hold and hold["metric"] not in said.get("metrics", ()):
        raise RuntimeError(f"the metrics have no {hold['metric']}")
    if absent := [key for key in hold.get("memory", ()) if key not in said.get("memory", {})]:
        raise RuntimeError(f"memory.json has no {', '.join(absent)}")
    if "file" in hold and not any(home.glob(hold["file"])):
        raise RuntimeError(f"no file {hold['file']} was written")
    if "says" in hold and not re.search(hold["says"], output):
        raise RuntimeError(f"it does not say {hold['says']!r}")
    if "silent" in hold and (found := re.search(hold["silent"], output)):
        raise RuntimeError(f"it says {found.group(0)!r}")
    for kind in ("near", "same_as"):
        if kind in hold:
            other = hold[kind]["run"]
            said["differs"] = difference(_by_step(said), _by_step(_result_of(other, results)))
            if said["differs"] > hold[kind].get("within", 0.0):
                bound = f"{hold[kind].get('within', 0.0):g}"
                raise RuntimeError(
                    f"losses differ from {other}'s by {said['differs']:.3g}, more than {bound}"
                )


def _result_of(name: str, results: Results) -> dict[str, Any]:
    """Wait for the end of a run that comes before, and return its result."""
    stage, unit = ("gate", "launch.py") if name == "gate" else ("runs", name)
    end = time.monotonic() + WAIT_S
    while (line := results.ends(stage).get(unit)) is None or line.get(
        "late"
    ):  # this call does what was late
        if time.monotonic() > end:
            raise RuntimeError(
                f"{name} did not end in {WAIT_S:g} s, so there is nothing to compare with"
            )
        time.sleep(POLL_S)
    if not line.get("result", {}).get("losses"):
        raise RuntimeError(f"{name} did not train, so there is nothing to compare with")
    return line["result"]


def _by_step(said: Mapping[str, Any]) -> dict[int, float]:
    return dict(zip(said.get("steps", ()), said.get("losses", ()), strict=True))


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Return the greatest relative difference of two runs' losses, by step; infinite where only one
    has a step.

    Ours may begin later, as a run that was resumed does.
    """
    if not ours or set(ours) - set(theirs) or max(ours) != max(theirs):
        return float("inf")
    return max(
        abs(loss - theirs[step]) / max(abs(theirs[step]), 1e-12) for step, loss in ours.items()
    )
