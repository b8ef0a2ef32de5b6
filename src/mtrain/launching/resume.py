"""The resumed run folder and checkpoint, and the allowed differences of configurations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt import local as ckpt_local
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import CHECKPOINTS, ENVIRONMENT, RUN_FILE, program
from mtrain.config.messages.keys import effect_of
from mtrain.config.schema.base import Effect
from mtrain.config.schema.objective import DRAWN
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, CorruptData, Problem, show

# The value of `checkpoint.resume` that starts a run or resumes it, whichever applies
AUTO = "auto"


def same_start(run: RunConfig, launch: str | None, begun: Callable[[Path], bool]) -> Path | None:
    """Return the run folder that the same command began earlier; None: it began no run, so a new
    folder is due.

    With `log.name` it is the folder of that name, if the same launch began it or
    `checkpoint.resume=auto` requests it. Without, it is the newest run of the same launch and
    configuration.
    """
    root = Path(run.log.runs_dir).expanduser()
    if run.log.name is not None:
        folder = root / run.log.name
        ours = run.checkpoint.resume == AUTO or launch_of(folder) == launch
        return folder if ours and begun(folder) and (folder / RUN_FILE).is_file() else None
    # by time, and not by name, which a user may have chosen
    for folder in sorted(root.glob("*"), key=_age, reverse=True):
        if folder.is_symlink() or not (folder / RUN_FILE).is_file() or launch_of(folder) != launch:
            continue
        if begun(folder) and _is_same(run, folder):
            return folder
    return None


def launch_of(folder: Path) -> str | None:
    """Return the launch that started a folder's run, from its env.json; None if unknown."""
    try:
        launch = json.loads((folder / ENVIRONMENT).read_text())["launch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return launch if isinstance(launch, str) else None


def _is_same(run: RunConfig, folder: Path) -> bool:
    try:
        return _differs_nowhere(run, read_run_file(folder / RUN_FILE))
    except ConfigError:  # another version wrote it
        return False


def _differs_nowhere(run: RunConfig, other: RunConfig) -> bool:
    """Return whether two runs compute the same; an unset `cpu_matmul` is that of `other`."""
    if run.kernels.cpu_matmul in (None, "auto"):
        kernels = run.kernels.model_copy(update={"cpu_matmul": other.kernels.cpu_matmul})
        run = run.model_copy(update={"kernels": kernels})
    return not differences_of(run, other)


def latest(run: RunConfig, notes: list[str]) -> tuple[Path, Path | None]:
    """Return the newest run of this configuration, or of this model, with its checkpoint."""
    root = Path(run.log.runs_dir).expanduser()
    names = (
        [root / run.log.name] if run.log.name else sorted(root.glob("*"), key=_age, reverse=True)
    )
    runs: list[tuple[Path, RunConfig]] = []
    for folder in names:
        if folder.is_symlink():
            notes.append(f"{folder} is a symbolic link; passed over")
        elif (folder / RUN_FILE).is_file():
            try:
                runs.append((folder, read_run_file(folder / RUN_FILE)))
            except ConfigError:
                notes.append(
                    f"{folder / RUN_FILE} is no configuration of this version; passed over"
                )
    if not runs:
        if run.log.name:
            why = f"there is no run named {run.log.name} in {root}"
        else:
            why = f"there is no run in {root}"
        raise _nothing("latest", why)
    same = [folder for folder, other in runs if _differs_nowhere(run, other)]
    alike = [
        folder for folder, other in runs if not differences_of(run, other, Effect.ARCHITECTURE)
    ]
    if not (same or alike or run.log.name):
        raise _nothing("latest", f"no run in {root} has this model; the newest is {runs[0][0]}")
    candidates = same or alike or [runs[0][0]]
    # a run with a checkpoint rather than a newer one that stopped before its first
    folder = next((f for f in candidates if has_saved(f)), candidates[0])
    return folder, newest(folder, notes)


def _age(folder: Path) -> float:
    file = folder / RUN_FILE
    return file.stat().st_mtime if file.is_file() else 0.0


def named(run: RunConfig, notes: list[str]) -> tuple[Path | None, Path | None]:
    """Return the run folder (None: a new one) and the checkpoint that `checkpoint.resume` names."""
    given = run.checkpoint.resume
    assert given is not None
    path = Path(given).expanduser()
    if (path / ckpt_folder.MANIFEST).is_file():
        home = path.parent.parent
        in_run = path.parent.name == CHECKPOINTS and (home / RUN_FILE).is_file()
        elsewhere = run.log.name is not None and run.log.name != home.name
        return (None if elsewhere or not in_run else home), path
    if path.parent.name == CHECKPOINTS and path.exists():
        raise CorruptData(f"{path} is not a committed checkpoint: it has no {ckpt_folder.MANIFEST}")
    if (path / RUN_FILE).is_file():
        return path, newest(path, notes)
    if not path.exists():
        raise _nothing(given, f"{path} does not exist")
    neither = (
        f"{path} is neither a run folder (no {RUN_FILE}) nor a checkpoint (no"
        f" {ckpt_folder.MANIFEST})"
    )
    raise _nothing(given, neither)


def has_saved(folder: Path) -> bool:
    """Return whether a run has a checkpoint, which may be a local one."""
    return bool(ckpt_folder.committed(folder / CHECKPOINTS)) or ckpt_local.exist(folder)


def newest(folder: Path, notes: list[str]) -> Path | None:
    """Return a run's newest checkpoint, a local one if it is later and whole, or None."""
    shared = newest_shared(folder, notes)
    step = 0 if shared is None else ckpt_folder.step_of(shared)
    return ckpt_local.newest(folder, step, notes) or shared


def newest_shared(folder: Path, notes: list[str]) -> Path | None:
    """Return the newest committed checkpoint in a run folder; None if there is none."""
    root = folder / CHECKPOINTS
    saved = ckpt_folder.committed(root)
    broken = [
        p
        for p in ckpt_folder.folders(root)
        if p not in saved and (not saved or p.name > saved[-1].name)
    ]
    if broken:
        after = f"going on from {saved[-1].name}" if saved else "starting again"
        notes.append(
            f"{broken[-1]} has no {ckpt_folder.MANIFEST}, so it was not committed; {after}"
        )
    return saved[-1] if saved else None


def weights_of(run: RunConfig) -> Path | None:
    """Return the source of a new run's weights: a folder's newest checkpoint, or a Hugging Face
    folder.

    Raises:
        ConfigError: the folder has no checkpoint, or its model differs.
    """
    start = run.checkpoint.init_from
    path = Path(start).expanduser() if start is not None else None
    known = path is not None and any(
        (path / name).is_file() for name in (RUN_FILE, ckpt_folder.MANIFEST)
    )
    if run.peft.init_from is not None and (path is None or known):
        raise _adapters_without_model(run)
    if path is None or not known:
        return path
    checkpoint = path if (path / ckpt_folder.MANIFEST).is_file() else newest_shared(path, [])
    if checkpoint is None:
        rule = f"cannot start from {path} because it has no checkpoint yet"
        fix = "wait until it has saved one, or name another run or checkpoint"
        raise ConfigError.of("MT502", "checkpoint.init_from", start, rule, fix)
    other = read_run_file(checkpoint / RUN_FILE)
    if other.peft.kind is not None and run.peft.kind is None:
        raise _adapters_left_out(checkpoint, start)
    differences = without_adapters(differences_of(run, other, Effect.ARCHITECTURE), other)
    if other.model.head is None:
        differences.pop("model.head", None)
    if differences:
        where = f"{checkpoint / RUN_FILE} has"
        raise ConfigError(
            Problem("MT503", key, new, f"{where} {show(old)}", f"{key}={show(old)}")
            for key, (old, new) in differences.items()
        )
    return checkpoint


def _adapters_left_out(checkpoint: Path, start: str | None) -> ConfigError:
    rule = (
        f"cannot start without adapters because the weights in {checkpoint} have some, which would"
        " be lost with peft.kind=null"
    )
    fix = (
        f"peft=lora, or {program()} convert export {checkpoint} HF_DIR and"
        " checkpoint.init_from=HF_DIR, which is merged"
    )
    return ConfigError.of("MT503", "checkpoint.init_from", start, rule, fix)


def _adapters_without_model(run: RunConfig) -> ConfigError:
    rule = "cannot be read without the Hugging Face folder that the adapters were trained on"
    fix = "checkpoint.init_from=HF_DIR"
    return ConfigError.of("MT521", "peft.init_from", run.peft.init_from, rule, fix)


def _nothing(given: str, why: str) -> ConfigError:
    rule = f"cannot resume because {why}"
    fix = "leave out checkpoint.resume for a new run"
    return ConfigError.of("MT502", "checkpoint.resume", given, rule, fix)


# Key -> its value in the other configuration, and in this one
Differences = dict[str, tuple[object, object]]
# Section -> its keys with paths of input files
PATHS = {
    "data": (
        "path",
        "blend",
        "validation_blend",
        "test_blend",
        "megatron_cache",
        "tokenizer",
        "chat_template",
    ),
    "peft": ("init_from",),
    "objective": ("teacher", "critic"),
    "rollout": ("reward_model",),
    "checkpoint": ("init_from",),
}


def anchored(run: RunConfig) -> RunConfig:
    """Return the run with absolute paths, so that it means the same from any working directory."""
    sections = {}
    for name, keys in PATHS.items():
        section = getattr(run, name)
        sections[name] = section.model_copy(
            update={key: _absolute(getattr(section, key)) for key in keys}
        )
    return run.model_copy(update=sections)


def _absolute(path: Any) -> Any:
    """Return a path, or each of several, as absolute; URLs of object stores stay."""
    if isinstance(path, tuple):
        return tuple(_absolute(one) for one in path)
    # A word instead of a folder stays, too.
    kept = path is None or path.partition(":")[0] == DRAWN or "://" in path
    return path if kept else os.path.abspath(Path(path).expanduser())


def differences_of(run: RunConfig, other: RunConfig, *effects: Effect) -> Differences:
    """Return keys of the given effects whose values differ.

    The default is every effect that changes the resulting weights.
    """
    wanted = effects or (Effect.ARCHITECTURE, Effect.NUMERICS, Effect.CONTENTS, Effect.PARALLELISM)
    # absolute paths: a run started in another working folder names the same files differently
    left_values = anchored(run).recorded().flat()
    right_values = anchored(other).recorded().flat()
    keys = [k for k in {**left_values, **right_values} if effect_of(k) in wanted]
    return {
        k: (right_values.get(k), left_values.get(k))
        for k in keys
        if right_values.get(k) != left_values.get(k)
    }


def without_adapters(differences: Differences, other: RunConfig) -> Differences:
    """Return the differences that matter for adapters that start on the weights of `other`."""
    return {
        key: pair
        for key, pair in differences.items()
        if other.peft.kind or not key.startswith("peft.")
    }
