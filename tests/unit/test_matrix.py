"""`check --all`: a sample of the table, validated as `check` validates one configuration."""

from __future__ import annotations

import json
import time
from random import Random

import pytest

from mtrain.api import load
from mtrain.cli.check_all import AXES, MEMORY, part_of, shipped, validated
from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import choices_of_group, recipes_dir
from mtrain.config.compose.recipe import read_recipe
from mtrain.config.resolve.resolution import resolve
from mtrain.config.rules import findings
from mtrain.recipes.delta import section
from tests.support.configs import LAPTOP

RECIPES = [
    file.relative_to(recipes_dir()).with_suffix("").as_posix()
    for file in recipes_dir().rglob("*.yaml")
]


def sample(**axes: list[str]) -> dict[tuple[str, ...], tuple[bool, str]]:
    """Return the reports of a small table by choice."""
    wanted = {axis: axes[axis] for axis in AXES}
    found = validated(wanted, compose(["data=mock"]).run, LAPTOP)
    return {(v.model, v.parallel, v.precision, v.cluster): (v.ok, v.code) for v in found}


def test_matrix_states_fit_or_first_reason() -> None:
    found = sample(
        model=["llama3_70b", "llama31_405b", "mixtral_8x7b", "llama_tiny"],
        parallel=["tp4pp4", "tp2", "single"],
        precision=["bf16"],
        cluster=["h100x64", "h100x8", "cpu"],
    )
    assert found["llama3_70b", "tp4pp4", "bf16", "h100x64"] == (True, "")
    assert found["llama3_70b", "tp4pp4", "bf16", "h100x8"] == (False, "MT112")
    assert found["llama31_405b", "tp4pp4", "bf16", "h100x64"] == (False, "MT107")
    assert found["mixtral_8x7b", "tp4pp4", "bf16", "h100x8"] == (False, "MT112")
    assert found["mixtral_8x7b", "tp2", "bf16", "h100x64"] == (False, MEMORY)
    assert found["llama3_70b", "single", "bf16", "h100x8"] == (False, MEMORY)
    assert found["llama3_70b", "single", "bf16", "cpu"] == (False, MEMORY)
    assert found["llama_tiny", "tp2", "bf16", "cpu"] == (True, "")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_matrix_shared_recipes_can_launch(name: str) -> None:
    recipe, problems = read_recipe(name)
    assert recipe is not None
    assert not problems
    if recipe.choices.get("peft", "none") != "none":  # the table trains whole models
        assert (
            load([f"recipe={name}"], LAPTOP, {}, to_run=False).run.peft.kind
            == recipe.choices["peft"]
        )
        return
    nodes = recipe.values.get("cluster", {}).get("nodes")
    if nodes is not None:  # the table takes clusters as they are named
        assert load([f"recipe={name}"], LAPTOP, {}, to_run=False).run.cluster.nodes == nodes
        return
    axes = {
        axis: [recipe.choices.get(axis, "llama_tiny" if axis == "model" else "fp32")]
        for axis in AXES
    }
    axes["parallel"] = [name]
    (report,) = sample(**axes).values()
    assert report == (True, "")


def test_matrix_axes_are_what_ships() -> None:
    axes = shipped()
    assert axes["model"] == choices_of_group("model")
    written = set(RECIPES) & set(axes["parallel"])
    assert "llama3/70b_h100x64" in written
    for name in set(RECIPES) - written:  # their layout is a file, which is there under its own name
        recipe, _ = read_recipe(name)
        assert recipe is not None
        assert recipe.choices["parallel"] in axes["parallel"]
        assert compose([f"recipe={name}"]).run.parallel == section(
            "parallel", recipe.choices["parallel"]
        )


@pytest.mark.full
def test_matrix_verdict_equals_all_rules() -> None:
    axes = shipped()
    base = compose(["data=mock"]).run
    random = Random(7)
    wanted = {axis: random.sample(axes[axis], 4) for axis in AXES}
    wanted["model"][:2] = ["llama3_8b", "llama_tiny"]
    wanted["parallel"][:2] = ["dp", "single"]
    good = 0
    for v in validated(wanted, base, LAPTOP):
        chosen = {axis: part_of(axis, getattr(v, axis)) for axis in AXES}
        raw = base.model_copy(update=chosen)
        batch = resolve(raw, LAPTOP).parallel.dp * raw.parallel.pp
        trainer = raw.trainer.model_copy(update={"global_batch_size": batch, "micro_batch_size": 1})
        found = findings(resolve(raw.model_copy(update={"trainer": trainer}), LAPTOP))
        codes = {f.code for f in found if f.severity == "error"}
        assert v.code in (codes or {"", MEMORY}), v
        good += v.ok
    assert good > 3


@pytest.mark.full
def test_matrix_whole_is_fast_and_explains_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = time.process_time()
    assert main(["check", "--all", "--json"]) == 0
    seconds = time.process_time() - start
    rows = json.loads(capsys.readouterr().out)
    assert seconds / len(rows) < 200e-6
    axes = shipped()
    assert len(rows) == len(axes["model"]) * len(axes["parallel"]) * len(axes["precision"]) * len(
        axes["cluster"]
    )
    assert all(row["ok"] or (row["code"] and row["rule"]) for row in rows)
    assert {row["model"] for row in rows if row["ok"]} >= set(axes["model"]) - _huge()


def _huge() -> set[str]:
    """Return the models whose state by itself exceeds the largest cluster that ships."""
    from mtrain.plan.count import parameters

    return {
        m
        for m in choices_of_group("model")
        if parameters(compose([f"model={m}"]).run.model) > 150e9
    }


def test_matrix_choices_narrow_and_overrides_apply(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "model=llama_tiny,llama3_8b",
        "parallel=tp2",
        "cluster=h100x8",
        "precision=bf16",
        "model.num_layers=3",
    ]
    assert main(["check", "--all", *words]) == 0
    table = capsys.readouterr().out
    assert "2 of 2 combinations" in table
    assert "llama3_8b" in table
    assert main(["check", "--all", "parallel=tp3", "model=llama_tiny", "cluster=h100x8"]) == 0
    table = capsys.readouterr().out
    assert "MT" in table.splitlines()[1]
    assert "such as llama_tiny tp3" in table


@pytest.mark.parametrize(
    "words", [["model=nope"], ["parallel=tp0"], ["recipe=llama/tiny_cpu"], ["optim.lr=fast"]]
)
def test_matrix_uncomposable_is_refused_first(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--all", *words]) == 2
    assert "error[" in capsys.readouterr().err
