"""`check --all`: every model in every layout, number format and cluster that ships: which can
launch, and why not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict

from mtrain import strict_json
from mtrain.cli.combinations import AXES, Report, validated
from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import choices_of_group, recipe_names
from mtrain.config.compose.recipe import read_recipe
from mtrain.config.compose.sweep import jobs
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import ConfigError, Problem, say_page
from mtrain.recipes.delta import section

MOST_ROWS = 100
"""Models times layouts of which each is shown in a row."""
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

    Layouts are the files, and those that a shared recipe writes itself, under the recipe's name.

    Raises:
        ConfigError: a recipe cannot be read.
    """
    axes = {axis: choices_of_group(axis) for axis in AXES}
    axes["cluster"] = _distinct(axes["cluster"])
    axes["precision"].remove("auto")
    for name in recipe_names():
        recipe, problems = read_recipe(name)
        if recipe is None:
            raise ConfigError(problems)
        if recipe.choices.get("parallel") not in axes["parallel"] or "parallel" in recipe.values:
            axes["parallel"].append(name)
    return axes


def _distinct(clusters: Sequence[str]) -> list[str]:
    """Clusters that differ in more than their names: of several that do not, the first."""
    facts = {name: section("cluster", name).model_dump_json(exclude={"name"}) for name in clusters}
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
        raise ConfigError(
            [Problem("MT010", "", None, rule, "check, without --all", "command line")]
        )
    return axes, compose(["data=mock", *rest]).run


def summary(reports: Sequence[Report], axes: dict[str, list[str]]) -> str:
    """Return how many combinations can launch, of each cluster, and how many cannot for each
    reason, with one of them.
    """
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
    """Return a row for each model and layout, a column for each cluster; a cell has the formats
    that work, or the reason.
    """
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
    words = "+".join(good), "ok but " + "+".join(bad)
    return min(words, key=len)


def _example(code: str, v: Report) -> str:
    return f"{code:<6} such as {v.model} {v.parallel} {v.precision} {v.cluster}: {v.rule}"
