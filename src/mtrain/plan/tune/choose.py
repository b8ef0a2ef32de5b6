"""The choice of a layout for a run that leaves it open: which of the set keys stay, the problems
where no layout is found, and the reasons for a layout in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtrain.config.compose.origins import COMMAND_LINE, DEFAULT
from mtrain.config.engine.formats import bytes_of
from mtrain.config.machine.devices import facts_of
from mtrain.config.messages.problem import value_at
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import findings
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import ConfigError, Problem
from mtrain.models.registry import family_of
from mtrain.plan.count import frozen_parameters, parameters
from mtrain.plan.states import main_weight_bytes
from mtrain.plan.time.step import unknown
from mtrain.plan.tune.search import Found, Layout, Search, Task
from mtrain.plan.tune.space import KEYS, SPLIT, changed
from mtrain.units import GIB, bytes_, devices, number_of

Values = Mapping[str, Any]
AUTO = "parallel.auto"
GRANULARITY = "parallel.recompute.granularity"
BATCH = "trainer.global_batch_size"
# Where nothing fits, tune tries so many times the machines, and names the first that suffices.
MORE = (2, 4, 8, 16)


def said_of(
    run: UnresolvedRun, origins: Mapping[str, str], *, command_line: bool
) -> dict[str, Any]:
    """Return the keys of a layout set to non-null, by the command line only or by anyone."""
    known = {key: value_at(run, key) for key in (*KEYS, *SPLIT)}
    if known[GRANULARITY] == "auto":
        known[GRANULARITY] = None
    mine = {k: v for k, v in known.items() if origins.get(k, DEFAULT) != DEFAULT and v is not None}
    kept = {k: v for k, v in mine.items() if not command_line or origins[k] == COMMAND_LINE}
    return kept | (
        {"optim.cpu_offload": known["optim.cpu_offload"]} if known["optim.cpu_offload"] else {}
    )


def search(
    raw: UnresolvedRun, said: Values, machine: Machine, world_size: int | None, number: int
) -> tuple[Found, Task]:
    """Return the best layouts of an unresolved configuration, with its batch on all its ranks."""

    def resolved(run: UnresolvedRun) -> RunConfig:
        return resolve(run, machine, world_size)

    raw = cleared(raw, said)
    run = resolved(raw)
    raw = changed(
        raw, {"trainer.global_batch_size": run.trainer.batch, "parallel.ranks": run.parallel.ranks}
    )
    if lacks := unknown(run):
        ranks = run.parallel.ranks
        name = run.cluster.name
        those = number_of(ranks, "rank")
        rule = f"the layout is chosen by its time, which of {those} on {name} is not known without "
        fix = "cluster=h100x8"
        if facts_of(run.cluster.device).on_host:
            fix += (
                f", or the file that plan --calibrate RUN out=FILE.yaml makes of a run of {those}"
                " here"
            )
        raise ConfigError([Problem("MT256", "cluster.name", name, rule + ", ".join(lacks), fix)])
    if not described(run):
        rule = "the family does not say what its layers compute"
        fix = "parallel=tp2pp2, or a family that says so"
        raise ConfigError([Problem("MT254", "model.family", run.model.family, rule, fix)])
    memory = run.parallel.recompute.budget_gib or run.cluster.device_memory_gib
    task = Task(raw, resolved, said, None if memory is None else int(memory * GIB))
    return Search(task, run).best(number), task


def described(run: RunConfig) -> bool:
    """Return whether the model's family describes its computations and weights."""
    family = family_of(run.model)
    if run.peft.kind is not None and family.adapted is None:
        return False
    return family.stage is not None and family.weights is not None


def cleared(raw: UnresolvedRun, said: Values) -> UnresolvedRun:
    """Return `raw` with all searched keys at their defaults, except for those that were set."""
    again = type(raw.parallel.recompute).model_fields
    values: dict[str, Any] = {}
    for key in (*KEYS, *SPLIT):
        section = key.split(".")[0]
        name = key.rpartition(".")[2]
        fields = again if "recompute" in key else type(getattr(raw, section)).model_fields
        values[key] = said.get(key, fields[name].default)
    return changed(raw, {**values, AUTO: False})


def chosen(
    raw: UnresolvedRun, origins: Mapping[str, str], machine: Machine, world_size: int | None
) -> tuple[UnresolvedRun, dict[str, str]]:
    """Return `raw` with the fastest layout that fits its cluster, and a reason for every key of it.

    Where the rest of the configuration breaks a rule, nothing is searched, and the rule reports it.
    Where too little is known of the devices, as of a CPU, or of the layers, it is the plainest
    layout.

    Raises:
        ConfigError: nothing fits, or no layout keeps all rules.
    """
    said = said_of(raw, origins, command_line=False)
    plain = cleared(raw, said)
    reasons = dict[str, str]()
    run = resolve(plain, machine, world_size, why=reasons)
    if lacks := unknown(run):
        return plain, {AUTO: f"the plainest layout: no time is known without {lacks[0]}"}
    if not described(run):
        return plain, {
            AUTO: f"the plainest layout: {run.model.family} does not say what its layers compute"
        }
    found, task = search(raw, said, machine, world_size, 1)
    if not found.best:
        refuse(
            found, task, lambda more: search(changed(raw, more), said, machine, world_size, 1)[0]
        )
        return task.raw, {}
    change = {key: value for key, value in found.best[0].change.items() if key not in said}
    why = f"chosen by tune for cluster {run.cluster.name}"
    marked = {key: why for key, value in change.items() if value is not None} | {
        AUTO: "answered by tune"
    }
    # The layouts were searched for this batch.
    if raw.trainer.global_batch_size is None:
        change[BATCH] = task.raw.trainer.global_batch_size
        marked |= {key: reason for key, reason in reasons.items() if key == BATCH}
    return changed(plain, {**change, AUTO: False}), marked


def refuse(found: Found, task: Task, again: Any) -> None:
    """Report why there is no layout.

    Raises:
        ConfigError: with a fix; not where a rule is broken that no layout decides.
    """
    run = task.resolve(task.raw)
    p = run.parallel
    name = run.cluster.name
    near = found.nearest
    what = (
        f"{run.model.name} with {run.trainer.batch} samples of {run.data.length} tokens on"
        f" {devices(p.ranks, name)}"
    )
    if task.said:
        kept = f" that keeps {', '.join(f'{key} {value}' for key, value in task.said.items())}"
    else:
        kept = ""
    if near is None:
        wrong = [one for one in findings(run) if one.severity == "error"]
        ranks = p.ranks
        if found.wrong or any(one.path not in (*KEYS, *SPLIT, BATCH) for one in wrong):
            return
        rule = f"{what}: no layout{kept} keeps all rules"
        rule += f"; of the plainest: {wrong[0].rule}" if wrong else ""
        fix = f"leave out {' or '.join(task.said)}" if task.said else "parallel=single"
        if run.trainer.batch % ranks:
            fix = f"trainer.global_batch_size={-(-run.trainer.batch // ranks) * ranks}"
        raise ConfigError([Problem("MT258", AUTO, True, rule, fix)])
    need = near.memory.peak
    holds = task.holds or 0
    least = (
        f"the smallest, {near.words}, needs {bytes_(need)} of the {bytes_(round(task.room()))} that"
        " may be taken"
    )
    rule = f"{what}: no layout{kept} fits; {least} of {bytes_(holds)}"
    fix = ""
    for times in MORE:
        nodes = run.cluster.nodes * times
        if _least(run) > times * p.ranks * task.room():
            continue
        more = {"cluster.nodes": nodes, "parallel.ranks": None}
        if again(more).best:
            fix = f"cluster.nodes={nodes}"
            break
    raise ConfigError(
        [Problem("MT257", AUTO, True, rule, fix or "a smaller model, or devices with more memory")]
    )


def _least(run: RunConfig) -> int:
    """Return a lower bound of a layout's bytes: weights over all devices, and gradients and main
    weights of trained ones, each once. Only moments can be offloaded.
    """
    p = run.precision
    all_trained = run.peft.kind is None and not frozen_parameters(run.model)
    gradient = bytes_of("fp32" if p.grad_reduce_in_fp32 else p.format)
    each = bytes_of(p.format) + all_trained * (gradient + main_weight_bytes(run))
    return parameters(run.model) * each


PARTS = {
    "gemm": "matrix products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "host": "waits for the host",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert-parallel communication",
    "pp": "sends between stages",
    "bubble": "the pipeline bubble",
    "reference": "forwards of a reference or teacher",
    "critic": "the step of the critic",
    "dp": "data-parallel communication",
    "optimizer": "the optimizer",
    "offload": "the optimizer in host memory",
}
# A part that differs by less, as a share of a step, is not named: the model is not that exact.
ALIKE = 0.003


def _times(word: str, parts: list[str]) -> list[str]:
    """Return the parts that gain or lose time, as one gain or loss; empty without any."""
    if parts:
        return [f"{word} time for {' and '.join(PARTS.get(name, name) for name in parts)}"]
    return []


def part_words(layout: Layout) -> str:
    """Return the parts that take its time."""
    most = sorted(layout.time.parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{value / layout.seconds:.0%} {PARTS.get(name, name)}"
        for name, value in most[:4]
        if value > 0
    )


def reason(layout: Layout, first: Layout) -> str:
    """Return the gains and losses of a layout against the first one."""
    if layout is first:
        return f"the fastest that fits: {part_words(layout)}"
    slower = layout.seconds / first.seconds - 1
    own = layout.time.parts
    other = first.time.parts
    change = {name: own.get(name, 0.0) - other.get(name, 0.0) for name in {**other, **own}}
    more = sorted(
        (name for name in change if change[name] > ALIKE * first.seconds), key=lambda n: -change[n]
    )
    less = sorted(
        (name for name in change if change[name] < -ALIKE * first.seconds), key=lambda n: change[n]
    )
    takes = _times("more", more[:2])
    gives = _times("less", less[:2])
    spare = first.memory.peak - layout.memory.peak
    if abs(spare) > 0.01 * first.memory.peak:
        (gives if spare > 0 else takes).append(
            f"{abs(spare) / GIB:.1f} GiB {'less' if spare > 0 else 'more'} memory"
        )
    for key, gain in (
        ("pp", "fewer stages"),
        ("tp", "a smaller tp"),
        ("ep", "a smaller ep"),
        ("cp", "a smaller cp"),
    ):
        if not gives and getattr(layout.run.parallel, key) < getattr(first.run.parallel, key):
            gives.append(gain)
    gained = f"{', '.join(gives)}; " if gives else ""
    if takes:
        lost = f": {', '.join(takes)}"
    else:
        lost = ", in small parts" if slower >= 0.001 else ""
    return f"{gained}{_pace(slower)}{lost}"


def _pace(slower: float) -> str:
    """Return how much longer a step takes, as a share."""
    if abs(slower) < 0.0005:
        return "as fast"
    return f"{slower:.1%} slower" if slower > 0 else f"{-slower:.1%} faster"
