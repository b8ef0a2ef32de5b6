"""The run folder: who owns it, what is written into it before the first rank starts, and what is resumed from."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain import durable, strict_json
from mtrain.ckpt import folder as ckpt_folder
from mtrain.config import engine, kernels
from mtrain.config.base import Effect
from mtrain.config.batches import counted, samples_of, stages
from mtrain.config.dump import override, run_yaml
from mtrain.config.installed import version_of
from mtrain.config.keys import effect_of
from mtrain.config.paths import CHECKPOINTS, RUN_FILE, program
from mtrain.config.resolve import Machine
from mtrain.config.run import RunConfig
from mtrain.config.run_file import read_run_file
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, Problem, show
from mtrain.launching import matmul
from mtrain.launching.changes import anchored as anchored
from mtrain.launching.changes import differences_of, without_adapters
from mtrain.layout.grid import RankGrid
from mtrain.plan.compare import METRICS, PEAKS, PLAN, planned
from mtrain.plan.count import adapter_parameters, flops_of_token, parameters, state_bytes
from mtrain.world.stacks import ERRORS

LOCK_FILE = ".lock"
PREAMBLE = (
    LOCK_FILE,
    RUN_FILE,
    "overrides.txt",
    "env.json",
    "plan.json",
    "start.json",
    "tokenizer.json",
    ERRORS,
    METRICS,
)
PACKAGES = ("mtrain", "torch", "pydantic", "hydra-core")
"""Beside megatron-core, of which the module that is loaded counts."""


@dataclass(frozen=True)
class Plan:
    """Where a run will write, and the checkpoint it goes on from; nothing is on disk yet."""

    folder: Path
    checkpoint: Path | None = None
    changes: tuple[str, ...] = ()
    """Keys that differ from the checkpoint's configuration, for the record."""
    new: bool = True
    """The folder does not belong to an earlier run that goes on."""
    notes: tuple[str, ...] = ()
    """What the user should know of the choice."""
    weights: Path | None = None
    """The checkpoint whose weights alone a new run begins with, or a Hugging Face folder."""


def plan(run: RunConfig) -> Plan:
    """Decide the run folder, and what to resume from.

    Raises:
        ConfigError: the folder is taken, there is nothing to resume from, or it was made by a configuration that
            this one cannot continue.
        CorruptData: what was named is a checkpoint that was never committed, or whose `run.yaml` was altered.
    """
    if run.checkpoint.resume is None:
        new = _new_folder(run)
        refuse_links(new)
        return Plan(new, weights=_weights(run))
    notes: list[str] = []
    found, checkpoint = _latest(run, notes) if run.checkpoint.resume == "latest" else _named(run, notes)
    refuse_links(found)
    branches = checkpoint is not None and checkpoint.parent.parent != found
    try:
        changes = _validate(run, found, checkpoint)
    except ConfigError:
        if checkpoint is not None:  # what is refused may not be what was written
            ckpt_folder.read_manifest(checkpoint, verify=False)
        raise
    return Plan(found, checkpoint, changes, branches, tuple(notes))


@contextmanager
def opened(run: RunConfig, chosen: Plan, argv: list[str]) -> Iterator[Plan]:
    """Make the run folder and own it until the end: no second run may write to it.

    Yields the plan as it is once the folder is owned. Checkpoints behind the one that the run goes on from are set
    aside.

    Raises:
        ConfigError: another process owns it, or made it in the meantime.
        BadEnvironment: it cannot be written.
    """
    while True:
        refuse_links(chosen.folder)
        try:
            descriptor = _claim(chosen.folder)
        except OSError as error:
            raise BadEnvironment(f"the run folder {chosen.folder} cannot be written: {error.strerror}") from None
        if descriptor is not None and not (chosen.new and _begun(chosen.folder)):
            break
        owner = _owner(chosen.folder)
        if descriptor is not None:
            os.close(descriptor)
        if not chosen.new or run.log.name is not None:
            what = f"is in use by {owner}" if descriptor is None else "exists already"
            raise _occupied(chosen.folder, what, f"log.name={_free_name(chosen.folder)}")
        chosen = replace(chosen, folder=chosen.folder.with_name(_free_name(chosen.folder)))
    try:
        ckpt_folder.sweep(chosen.folder / CHECKPOINTS)
        if not chosen.new:
            chosen = plan(run)  # what was the newest may have changed before the folder was owned
            _set_aside(chosen)
        try:
            _describe(run, chosen, argv)
        except OSError as error:
            raise BadEnvironment(f"the run folder {chosen.folder} cannot be written: {error.strerror}") from None
        yield chosen
    finally:
        os.close(descriptor)


def refuse_links(folder: Path) -> None:
    """Refuses a run folder that is a symbolic link or holds one: what is written would land elsewhere.

    Raises:
        ConfigError: with the link.
    """
    entries = [folder, *(folder.iterdir() if folder.is_dir() else ())]
    link = next((entry for entry in entries if entry.is_symlink()), None)
    if link is None:
        return
    rule = f"{link} is a symbolic link; a run folder neither is one nor holds one, for a run writes only into itself"
    free = f"log.name={_free_name(folder)}"
    if link == folder and os.path.isdir(folder):
        free = f"{override('checkpoint.resume', os.path.realpath(folder))}, or {free}"
    raise ConfigError([Problem("MT501", "log.name", folder.name, rule, free)])


def _claim(folder: Path) -> int | None:
    """A descriptor that owns the folder as long as it is open; None: another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return descriptor


def _owner(folder: Path) -> str:
    try:
        return (folder / LOCK_FILE).read_text().strip() or "another process"
    except OSError:
        return "another process"


def _begun(folder: Path) -> bool:
    """Whether a run made a step or saved anything in a folder; one that failed before may be used again."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        return True
    metrics = folder / METRICS
    foreign = any(p.name not in PREAMBLE for p in folder.iterdir())
    return foreign or (metrics.is_file() and metrics.stat().st_size > 0)


def _set_aside(chosen: Plan) -> None:
    """Take checkpoints behind the chosen one out of the way: the run takes another course from there."""
    if chosen.checkpoint is None:
        return
    for later in ckpt_folder.committed(chosen.folder / CHECKPOINTS):
        if ckpt_folder.step_of(later) > ckpt_folder.step_of(chosen.checkpoint):
            later.rename(later.with_name(f".superseded-{later.name}"))


def _describe(run: RunConfig, chosen: Plan, argv: list[str]) -> None:
    """Write run.yaml, overrides.txt, env.json and plan.json; a resume keeps the earlier run.yaml under a number."""
    folder, current = chosen.folder, chosen.folder / RUN_FILE
    draft = folder / f".{RUN_FILE}"
    products = matmul.reason(run)
    why = kernels.reasons(run, Machine.here()) | ({"cpu_matmul": products} if products else {})
    draft.write_text(run_yaml(anchored(run).recorded(), {f"kernels.{name}": text for name, text in why.items()}))
    durable.sync(draft)
    if current.exists() and not chosen.new:
        number = len(list(folder.glob("run.*.yaml"))) + 1
        os.link(current, folder / f"run.{number}.yaml")
    draft.replace(current)
    (folder / "overrides.txt").write_text("\n".join(argv) + "\n")
    facts = {"python": platform.python_version(), "platform": platform.platform(), "versions": versions()}
    (folder / "env.json").write_text(strict_json.dumps(facts, indent=1))
    (folder / PLAN).write_text(strict_json.dumps(_planned(run, chosen, why), indent=1))
    (folder / PEAKS).unlink(missing_ok=True)  # of the processes before, whose layout may have been another


def versions() -> dict[str, str | None]:
    """Versions of the packages that a run is made of; None of one without metadata."""
    return {name: version_of(name) for name in PACKAGES} | {"megatron-core": engine.version()}


def _planned(run: RunConfig, chosen: Plan, why: dict[str, str]) -> dict[str, Any]:
    grid, tokens = RankGrid.of(run), run.trainer.batch * run.data.length
    return {
        "digest": run.digest(),
        "parameters": parameters(run.model),
        "adapter_parameters": sum(adapter_parameters(run)),
        "ranks": grid.world,
        "layout": grid.sizes,
        "tokens": samples_of(stages(run), run.trainer.train_iters) * run.data.length,
        "steps_and_their_samples": counted(stages(run), run.trainer.train_iters),
        "model_flops_per_step": flops_of_token(run) * tokens,
        "state_bytes": state_bytes(run),
        "planned": planned(run),
        "kernels": {name: {"choice": getattr(run.kernels, name), "reason": text} for name, text in why.items()},
        "resumed_from": str(chosen.checkpoint) if chosen.checkpoint else None,
        "changes": list(chosen.changes),
    }


def _new_folder(run: RunConfig) -> Path:
    root = Path(run.log.runs_dir).expanduser()
    if run.log.name is not None:
        folder = root / run.log.name
        if _begun(folder):
            raise _occupied(folder, "exists already", f"checkpoint.resume=latest, or log.name={_free_name(folder)}")
        return folder
    layout = str(RankGrid.of(run)).replace(" ", "") if RankGrid.of(run).world > 1 else "single"
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{run.model.name}-{layout}"
    return root / _free_name(folder) if folder.exists() else folder


def _free_name(folder: Path) -> str:
    number = 2
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return f"{folder.name}-{number}"


def _occupied(folder: Path, what: str, fix: str) -> ConfigError:
    return ConfigError([Problem("MT501", "log.name", folder.name, f"the run folder {folder} {what}", fix)])


def _latest(run: RunConfig, notes: list[str]) -> tuple[Path, Path | None]:
    """The newest run of this configuration; failing that, the newest whose checkpoints this model can continue."""
    root = Path(run.log.runs_dir).expanduser()
    names = [root / run.log.name] if run.log.name else sorted(root.glob("*"), key=_age, reverse=True)
    runs: list[tuple[Path, RunConfig]] = []
    for folder in names:
        if folder.is_symlink():
            notes.append(f"{folder} is a symbolic link; passed over")
        elif (folder / RUN_FILE).is_file():
            try:
                runs.append((folder, read_run_file(folder / RUN_FILE)))
            except ConfigError:
                notes.append(f"{folder / RUN_FILE} is no configuration of this version; passed over")
    if not runs:
        what = f"there is no run named {run.log.name} in {root}" if run.log.name else f"there is no run in {root}"
        raise _nothing("latest", what)
    same = [folder for folder, other in runs if not differences_of(run, other)]
    alike = [folder for folder, other in runs if not differences_of(run, other, Effect.ARCHITECTURE)]
    if not (same or alike or run.log.name):
        raise _nothing("latest", f"no run in {root} has this model; the newest is {runs[0][0]}")
    candidates = same or alike or [runs[0][0]]
    folder = next((f for f in candidates if ckpt_folder.committed(f / CHECKPOINTS)), candidates[0])
    return folder, _newest(folder, notes)


def _age(folder: Path) -> float:
    file = folder / RUN_FILE
    return file.stat().st_mtime if file.is_file() else 0.0


def _named(run: RunConfig, notes: list[str]) -> tuple[Path, Path | None]:
    given = run.checkpoint.resume
    assert given is not None
    path = Path(given).expanduser()
    if (path / ckpt_folder.MANIFEST).is_file():
        home = path.parent.parent
        in_run = path.parent.name == CHECKPOINTS and (home / RUN_FILE).is_file()
        elsewhere = run.log.name is not None and run.log.name != home.name
        return (_new_folder(run) if elsewhere or not in_run else home), path
    if path.parent.name == CHECKPOINTS and path.exists():
        raise CorruptData(f"{path} is not a committed checkpoint: it has no {ckpt_folder.MANIFEST}")
    if (path / RUN_FILE).is_file():
        return path, _newest(path, notes)
    if not path.exists():
        raise _nothing(given, f"{path} does not exist")
    neither = f"{path} is neither a run folder (no {RUN_FILE}) nor a checkpoint (no {ckpt_folder.MANIFEST})"
    raise _nothing(given, neither)


def _newest(folder: Path, notes: list[str]) -> Path | None:
    """The newest committed checkpoint of a run; None: it was stopped before the first, and starts again."""
    root = folder / CHECKPOINTS
    saved = ckpt_folder.committed(root)
    broken = [p for p in ckpt_folder.folders(root) if p not in saved and (not saved or p.name > saved[-1].name)]
    if broken:
        after = f"going on from {saved[-1].name}" if saved else "starting again"
        notes.append(f"{broken[-1]} has no {ckpt_folder.MANIFEST}, so it was not committed; {after}")
    return saved[-1] if saved else None


def _weights(run: RunConfig) -> Path | None:
    """What a new run begins with: the newest checkpoint of the folder that is named, or a Hugging Face folder.

    Raises:
        ConfigError: it has no checkpoint, or its model is another one.
    """
    start = run.checkpoint.init_from
    path = Path(start).expanduser() if start is not None else None
    known = path is not None and any((path / name).is_file() for name in (RUN_FILE, ckpt_folder.MANIFEST))
    if run.peft.init_from is not None and (path is None or known):
        raise _adapters_alone(run)
    if path is None or not known:
        return path
    found = path if (path / ckpt_folder.MANIFEST).is_file() else _newest(path, [])
    if found is None:
        rule = f"{path} has no checkpoint yet"
        raise ConfigError([Problem("MT502", "checkpoint.init_from", start, rule, "checkpoint.init_from=null")])
    other = read_run_file(found / RUN_FILE)
    if other.peft.kind is not None and run.peft.kind is None:
        raise _adapters_left_out(found, start)
    differences = without_adapters(differences_of(run, other, Effect.ARCHITECTURE), other)
    if differences:
        where = f"the weights in {found} are of another model: there it is"
        raise ConfigError(
            Problem("MT503", key, new, f"{where} {show(old)}", f"{key}={show(old)}")
            for key, (old, new) in differences.items()
        )
    return found


def _adapters_left_out(found: Path, start: str | None) -> ConfigError:
    rule = f"the weights in {found} have adapters, and peft.kind is null: what they have learned would be lost"
    fix = f"peft=lora, or {program()} convert export {found} HF_DIR and checkpoint.init_from=HF_DIR, which is merged"
    return ConfigError([Problem("MT503", "checkpoint.init_from", start, rule, fix)])


def _adapters_alone(run: RunConfig) -> ConfigError:
    rule = "adapters of `peft` are read together with the Hugging Face folder that they are for"
    fix = "checkpoint.init_from=HF_DIR"
    return ConfigError([Problem("MT521", "peft.init_from", run.peft.init_from, rule, fix)])


def _nothing(given: str, what: str) -> ConfigError:
    return ConfigError([Problem("MT502", "checkpoint.resume", given, what, "checkpoint.resume=null for a new run")])


def _validate(run: RunConfig, folder: Path, checkpoint: Path | None) -> tuple[str, ...]:
    """Refuse what cannot be continued; return the other differences as `key: old -> new`."""
    source = (checkpoint or folder) / RUN_FILE
    if not source.is_file():
        return ()
    other = read_run_file(source)
    trained = checkpoint is None or not ckpt_folder.read_manifest(checkpoint, verify=False)["state"].get(
        "weights_only"
    )
    differences = differences_of(run, other, *(Effect if trained else (Effect.ARCHITECTURE,)))
    if not trained:
        differences = without_adapters(differences, other)
    problems = []
    for key, (old, new) in differences.items():
        effect = effect_of(key)
        where = f"{source} has {show(old)}"
        if effect is Effect.ARCHITECTURE:
            problems.append(
                Problem("MT503", key, new, f"the checkpoint is of another model: {where}", f"{key}={show(old)}")
            )
        elif effect is Effect.NUMERICS and not run.checkpoint.accept_changes:
            fix = f"{key}={show(old)}, or checkpoint.accept_changes=true to go on with the new value"
            problems.append(Problem("MT504", key, new, f"changes the numbers of the resumed run: {where}", fix))
    if problems:
        raise ConfigError(problems)
    return tuple(f"{key}: {show(old)} -> {show(new)}" for key, (old, new) in differences.items())
