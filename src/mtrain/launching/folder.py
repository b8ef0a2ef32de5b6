"""The run folder: its owner, the files before the first rank, the checkpoint to resume."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain import durable, locks, strict_json
from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt import local as ckpt_local
from mtrain.config.compose.dump import override, run_yaml
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import CHECKPOINTS, ENVIRONMENT, METRICS, REMOTE_FILE, RUN_FILE
from mtrain.config.engine import kernels
from mtrain.config.engine import release as engine
from mtrain.config.machine.installed import version_of
from mtrain.config.resolve.batches import counted, samples_of, stages
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, MtrainError, first_line
from mtrain.goodput.account import FILE
from mtrain.goodput.log import LOG
from mtrain.launching import matmul, resume
from mtrain.launching.restart import RESTARTS
from mtrain.launching.resume import anchored as anchored
from mtrain.launching.verdict import judge
from mtrain.layout.grid import RankGrid
from mtrain.plan.compare import PEAKS, PLAN, planned
from mtrain.plan.count import adapter_parameters, flops_of_token, parameters, state_bytes
from mtrain.world.stacks import ERRORS

LOCK_FILE = ".lock"
PREAMBLE = (
    LOCK_FILE,
    LOCK_FILE + locks.SUFFIX,
    RUN_FILE,
    "overrides.txt",
    ENVIRONMENT,
    "plan.json",
    "start.json",
    "tokenizer.json",
    ERRORS,
    METRICS,
    RESTARTS,
    LOG,
    FILE,
    ckpt_local.FILE,
    REMOTE_FILE,
)
# Packages whose versions are recorded. megatron-core's is that of the loaded module.
PACKAGES = ("mtrain", "torch", "pydantic", "hydra-core")
# Seconds that a restarted run waits for the processes of its previous start to end
RESTART_S = 20.0
# Seconds in which another machine of a shared filesystem has to see a file of the run folder
SEEN_S = 30.0


@dataclass(frozen=True)
class Plan:
    """The folder that a run will write, and the checkpoint that it resumes."""

    folder: Path
    checkpoint: Path | None = None
    changes: tuple[str, ...] = ()
    """Keys that differ from the checkpoint's configuration, for the record."""
    new: bool = True
    """True if the folder is new; False: an earlier run made it, and this run continues it."""
    notes: tuple[str, ...] = ()
    """Remarks on the choice, for the user."""
    weights: Path | None = None
    """The checkpoint, or Hugging Face folder, from which a new run takes only its weights."""


def resume_of(run: RunConfig, launch: str | None) -> str | None:
    """Return the `checkpoint.resume` of a run: null means auto if `launch` may restart it."""
    if run.checkpoint.resume is None and launch is not None:
        return resume.AUTO
    return run.checkpoint.resume


def plan(run: RunConfig, *, launch: str | None = None) -> Plan:
    """Decide the run folder and the checkpoint to resume.

    `launch` is the identity, such as "slurm 4711", of a launch that starts the run again after a
    failure; None: the launcher is unknown. A run does not continue in a named folder that another
    launch has begun, unless `checkpoint.resume=auto` requests it.

    Raises:
        ConfigError: the folder is taken, there is nothing to resume, or this configuration cannot
            continue that of the folder.
        CorruptData: the named checkpoint was never committed, or its `run.yaml` was altered.
        BadEnvironment: a folder may not be read.
    """
    try:
        return _plan(run, launch)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise BadEnvironment(
            f"{error.filename or run.log.runs_dir} cannot be read: {why}"
        ) from None


def _plan(run: RunConfig, launch: str | None) -> Plan:
    how = resume_of(run, launch)
    notes: list[str] = []
    earlier: Path | None = None
    checkpoint: Path | None = None
    if how == resume.AUTO:
        earlier = resume.same_start(run, launch, is_begun)
        checkpoint = resume.newest(earlier, notes) if earlier is not None else None
    elif how == "latest":
        earlier, checkpoint = resume.latest(run, notes)
    elif how is not None:
        earlier, checkpoint = resume.named(run, notes)
    home = earlier or _new_folder(run, launch)
    refuse_links(home)
    if earlier is None and checkpoint is None:
        return Plan(home, weights=resume.weights_of(run))
    changes = judge.changes_of(run, home) if checkpoint is None else _allowed(run, checkpoint)
    branches = checkpoint is not None and not _is_of(home, checkpoint)
    weights = resume.weights_of(run) if checkpoint is None else None
    return Plan(home, checkpoint, changes, branches, tuple(notes), weights)


def _is_of(home: Path, checkpoint: Path) -> bool:
    """Return whether a checkpoint is one of the run in a folder."""
    return checkpoint.parent.parent == home or ckpt_local.holds(home, checkpoint)


def _allowed(run: RunConfig, checkpoint: Path) -> tuple[str, ...]:
    """Return the keys that differ from a checkpoint's, after `checkpoint verdict` judged it."""
    judgement = judge.examined(run, checkpoint)
    judgement.refuse()
    return judgement.changes


@contextmanager
def opened(
    run: RunConfig, chosen: Plan, argv: list[str], *, launch: str | None = None
) -> Iterator[Plan]:
    """Make the run folder and own it until the end, so that no second run writes to it.

    Yields the plan as it is once the folder is owned. Checkpoints later than the resumed one are
    set aside. `launch` is recorded; see `plan`.

    Raises:
        ConfigError: another process owns it, or made it in the meantime.
        BadEnvironment: it cannot be written.
    """
    # A scheduler may start a run again while processes of its previous start still end.
    again = not chosen.new or run.log.name is not None
    patience_s = RESTART_S if resume_of(run, launch) == resume.AUTO and again else 0.0
    while True:
        with _writing(chosen.folder):
            refuse_links(chosen.folder)
            held = _claim(chosen.folder, patience_s)
        if isinstance(held, _Held) and not (chosen.new and is_begun(chosen.folder)):
            break
        what = "exists already"
        if isinstance(held, _Held):
            held.release()
        else:
            what = f"is in use by {held}"
        # only a name that mtrain made up may change
        if not chosen.new or run.log.name is not None:
            raise _occupied(chosen.folder, what, f"log.name={free_name(chosen.folder)}")
        chosen = replace(chosen, folder=chosen.folder.with_name(free_name(chosen.folder)))
    try:
        with _writing(chosen.folder):
            _check_checkpoints(chosen.folder / CHECKPOINTS)
            ckpt_folder.sweep(chosen.folder / CHECKPOINTS)
        if not chosen.new:
            # the newest checkpoint may have changed before this process owned the folder
            before = chosen
            chosen = plan(run, launch=launch)
            notes = dict.fromkeys((*before.notes, *chosen.notes))
            chosen = replace(chosen, notes=tuple(notes))
        with _writing(chosen.folder):
            _set_aside(chosen)
            _describe(run, chosen, argv, launch)
        ckpt_local.begin(chosen.folder, chosen.checkpoint, run.checkpoint.local_dir)
        yield chosen
    finally:
        held.release()


@contextmanager
def owned(home: Path, run: RunConfig) -> Iterator[None]:
    """Own a run folder, which is made if it is missing, so that no run writes to it meanwhile.

    Raises:
        ConfigError: another process owns it.
        BadEnvironment: it cannot be written.
    """
    with _writing(home):
        refuse_links(home)
        held = _claim(home, RESTART_S if run.checkpoint.resume == resume.AUTO else 0.0)
    if not isinstance(held, _Held):
        raise _occupied(home, f"is in use by {held}", f"log.name={free_name(home)}")
    try:
        yield
    finally:
        held.release()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise BadEnvironment(
            f"the run folder {folder} cannot be written: {why}",
            "  fix: log.runs_dir=FOLDER that can be written",
        ) from None


def unseen(home: Path, digest: str) -> str:
    """Return why this machine does not see the run folder that rank 0 made; empty if it sees it."""
    path = home / RUN_FILE
    deadline = time.monotonic() + SEEN_S
    while True:
        try:
            if read_run_file(path).digest() == digest:
                return ""
            why = f"it holds another configuration than rank 0 wrote (digest {digest[:12]})"
        except (MtrainError, OSError) as error:
            why = first_line(error)
        if time.monotonic() > deadline:
            machine = os.uname().nodename
            return (
                f"machine {machine} does not see the run folder of rank 0, {path}: {why}\n"
                "  fix: log.runs_dir=FOLDER of a filesystem that all machines share"
            )
        time.sleep(0.5)


def refuse_local(run: RunConfig, here: int) -> None:
    """Refuse local checkpoints where other machines have ranks of the run.

    Raises:
        ConfigError: this machine has only `here` of them.
    """
    local = run.checkpoint.local_dir
    if local is not None and here < run.parallel.ranks:
        rule = f"{here} of {run.parallel.ranks} ranks are on this machine"
        fix = "checkpoint.local_dir=null checkpoint.local_interval=null"
        raise ConfigError.of("MT455", "checkpoint.local_dir", local, rule, fix)


def _check_checkpoints(root: Path) -> None:
    """Refuse a folder of checkpoints that cannot be written, before any rank starts."""
    if root.exists() and not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{root} takes no new files")


def refuse_links(folder: Path) -> None:
    """Refuse a run folder that is or holds a symbolic link: a run would write into another folder.

    Raises:
        ConfigError: names the link.
    """
    entries = [folder, *(folder.iterdir() if folder.is_dir() else ())]
    link = next((entry for entry in entries if entry.is_symlink()), None)
    if link is None:
        return
    rule = (
        f"cannot be written because {link} is a symbolic link, and a run writes only into its own"
        " folder"
    )
    free = f"log.name={free_name(folder)}"
    if link == folder and os.path.isdir(folder):
        free = f"{override('checkpoint.resume', os.path.realpath(folder))}, or {free}"
    raise ConfigError.of("MT501", "log.name", folder.name, rule, free)


@dataclass(frozen=True)
class _Held:
    """A run folder that this process owns."""

    descriptor: int
    lock: locks.Lock

    def release(self) -> None:
        """Let another process own the folder."""
        self.lock.release()
        os.close(self.descriptor)


def _claim(folder: Path, patience_s: float) -> _Held | str:
    """Own a folder, or after `patience_s` return in words the process that owns it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    deadline = time.monotonic() + patience_s
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    while True:
        try:
            held = _Held(descriptor, locks.lock(descriptor, path))
            break
        except locks.Taken as taken:
            if time.monotonic() > deadline:
                os.close(descriptor)
                return taken.owner or _owner(folder)
            time.sleep(locks.POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
    # for the message of a process that finds the folder taken
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return held


def _owner(folder: Path) -> str:
    try:
        return (folder / LOCK_FILE).read_text().strip() or "another process"
    except OSError:
        return "another process"


def is_begun(folder: Path) -> bool:
    """Return whether a run made a step or saved a file in a folder."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        return True
    metrics = folder / METRICS
    foreign = any(p.name not in PREAMBLE for p in folder.iterdir())
    return foreign or (metrics.is_file() and metrics.stat().st_size > 0)


def _set_aside(chosen: Plan) -> None:
    """Rename checkpoints later than the resumed one: the run takes another course from there."""
    if chosen.checkpoint is None:
        return
    for later in ckpt_folder.committed(chosen.folder / CHECKPOINTS):
        if ckpt_folder.step_of(later) > ckpt_folder.step_of(chosen.checkpoint):
            later.rename(later.with_name(f".superseded-{later.name}"))


def _describe(run: RunConfig, chosen: Plan, argv: list[str], launch: str | None) -> None:
    """Write run.yaml, overrides.txt, env.json and plan.json; a resume numbers the old run.yaml."""
    folder = chosen.folder
    current = chosen.folder / RUN_FILE
    draft = folder / f".{RUN_FILE}"
    products = matmul.reason(run)
    why = kernels.reasons(run, Machine.here()) | ({"cpu_matmul": products} if products else {})
    draft.write_text(
        run_yaml(anchored(run).recorded(), {f"kernels.{name}": text for name, text in why.items()})
    )
    durable.sync(draft)
    if current.exists() and not chosen.new:
        number = len(list(folder.glob("run.*.yaml"))) + 1
        _keep(current, folder / f"run.{number}.yaml")
    draft.replace(current)
    (folder / "overrides.txt").write_text("\n".join(argv) + "\n")
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "launch": launch,
        # A run file in another folder may not enable hooks, which are code, or name a server.
        "home": os.path.realpath(folder),
        "hooks": list(run.log.hooks),
        "reward_url": run.rollout.reward_url,
    }
    (folder / ENVIRONMENT).write_text(strict_json.dumps(facts, indent=1))
    (folder / PLAN).write_text(strict_json.dumps(_planned(run, chosen, why), indent=1))
    # the peaks of an earlier start, whose layout may differ
    (folder / PEAKS).unlink(missing_ok=True)


def _keep(file: Path, name: Path) -> None:
    """Keep a file under another name before it is replaced."""
    if not durable.linked(file, name):
        shutil.copyfile(file, name)
        durable.sync(name)


def versions() -> dict[str, str | None]:
    """Return the versions of the packages of a run; None for a package without metadata."""
    return {name: version_of(name) for name in PACKAGES} | {"megatron-core": engine.version()}


def _planned(run: RunConfig, chosen: Plan, why: dict[str, str]) -> dict[str, Any]:
    grid = RankGrid.of(run)
    tokens = run.trainer.batch * run.data.length
    return {
        "digest": run.digest(),
        "parameters": parameters(run.model),
        "adapter_parameters": sum(adapter_parameters(run)),
        "ranks": grid.world,
        "layout": grid.sizes,
        "tokens": samples_of(stages(run), run.trainer.steps) * run.data.length,
        "steps_and_their_samples": counted(stages(run), run.trainer.steps),
        "model_flops_per_step": flops_of_token(run) * tokens,
        "state_bytes": state_bytes(run),
        "planned": planned(run),
        "kernels": {
            name: {"choice": getattr(run.kernels, name), "reason": text}
            for name, text in why.items()
        },
        "resumed_from": str(chosen.checkpoint) if chosen.checkpoint else None,
        "changes": list(chosen.changes),
    }


def _new_folder(run: RunConfig, launch: str | None) -> Path:
    root = Path(run.log.runs_dir).expanduser()
    if run.log.name is not None:
        folder = root / run.log.name
        if is_begun(folder):
            how = "latest"
            by = ""
            if launch is not None and run.checkpoint.resume is None:
                how = resume.AUTO
                by = f", begun by {resume.launch_of(folder) or 'hand'} and not by {launch}"
            fix = f"checkpoint.resume={how}, or log.name={free_name(folder)}"
            raise _occupied(folder, f"exists already{by}", fix)
        return folder
    layout = str(RankGrid.of(run)).replace(" ", "") if RankGrid.of(run).world > 1 else "single"
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{run.model.name}-{layout}"
    return root / free_name(folder) if folder.exists() else folder


def free_name(folder: Path) -> str:
    """Return the name of a folder with the first number that no other folder has."""
    number = 2
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return f"{folder.name}-{number}"


def _occupied(folder: Path, what: str, fix: str) -> ConfigError:
    rule = f"cannot be used because the run folder {folder} {what}"
    return ConfigError.of("MT501", "log.name", folder.name, rule, fix)
