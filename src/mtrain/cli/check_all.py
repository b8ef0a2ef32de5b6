"""`check --all`: which shipped models, layouts, formats and clusters can launch together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mtrain import strict_json
from mtrain.cli.output import refusal
from mtrain.config.compose.choices import unknown_choice
from mtrain.config.compose.composer import compose
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.overrides import jobs
from mtrain.config.compose.paths import choices_of_group, recipe_names
from mtrain.config.compose.recipe import read_recipe
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.batches import NO_RAMP
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.rules import all_rules
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.config.schema.precision import PrecisionConfig, UnresolvedPrecision
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import ConfigError, say_page
from mtrain.plan.count import state_bytes
from mtrain.recipes.delta import section
from mtrain.units import GIB, bytes_

AXES = ("model", "parallel", "precision", "cluster")
# The reason of a combination whose state exceeds the memory of its devices; rules have codes.
MEMORY = "memory"

# A code and a sentence; both empty for a combination that can launch.
Reason = tuple[str, str]
FINE: Reason = ("", "")


@dataclass(frozen=True)
class Report:
    """One combination."""

    model: str
    parallel: str
    precision: str
    cluster: str
    ok: bool
    code: str = ""
    rule: str = ""


def validated(
    axes: Mapping[str, Sequence[str]], base: UnresolvedRun, machine: Machine
) -> Iterator[Report]:
    """Yield the report of each combination, with the smallest batch that its layout can take.

    A model and a layout on a number of machines are the same for every device and format:
    that is done once.
    """
    parts: dict[tuple[str, str], Any] = {
        (axis, name): part_of(axis, name) for axis in AXES for name in axes[axis]
    }
    formats = {
        pair: _formats(base, parts["precision", pair[0]], parts["cluster", pair[1]], machine)
        for pair in itertools.product(axes["precision"], axes["cluster"])
    }
    ranks: dict[Any, int] = {}
    for model, layout in itertools.product(axes["model"], axes["parallel"]):
        shaped: dict[Any, _Shaped] = {}
        for precision, name in itertools.product(axes["precision"], axes["cluster"]):
            cluster = parts["cluster", name]
            shape = (cluster.device, cluster.nodes, cluster.devices_per_node)
            if shape not in shaped:
                sections = {
                    "model": parts["model", model],
                    "parallel": parts["parallel", layout],
                    "cluster": cluster,
                }
                raw = base.model_copy(update=sections)
                if (layout, shape) not in ranks:
                    ranks[layout, shape] = resolve(raw, machine).parallel.ranks
                shaped[shape] = _Shaped(_smallest_batch(raw, ranks[layout, shape], machine))
            code, rule = shaped[shape].reason(formats[precision, name], cluster, machine)
            yield Report(model, layout, precision, name, not code, code, rule)


def part_of(axis: str, name: str) -> Any:
    """Return the section of a choice; the name of a recipe means its layout."""
    if (
        axis == "parallel"
        and name in recipe_names()
        and unknown_choice(axis, name, COMMAND_LINE) is not None
    ):
        return compose([f"recipe={name}"]).run.parallel
    return section(axis, name)


def _formats(
    base: UnresolvedRun, precision: UnresolvedPrecision, cluster: ClusterConfig, machine: Machine
) -> PrecisionConfig:
    return resolve(
        base.model_copy(update={"precision": precision, "cluster": cluster}), machine
    ).precision


def _smallest_batch(raw: UnresolvedRun, ranks: int, machine: Machine) -> RunConfig:
    """Return the resolved run with a micro-batch of one for each stage and data-parallel rank."""
    p = raw.parallel
    # With fewer micro-batches than stages, some stages would never work.
    batch = max(1, ranks // p.model_ranks) * p.pp
    trainer = raw.trainer.model_copy(
        update={"global_batch_size": batch, "micro_batch_size": 1, **NO_RAMP}
    )
    said = raw.data.seq_length
    data = raw.data
    if said is not None:
        data = data.model_copy(update={"seq_length": min(said, raw.model.max_position_embeddings)})
    return resolve(raw.model_copy(update={"trainer": trainer, "data": data}), machine)


# Rules that read one of these depend on the number format or the generation of the device.
FORMAT = ("precision", "cluster.sm")
_OF_FORMATS = {
    of: [rule for rule in all_rules() if rule.reads_any(*FORMAT) is of] for of in (False, True)
}


def _first(run: RunConfig, *, of_formats: bool) -> Reason:
    """Return the first error that the rules of formats, or all others, have."""
    # Rules that ignore formats run once for a model in a layout: the table has thousands of cells.
    for rule in _OF_FORMATS[of_formats]:
        for finding in rule(run):
            if finding.severity == "error":
                return finding.code, f"{finding.path}: {finding.rule}"
    return FINE


@dataclass
class _Shaped:
    """A model in a layout on a number of machines, and the verdict."""

    run: RunConfig
    plain: Reason | None = None
    by_format: dict[Any, Reason] = field(default_factory=dict)
    state: dict[Any, int] = field(default_factory=dict)

    def reason(
        self, precision: PrecisionConfig, cluster: ClusterConfig, machine: Machine
    ) -> Reason:
        """Return the first reason against one format on one cluster."""
        if self.plain is None:
            self.plain = _first(self.run, of_formats=False)
        if self.plain != FINE:
            return self.plain
        key = (precision.dtype, precision.quantized, cluster.sm)
        if key not in self.by_format:
            facts = self.run.cluster.model_copy(update={"sm": cluster.sm})
            run = self.run.model_copy(update={"precision": precision, "cluster": facts})
            self.by_format[key] = _first(run, of_formats=True)
            # The size of the state depends on the format of the weights, not on that of products.
            self.state[precision.dtype] = self.state.get(precision.dtype) or state_bytes(run)
        if self.by_format[key] != FINE:
            return self.by_format[key]
        return self._memory(self.state[precision.dtype], cluster, machine)

    def _memory(self, state: int, cluster: ClusterConfig, machine: Machine) -> Reason:
        need = state / self.run.parallel.ranks
        here = (cluster.device_memory_gib or 0) * GIB
        where = "a device"
        # Ranks on a CPU share the memory of this machine, so all of the state has to fit.
        if facts_of(self.run.cluster.device).on_host:
            need = state
            here = machine.memory_bytes
            where = "the machine"
        if not here or need <= here:
            return FINE
        rule = (
            f"weights, gradients and optimizer state need at least {bytes_(need)}, and {where} has"
            f" {bytes_(here)}"
        )
        return MEMORY, rule


# Above so many pairs of model and layout a table is a summary: nobody reads a longer one.
MOST_ROWS = 100
WORDS = {"model": "models", "parallel": "layouts", "precision": "formats", "cluster": "clusters"}


def run(argv: Sequence[str], *, as_json: bool = False) -> int:
    """Validate every combination and print a table, or a summary of very many; return 0, whatever
    the reports.

    Choices in `argv`, also several of a group as in `model=glob(llama3*)`, narrow the table; other
    overrides hold for every combination.

    Raises:
        ConfigError: a choice does not exist, or an override is refused.
    """
    axes, base = _asked(argv)
    reports = list(validated(axes, base, Machine.here()))
    if as_json:
        say_page(strict_json.dumps([asdict(report) for report in reports], indent=1))
    elif len(axes["model"]) * len(axes["parallel"]) <= MOST_ROWS:
        say_page(_table(reports, axes))
    else:
        say_page(summary(reports, axes))
    return 0


def shipped() -> dict[str, list[str]]:
    """Return the choices of each axis, without duplicates of another cluster or format.

    Layouts are the files, and, under a shared recipe's name, the layout that it writes itself.

    Raises:
        ConfigError: a recipe cannot be read.
    """
    axes = {axis: choices_of_group(axis) for axis in AXES}
    axes["cluster"] = _distinct(axes["cluster"])
    # `auto` is one of the other formats, by the device.
    axes["precision"].remove("auto")
    for name in recipe_names():
        recipe, problems = read_recipe(name)
        if recipe is None:
            raise ConfigError(problems)
        if recipe.choices.get("parallel") not in axes["parallel"] or "parallel" in recipe.values:
            axes["parallel"].append(name)
    return axes


def _distinct(clusters: Sequence[str]) -> list[str]:
    """Return the first of each set of clusters that differ in their names only."""
    facts = {name: section("cluster", name).model_dump_json(exclude={"name"}) for name in clusters}
    # Reversed, because the last entry of a key stays: the first name of equal clusters.
    first = {said: name for name, said in reversed(facts.items())}
    return [name for name in clusters if first[facts[name]] == name]


def _asked(argv: Sequence[str]) -> tuple[dict[str, list[str]], UnresolvedRun]:
    """Return the choices of each axis, and the rest of the configuration."""
    axes = shipped()
    rest = list[str]()
    for argument in argv:
        group = argument.partition("=")[0]
        if group not in AXES:
            rest.append(argument)
            continue
        # compose refuses an unknown name
        axes[group] = [compose(job.argv).choices[group] for job in jobs([argument])]
    if any(word.startswith(("recipe=", "run=")) for word in rest):
        rule = (
            "--all takes the choices that ship, one by one; a recipe or a run file is one choice"
            " of all"
        )
        raise refusal(rule, "check, without --all")
    return axes, compose(["data=mock", *rest]).run


def summary(reports: Sequence[Report], axes: dict[str, list[str]]) -> str:
    """Return how many combinations of each cluster launch, and how many fail for each reason."""
    lines = []
    for cluster in axes["cluster"]:
        of = [v for v in reports if v.cluster == cluster]
        lines.append((cluster, f"{sum(v.ok for v in of):>6} of {len(of)}"))
    width = max(len(name) for name, _ in lines)
    out = [
        "can launch, by cluster",
        *(f"  {name:<{width}}  {text}" for name, text in lines),
        "cannot, by reason",
    ]
    wrong: dict[str, list[Report]] = {}
    for v in reports:
        if not v.ok:
            wrong.setdefault(v.code, []).append(v)
    for code, found in sorted(wrong.items(), key=lambda item: -len(item[1])):
        out.append(f"  {len(found):>6}  {_example(code, found[0])}")
    whole = ", ".join(f"{len(axes[axis])} {words}" for axis, words in WORDS.items())
    good = sum(v.ok for v in reports)
    out.append(f"{good} of {len(reports)} combinations can launch, of {whole}")
    out.append(
        "a row for each model and layout: fewer of them, as model=A,B parallel=tp2; every"
        " combination: --json"
    )
    return "\n".join(out)


def _table(reports: Sequence[Report], axes: dict[str, list[str]]) -> str:
    """Return a row for each model and layout; a cell has the formats that work, or the reason."""
    cells: dict[tuple[str, str, str], list[Report]] = {}
    for v in reports:
        cells.setdefault((v.model, v.parallel, v.cluster), []).append(v)
    rows = [("model", "layout", *axes["cluster"])]
    for model, layout in itertools.product(axes["model"], axes["parallel"]):
        rows.append(
            (model, layout, *(_cell(cells[model, layout, cluster]) for cluster in axes["cluster"]))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    examples: dict[str, Report] = {}
    for v in reports:
        if not v.ok:
            examples.setdefault(v.code, v)
    lines += ["", *(_example(code, examples[code]) for code in sorted(examples))]
    good = sum(v.ok for v in reports)
    formats = ", ".join(axes["precision"])
    return "\n".join(
        [*lines, f"{good} of {len(reports)} combinations can launch (ok: with {formats})"]
    )


def _cell(reports: Sequence[Report]) -> str:
    good = [v.precision for v in reports if v.ok]
    if len(good) == len(reports):
        return "ok"
    if not good:
        return reports[0].code
    bad = [v.precision for v in reports if not v.ok]
    # A cell has the shorter of both: formats that work, or formats that do not.
    words = "+".join(good), "ok but " + "+".join(bad)
    return min(words, key=len)


def _example(code: str, v: Report) -> str:
    return f"{code:<6} such as {v.model} {v.parallel} {v.precision} {v.cluster}: {v.rule}"
