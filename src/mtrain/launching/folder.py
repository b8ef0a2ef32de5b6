"""The run folder: who owns it, what is written into it before the first rank starts, and what is resumed from."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder as ckpt_folder
from mtrain.config.base import Effect
from mtrain.config.dump import run_yaml
from mtrain.config.load import read_run_file
from mtrain.config.run import RunConfig, effect_of
from mtrain.errors import BadInput, Problem, show
from mtrain.layout.grid import RankGrid
from mtrain.plan.count import flops_per_token, parameters, state_bytes

RUN_FILE = "run.yaml"
LOCK_FILE = ".lock"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Plan:
    """Where a run will write, and the checkpoint it goes on from; nothing is on disk yet."""

    folder: Path
    checkpoint: Path | None = None
    changes: tuple[str, ...] = ()
    """Keys that differ from the checkpoint's configuration, for the record."""


def plan(run: RunConfig) -> Plan:
    """Decide the run folder, and what to resume from.

    Raises:
        BadInput: the folder is taken, there is nothing to resume from, or it was made by a configuration that
            this one cannot continue.
    """
    if run.checkpoint.resume is None:
        return Plan(_new_folder(run))
    found, checkpoint = _latest(run) if run.checkpoint.resume == "latest" else _named(run)
    changes = _judge(run, found, checkpoint)
    return Plan(found, checkpoint, changes)


@contextmanager
def opened(run: RunConfig, chosen: Plan, argv: list[str]) -> Iterator[Plan]:
    """Make the run folder and own it until the end: no second run may write to it.

    Raises:
        BadInput: another process owns it.
    """
    folder = chosen.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _occupied(
            folder, f"cannot be written: {error.strerror}", "log.runs_dir=<a folder you may write to>"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            raise _occupied(folder, f"is in use by {owner or 'another process'}", "log.name=<another name>") from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode())
        _describe(run, folder, argv, chosen)
        yield chosen
    finally:
        os.close(descriptor)


def _describe(run: RunConfig, folder: Path, argv: list[str], chosen: Plan) -> None:
    """Write run.yaml, overrides.txt, env.json and plan.json; a resume keeps the earlier ones under a number."""
    previous = folder / RUN_FILE
    if previous.exists():
        number = len(list(folder.glob("run.*.yaml"))) + 1
        previous.replace(folder / f"run.{number}.yaml")
    previous.write_text(run_yaml(run))
    (folder / "overrides.txt").write_text("\n".join(argv) + "\n")
    versions = {
        name: metadata.version(name) for name in ("mtrain", "torch", "megatron-core", "pydantic", "hydra-core")
    }
    facts = {"python": platform.python_version(), "platform": platform.platform(), "versions": versions}
    (folder / "env.json").write_text(json.dumps(facts, indent=1))
    grid = RankGrid.of(run)
    planned: dict[str, Any] = {
        "digest": run.digest(),
        "parameters": parameters(run.model),
        "ranks": grid.world,
        "layout": grid.sizes,
        "tokens": run.trainer.train_iters * run.trainer.global_batch_size * run.data.seq_length,
        "model_flops_per_step": flops_per_token(run.model, run.data.seq_length)
        * run.trainer.global_batch_size
        * run.data.seq_length,
        "state_bytes": state_bytes(run),
        "resumed_from": str(chosen.checkpoint) if chosen.checkpoint else None,
        "changes": list(chosen.changes),
    }
    (folder / "plan.json").write_text(json.dumps(planned, indent=1))


def _new_folder(run: RunConfig) -> Path:
    root = Path(run.log.runs_dir).expanduser()
    if run.log.name is not None:
        folder = root / run.log.name
        if folder.exists() and (not folder.is_dir() or any(p.name != LOCK_FILE for p in folder.iterdir())):
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


def _occupied(folder: Path, what: str, fix: str) -> BadInput:
    return BadInput([Problem("MT501", "log.name", folder.name, f"the run folder {folder} {what}", fix)])


def _latest(run: RunConfig) -> tuple[Path, Path | None]:
    """The newest run of this configuration; failing that, the newest of this model and data."""
    root = Path(run.log.runs_dir).expanduser()
    names = [root / run.log.name] if run.log.name else sorted(root.glob("*"), key=_age, reverse=True)
    runs = [(folder, read_run_file(folder / RUN_FILE)) for folder in names if (folder / RUN_FILE).is_file()]
    if not runs:
        what = f"there is no run named {run.log.name} in {root}" if run.log.name else f"there is no run in {root}"
        raise _nothing("latest", what)
    same = [folder for folder, other in runs if not _differences(run, other)]
    alike = [folder for folder, other in runs if not _differences(run, other, Effect.SHAPE)]
    folder = (same or alike or [runs[0][0]])[0]
    return folder, _newest(folder)


def _age(folder: Path) -> float:
    file = folder / RUN_FILE
    return file.stat().st_mtime if file.is_file() else 0.0


def _named(run: RunConfig) -> tuple[Path, Path | None]:
    given = run.checkpoint.resume
    assert given is not None
    path = Path(given).expanduser()
    if (path / ckpt_folder.MANIFEST).is_file():
        home = path.parent.parent
        in_run = path.parent.name == CHECKPOINTS and (home / RUN_FILE).is_file()
        elsewhere = run.log.name is not None and run.log.name != home.name
        return (_new_folder(run) if elsewhere or not in_run else home), path
    if (path / RUN_FILE).is_file():
        return path, _newest(path)
    if not path.exists():
        raise _nothing(given, f"{path} does not exist")
    raise _nothing(
        given, f"{path} is neither a run folder (no {RUN_FILE}) nor a checkpoint (no {ckpt_folder.MANIFEST})"
    )


def _newest(folder: Path) -> Path | None:
    """The newest committed checkpoint of a run; None: it was stopped before the first, and starts again."""
    return next(reversed(ckpt_folder.committed(folder / CHECKPOINTS)), None)


def _nothing(given: str, what: str) -> BadInput:
    return BadInput([Problem("MT502", "checkpoint.resume", given, what, "checkpoint.resume=null for a new run")])


def _judge(run: RunConfig, folder: Path, checkpoint: Path | None) -> tuple[str, ...]:
    """Refuse what cannot be continued; return the other differences as `key: old -> new`."""
    source = (checkpoint or folder) / RUN_FILE
    if not source.is_file():
        return ()
    other = read_run_file(source)
    differences = _differences(run, other, *Effect)
    problems = []
    for key, (old, new) in differences.items():
        effect = effect_of(key)
        where = f"{source} has {show(old)}"
        if effect is Effect.SHAPE:
            problems.append(
                Problem("MT503", key, new, f"the checkpoint is of another model: {where}", f"{key}={show(old)}")
            )
        elif effect is Effect.NUMBERS and not run.checkpoint.accept_changes:
            fix = f"{key}={show(old)}, or checkpoint.accept_changes=true to go on with the new value"
            problems.append(Problem("MT504", key, new, f"changes the numbers of the resumed run: {where}", fix))
    if problems:
        raise BadInput(problems)
    return tuple(f"{key}: {show(old)} -> {show(new)}" for key, (old, new) in differences.items())


def _differences(run: RunConfig, other: RunConfig, *effects: Effect) -> dict[str, tuple[object, object]]:
    """Keys whose values differ, of the given effects (default: those that change the weights that come out)."""
    wanted = effects or (Effect.SHAPE, Effect.NUMBERS, Effect.LAYOUT)
    mine, theirs = run.flat(), other.flat()
    skipped = {"checkpoint.resume", "checkpoint.accept_changes"}
    keys = [k for k in {**mine, **theirs} if k not in skipped and effect_of(k) in wanted]
    return {k: (theirs.get(k), mine.get(k)) for k in keys if theirs.get(k) != mine.get(k)}
