"""The judgement on a checkpoint: every reason why a run cannot continue from it, and every change.

The pure function `judge` takes the run, and the configuration and manifest of the checkpoint. A run
calls `examined` before any rank starts, and so does `checkpoint verdict`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.ckpt import folder
from mtrain.ckpt.local import PART
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import RUN_FILE
from mtrain.config.engine.formats import is_half
from mtrain.config.messages.keys import effect_of
from mtrain.config.resolve.rates import LENGTH, goes_on_alike, new_curve
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, CorruptData, Problem, show
from mtrain.launching.resume import Differences, differences_of, without_adapters
from mtrain.launching.verdict.damage import damage
from mtrain.launching.verdict.tensors import needed
from mtrain.layout.grid import RankGrid

MOST_TENSORS = 4
"""Tensors that one problem names."""


@dataclass(frozen=True)
class Judgement:
    """The reasons why a run cannot continue from a checkpoint, and what changes if it does."""

    problems: tuple[Problem, ...] = ()
    """Differences that cannot be continued; exit code 2."""
    damage: tuple[str, ...] = ()
    """Files that are not as they were written; exit code 4."""
    changes: tuple[str, ...] = ()
    """Keys that differ, as `key: old -> new`."""
    numbers: tuple[str, ...] = ()
    """Reasons why the run ends with other bits than an uninterrupted one."""
    resets: tuple[str, ...] = ()
    """State that starts anew."""

    @property
    def possible(self) -> bool:
        """Return whether a run continues."""
        return not (self.problems or self.damage)

    def refuse(self) -> None:
        """Refuse to continue where that is impossible.

        Raises:
            CorruptData: files are damaged.
            ConfigError: the run cannot continue that of the checkpoint.
        """
        if self.damage:
            raise CorruptData(*self.damage)
        if self.problems:
            raise ConfigError(self.problems)


def examined(run: RunConfig, checkpoint: Path) -> Judgement:
    """Read the manifest, the configuration and the headers of a checkpoint, and judge it.

    Raises:
        CorruptData: the checkpoint has no manifest that can be read.
        BadEnvironment: a file may not be read.
        ConfigError: its `run.yaml` is as written, and no configuration of this version.
    """
    manifest = folder.parse_manifest(checkpoint)
    lines = damage(checkpoint, manifest)
    # A damaged configuration is no source of reasons.
    if speaks_of(lines, checkpoint / RUN_FILE):
        return Judgement(damage=tuple(lines))
    source = checkpoint / RUN_FILE
    return judge(run, read_run_file(source), manifest, source=source, damage=lines)


def speaks_of(lines: Iterable[str], file: Path) -> bool:
    """Return whether a line about damage names a file."""
    return any(str(file) in line for line in lines)


def judge(
    run: RunConfig,
    other: RunConfig,
    manifest: Mapping[str, Any],
    *,
    source: Path,
    damage: Iterable[str] = (),
) -> Judgement:
    """Return the judgement on a resume.

    Args:
        run: the resolved run that continues.
        other: the configuration of the checkpoint.
        manifest: the JSON of the checkpoint.
        source: the file of `other`, for messages.
        damage: lines about damaged files.
    """
    step = int(manifest["step"])
    # imported weights were trained elsewhere: only the model itself has to agree
    trained = not manifest["state"].get("weights_only")
    if trained:
        differences = differences_of(run, other, *Effect)
    else:
        differences = without_adapters(differences_of(run, other, Effect.ARCHITECTURE), other)
    problems = _of_keys(run, other, differences, step, source)
    # Another model lacks most tensors, and its keys name the reason; so does damage.
    damage = tuple(damage)
    part = PART in manifest["state"]
    if not (part or damage or any(effect_of(key) is Effect.ARCHITECTURE for key in differences)):
        problems += _of_tensors(run, other, manifest, source.parent)
    changes = tuple(f"{key}: {show(old)} -> {show(new)}" for key, (old, new) in differences.items())
    numbers = (*_numbers(differences), *_rounded(run, other)) if trained else ()
    return Judgement(tuple(problems), damage, changes, numbers, _resets(run, other, manifest))


def changes_of(run: RunConfig, home: Path) -> tuple[str, ...]:
    """Refuse differences from a run folder without a checkpoint that cannot be continued; return
    the others as `key: old -> new`.

    Raises:
        ConfigError: some cannot be continued.
    """
    source = home / RUN_FILE
    if not source.is_file():
        return ()
    other = read_run_file(source)
    differences = differences_of(run, other, *Effect)
    problems = _of_keys(run, other, differences, 0, source)
    if problems:
        raise ConfigError(problems)
    return tuple(f"{key}: {show(old)} -> {show(new)}" for key, (old, new) in differences.items())


def _of_keys(
    run: RunConfig, other: RunConfig, differences: Differences, step: int, source: Path
) -> list[Problem]:
    """Return a problem for each key that must not differ."""
    accepts = run.checkpoint.accept_changes
    longer = run.trainer.steps > other.trainer.steps
    free = LENGTH if longer and goes_on_alike(run, other, step) else ()
    problems = []
    for key, (old, new) in differences.items():
        effect = effect_of(key)
        where = f"{source} has {show(old)}"
        if effect is Effect.ARCHITECTURE:
            problems.append(Problem("MT503", key, new, where, f"{key}={show(old)}"))
        elif key == LENGTH[0] and longer and key not in free and not accepts:
            rule = (
                f"the run has {old} steps, of which {step} are made: {new_curve(run, other, step)}"
            )
            fix = f"checkpoint.accept_changes=true to continue with that curve, or {key}={old}"
            problems.append(Problem("MT504", key, new, rule, fix))
        elif effect is Effect.NUMERICS and key not in free and not accepts:
            fix = (
                f"{key}={show(old)}, or checkpoint.accept_changes=true to continue with the new"
                " value"
            )
            problems.append(Problem("MT504", key, new, where, fix))
    return problems


def _of_tensors(
    run: RunConfig, other: RunConfig, manifest: Mapping[str, Any], checkpoint: Path
) -> list[Problem]:
    """Return a problem for missing tensors, and one for tensors of other shapes."""
    held = manifest["tensors"]
    wanted = needed(run, weights_only=bool(manifest["state"].get("weights_only"))).shapes
    lacking = [name for name in wanted if name not in held]
    shaped = [
        f"{name} {list(held[name].get('shape', ()))} there, {list(shape)} here"
        for name, shape in wanted.items()
        if name in held and list(held[name].get("shape", ())) != list(shape)
    ]
    key, fix = _cause(run, other)
    problems = []
    for found, what in ((lacking, "lacks"), (shaped, "has in other shapes")):
        if found:
            named = ", ".join(found[:MOST_TENSORS]) + (", ..." if len(found) > MOST_TENSORS else "")
            rule = f"{checkpoint} {what} {len(found)} of {len(wanted)} tensors: {named}"
            problems.append(Problem("MT512", key, run.flat().get(key), rule, fix))
    return problems


def _cause(run: RunConfig, other: RunConfig) -> tuple[str, str]:
    """Return the key that decides which state there is, if it differs, and what to use."""
    here = run.flat()
    there = other.flat()
    own = [key for key in here if key.startswith(f"optim.{run.optim.name}.")]
    for key in ("precision.dtype", *own):
        old = there.get(key)
        if here.get(key) != old:
            return key, f"{key}={show(old)}, or checkpoint.init_from for only the weights"
    return "", "checkpoint.init_from=CHECKPOINT, for only the weights"


def _numbers(differences: Differences) -> list[str]:
    """Return the changes of the numbers: keys, and the order of sums."""
    said = []
    apart = []
    for key, (old, new) in differences.items():
        effect = effect_of(key)
        if effect in (Effect.NUMERICS, Effect.CONTENTS) and key != "checkpoint.resume":
            said.append(f"{key}: {show(old)} -> {show(new)}")
        elif effect is Effect.PARALLELISM:
            apart.append(key)
    if apart:
        said.append(f"sums are added in another order ({', '.join(apart)})")
    return said


def _rounded(run: RunConfig, other: RunConfig) -> list[str]:
    """Return the effect of another number format on the weights."""
    old = other.precision.format
    if not is_half(old) or is_half(run.precision.format):
        return []
    return [f"weights go on from their values in {old}, not from the main weights"]


def _resets(run: RunConfig, other: RunConfig, manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the state that starts anew."""
    state = manifest["state"]
    if state.get("weights_only"):
        return ("optimizer state, schedule, data position, step and RNG state: only weights",)
    found = []
    if why := rng_resets(run, other, state):
        found.append(f"RNG state: {why}, so generators start from the seed and the step")
    scaled = bool(state.get("loss_scale"))
    if scaled and run.precision.format != "fp16":
        found.append("loss scale: this run has none")
    if not scaled and run.precision.format == "fp16":
        found.append("loss scale: the checkpoint has none, so it starts at its first value")
    return tuple(found)


def rng_resets(run: RunConfig, other: RunConfig, state: Mapping[str, Any]) -> str:
    """Return why generators start anew; empty if their state is restored."""
    if state.get("grid") != sizes_of(run):
        return "the layout changed"
    if state.get("streams") != folder.STREAMS:
        return "the ranks of this older checkpoint all drew alike"
    if run.cluster.device != other.cluster.device:
        return "the device changed"
    return ""


def sizes_of(run: RunConfig) -> dict[str, int]:
    """Return the size of every axis of a layout; empty for one that rules refuse."""
    try:
        return RankGrid.of(run).sizes
    except ValueError:
        return {}
