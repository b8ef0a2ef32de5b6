"""`check --all`: every model in every layout, number format and cluster that ships: which can launch, and why not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtrain.config.batches import NO_RAMP
from mtrain.config.compose import compose
from mtrain.config.paths import choices_of_group, recipes_dir
from mtrain.config.resolve import Machine, resolve
from mtrain.config.rules import findings
from mtrain.config.rules.finding import dp_of
from mtrain.config.run import RunConfig
from mtrain.config.sweep import jobs
from mtrain.errors import BadInput, Problem
from mtrain.plan.count import state_bytes
from mtrain.recipes.write import section
from mtrain.units import GIB, bytes_

AXES = ("model", "parallel", "precision", "cluster")
MEMORY = "memory"
"""The reason of a combination whose state alone is larger than the memory of its devices."""


@dataclass(frozen=True)
class Verdict:
    """One combination."""

    model: str
    parallel: str
    precision: str
    cluster: str
    ok: bool
    code: str = ""
    rule: str = ""


def run(argv: Sequence[str], *, as_json: bool = False) -> int:
    """Judges every combination and prints a table; 0, whatever the verdicts.

    Choices in `argv`, also several of a group as in `model=glob(llama3*)`, narrow the table; other overrides hold for
    every combination.

    Raises:
        BadInput: a choice does not exist, or an override is refused.
    """
    axes, base = _asked(argv)
    verdicts = list(judged(axes, base, Machine.here()))
    print(json.dumps([asdict(v) for v in verdicts], indent=1) if as_json else _table(verdicts, axes))
    return 0


def shipped() -> dict[str, list[str]]:
    """What there is of each axis; layouts are the files, and those of the shared recipes under the recipe's name."""
    axes = {axis: choices_of_group(axis) for axis in AXES}
    files = sorted(recipes_dir().rglob("*.yaml"))
    axes["parallel"] += [file.relative_to(recipes_dir()).with_suffix("").as_posix() for file in files]
    return axes


def _part(axis: str, name: str) -> Any:
    """The section of a choice; a layout with a slash in its name is the one of that recipe."""
    if axis == "parallel" and "/" in name:
        return compose([f"recipe={name}"]).run.parallel
    return section(axis, name)


def judged(axes: dict[str, list[str]], base: RunConfig, machine: Machine) -> Iterator[Verdict]:
    """The verdict of each combination, with the smallest batch that its layout can take."""
    sections = {(axis, name): _part(axis, name) for axis in AXES for name in axes[axis]}
    for choice in itertools.product(*(axes[axis] for axis in AXES)):
        parts = {axis: sections[axis, name] for axis, name in zip(AXES, choice, strict=True)}
        longest = min(base.data.seq_length, parts["model"].max_position_embeddings)
        parts["data"] = base.data.model_copy(update={"seq_length": longest})
        raw = base.model_copy(update=parts)
        batch = dp_of(resolve(raw, machine)) * raw.parallel.pp
        small = {"global_batch_size": batch, "micro_batch_size": 1, **NO_RAMP}
        trainer = base.trainer.model_copy(update=small)
        run = resolve(raw.model_copy(update={"trainer": trainer}), machine)
        yield Verdict(*choice, *_verdict(run, machine))


def _verdict(run: RunConfig, machine: Machine) -> tuple[bool, str, str]:
    broken = next((f for f in findings(run) if f.severity == "error"), None)
    if broken is not None:
        return False, broken.code, f"{broken.path}: {broken.rule}"
    need = state_bytes(run) / (run.parallel.ranks or 1)
    here = (run.cluster.device_memory_gib or 0) * GIB
    if run.cluster.device == "cpu":
        need, here = state_bytes(run), machine.memory_bytes
    if here and need > here:
        where = "the machine" if run.cluster.device == "cpu" else "a device"
        rule = f"weights, gradients and optimizer state need at least {bytes_(need)}, and {where} has {bytes_(here)}"
        return False, MEMORY, rule
    return True, "", ""


def _asked(argv: Sequence[str]) -> tuple[dict[str, list[str]], RunConfig]:
    """The choices of each axis, and the rest of the configuration."""
    axes, rest = shipped(), list[str]()
    for argument in argv:
        group = argument.partition("=")[0]
        if group not in AXES:
            rest.append(argument)
            continue
        axes[group] = [job.argv[0].partition("=")[2] for job in jobs([argument])]
        for name in axes[group]:
            compose([f"{group}={name}"])  # a name that is none is refused here
    if any(word.startswith(("recipe=", "run=")) for word in rest):
        rule = "--all takes the choices that ship, one by one; a recipe or a run file is one choice of all"
        raise BadInput([Problem("MT010", "", None, rule, "check, without --all", "command line")])
    return axes, compose(["data=mock", *rest]).run


def _table(verdicts: Sequence[Verdict], axes: dict[str, list[str]]) -> str:
    """A row for each model and layout, a column for each cluster; a cell has the formats that work, or the reason."""
    cells: dict[tuple[str, str, str], list[Verdict]] = {}
    for v in verdicts:
        cells.setdefault((v.model, v.parallel, v.cluster), []).append(v)
    rows = [("model", "layout", *axes["cluster"])]
    for model, layout in itertools.product(axes["model"], axes["parallel"]):
        rows.append((model, layout, *(_cell(cells[model, layout, cluster]) for cluster in axes["cluster"])))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    examples: dict[str, Verdict] = {}
    for v in verdicts:
        if not v.ok:
            examples.setdefault(v.code, v)
    lines += ["", *(_example(code, examples[code]) for code in sorted(examples))]
    good = sum(v.ok for v in verdicts)
    formats = ", ".join(axes["precision"])
    return "\n".join([*lines, f"{good} of {len(verdicts)} combinations can launch (ok: with {formats})"])


def _cell(verdicts: Sequence[Verdict]) -> str:
    good = [v.precision for v in verdicts if v.ok]
    if len(good) == len(verdicts):
        return "ok"
    return "+".join(good) if good else verdicts[0].code


def _example(code: str, v: Verdict) -> str:
    return f"{code:<6} such as {v.model} {v.parallel} {v.precision} {v.cluster}: {v.rule}"
