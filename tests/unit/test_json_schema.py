"""The schema for editors accepts what the loader accepts, refuses what it refuses, and documents
every key.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import conf_dir, recipes_dir
from mtrain.config.compose.yaml_reader import load, parse
from mtrain.config.messages.json_schema import DRAFT, KINDS, json_schema
from mtrain.config.messages.keys import schema_keys
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.run import GROUPS, RunConfig
from tests.support.configs import LAPTOP
from tests.support.draft07 import errors, unknown_words
from tests.support.strategies import runs

RECIPES = sorted(recipes_dir().rglob("*.yaml"))
FILES = sorted(conf_dir().glob("*/*.yaml"))


@pytest.mark.parametrize("kind", KINDS)
def test_json_schema_is_draft_07(kind: str) -> None:
    schema = json_schema(kind)
    assert schema["$schema"] == DRAFT
    assert list(unknown_words(schema)) == []
    text = json.dumps(schema)
    assert "$defs" not in text
    assert "prefixItems" not in text


@pytest.mark.sampled
@pytest.mark.skipif(
    importlib.util.find_spec("jsonschema") is None, reason="jsonschema is not installed"
)
@pytest.mark.parametrize("kind", KINDS)
def test_json_schema_is_valid(kind: str) -> None:
    from jsonschema import Draft7Validator

    Draft7Validator.check_schema(json_schema(kind))
    if kind == "recipe":
        for file in RECIPES:
            Draft7Validator(json_schema(kind)).validate(load(file).values)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_json_schema_fits_every_shared_recipe(file: Path) -> None:
    assert errors(load(file).values, json_schema("recipe")) == []


@pytest.mark.sampled(9)
@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_json_schema_fits_every_group_file(file: Path) -> None:
    values = {key: value for key, value in load(file).values.items() if key != "defaults"}
    assert errors(values, json_schema(file.parent.name)) == []


def test_json_schema_fits_whole_run_file_only() -> None:
    whole = resolve(compose(["model=mixtral_tiny"]).run, LAPTOP).to_dict()
    assert errors(whole, json_schema("run")) == []
    assert errors({k: v for k, v in whole.items() if k != "model"}, json_schema("run"))
    assert errors({"model": {"num_layers": 2}}, json_schema("run")), "a run file is complete"
    assert errors({"model": {"num_layers": 2}}, json_schema("recipe")) == [], "a recipe is not"


@pytest.mark.full
@settings(
    max_examples=20,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(runs())
def test_json_schema_accepts_what_loader_accepts(run: RunConfig) -> None:
    assert errors(run.to_dict(), json_schema("run")) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "text",
    [
        "model: {hiden_size: 2}",
        "model: {num_layers: 0}",
        "model: {num_layers: two}",
        "model: {moe: {num_experts: 0}}",
        "optim: {lr: '3e-4'}",
        "optim: {beta1: 1}",
        "precision: {dtype: fp64}",
        "parallel: {tp: 2.5}",
        "parallel: {hierarchical_cp_sizes: [2, 2, 2]}",
        "data: {split: [1, 2]}",
        "cluster: {peak_tflops: {fp12: 1}}",
        "cluster: {peak_tflops: {bf16: 0}}",
        "trainer: {train_iters: '${}'}",
        "recipe: {tilte: x}",
        "recipe: other",
        "defaults: [_self_]",
        "defaults: [{override /model: nope}]",
        "defaults: [{override /parallel: tp0}]",
        "defaults: [{override /nope: x}]",
        "defaults: [{override /model: llama_tiny, override /optim: sgd}]",
        "hydra: {}",
        "run: x",
    ],
)
def test_json_schema_refuses_what_loader_refuses(text: str) -> None:
    assert errors(parse(text, "r.yaml").values, json_schema("recipe")), text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "optim: {decay_iters: '${trainer.train_iters}', min_lr: null, lr: 1}",
        "model: {moe: null}",
        "defaults: [{override /parallel: tp4pp4vpp2sp}, {override model: llama_tiny}]",
        "data: {split: [1, 1, 1], suffixes: [.c]}",
        "recipe: {title: x}",
    ],
)
def test_json_schema_fits_recipe_features(text: str) -> None:
    assert errors(parse(text, "r.yaml").values, json_schema("recipe")) == []


def test_json_schema_documents_every_key() -> None:
    run = json_schema("run")
    recipe = json_schema("recipe")
    for schema in (run, recipe):
        for key in schema_keys():
            node = _at(schema, key)
            assert node.get("description"), key


def _at(schema: dict[str, Any], key: str) -> dict[str, Any]:
    node: Any = schema
    for name in key.split("."):
        parts = [node, *node.get("allOf", ()), *node.get("anyOf", ())]
        target = next((p["$ref"] for p in parts if "$ref" in p), None)
        if target is not None and "properties" not in node:
            node = schema["definitions"][target.rpartition("/")[2]]
        node = node["properties"][name]
    found: dict[str, Any] = node
    return found


def test_json_schema_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema", "model"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema("model")
    assert main(["schema", "-o", str(tmp_path / "s")]) == 0
    written = {file.name for file in (tmp_path / "s").iterdir()}
    assert written == {f"{kind}.schema.json" for kind in ("run", "recipe", *GROUPS)}
    assert main(["schema", "recipe", "-o", str(tmp_path / "s")]) == 0, "an older schema is replaced"
    (tmp_path / "s/run.schema.json").write_text("mine")
    assert main(["schema", "run", "-o", str(tmp_path / "s")]) == 2
    assert (tmp_path / "s/run.schema.json").read_text() == "mine"
    assert main(["schema", "modle"]) == 2
    assert "schema model" in capsys.readouterr().err


def test_json_schema_header_of_new_recipe_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["recipe", "new", "model=mixtral_tiny", "parallel=ep2"]) == 2
    assert "Use recipe new my.yaml model=mixtral_tiny parallel=ep2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["recipe", "new", "mine.yaml", "model=mixtral_tiny", "parallel=ep2"]) == 0
    assert main(["schema", "recipe", "-o", "."]) == 0
    first = (tmp_path / "mine.yaml").read_text().splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (tmp_path / named).is_file()
    assert (
        errors(load(tmp_path / "mine.yaml").values, json.loads((tmp_path / named).read_text()))
        == []
    )
