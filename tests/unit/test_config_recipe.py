"""Recipes from strangers: data, validated before anything uses them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import recipes_dir
from mtrain.config.schema.model import ModelConfig
from mtrain.errors import ConfigError, Problem
from tests.support.patience import patient
from tests.support.tables import tables

TABLES = tables("config_recipe")


def validated(tmp_path: Path, text: str) -> list[Problem]:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose([f"recipe={file}"])
    return list(caught.value.problems)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "code", "path"),
    TABLES["beyond_data"],
)
def test_recipe_beyond_data_is_refused_with_key_and_line(
    tmp_path: Path, text: str, code: str, path: str
) -> None:
    found = validated(tmp_path, text)
    match = [p for p in found if (p.code, p.path) == (code, path)]
    assert match, found
    assert f"{tmp_path}/r.yaml:" in match[0].source


def test_recipe_environment_never_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTRAIN_CANARY", "s3cr3t-canary")
    found = validated(
        tmp_path, "data: {path: '${oc.env:MTRAIN_CANARY}'}\nlog: {name: '${env:MTRAIN_CANARY}'}\n"
    )
    assert "s3cr3t-canary" not in "".join(p.render() for p in found)


def test_recipe_hostile_opens_no_process_or_socket(tmp_path: Path) -> None:
    import subprocess
    import sys

    hostile = tmp_path / "h.yaml"
    canary = tmp_path / "canary"
    hostile.write_text(
        f"model:\n  _target_: os.system\n  _args_: ['touch {canary}']\noptim: {{_target_:"
        f" subprocess.run, args: [touch, {canary}]}}\ndata: {{path: '${{oc.env:HOME}}'}}\nhydra:"
        " {callbacks: {x: {_target_: os.system}}}\n"
    )
    code = (
        "import sys\nbad = []\ndef hook(event, args):\n    if event in ('os.system',"
        " 'subprocess.Popen', 'socket.connect', 'os.exec', 'os.posix_spawn'):\n       "
        " bad.append(event)\nsys.addaudithook(hook)\nfrom mtrain.cli.main import main\nrc ="
        f" main(['check', 'recipe={hostile}'])\nprint(rc, bad)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(60)
    )
    assert done.stdout.strip() == "2 []", done.stderr
    assert "Traceback" not in done.stderr
    assert not canary.exists()


def test_recipe_repeated_group_names_both_lines(tmp_path: Path) -> None:
    found = validated(
        tmp_path, "defaults:\n  - override /model: llama_tiny\n  - override /model: llama3_8b\n"
    )
    assert found[0].code == "MT004"
    assert found[0].source.endswith("r.yaml:3")
    assert "r.yaml:2" in found[0].rule


def test_recipe_shared_is_found_and_near_miss_named() -> None:
    assert compose(["recipe=llama3/70b_h100x64"]).run.model.name == "llama3_70b"
    with pytest.raises(ConfigError, match="recipe=llama3/70b_h100x64"):
        compose(["recipe=llama3/70b_h100x46"])


def test_recipe_name_stays_inside_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = os.path.relpath(recipes_dir().parent / "conf/config", recipes_dir())
    with pytest.raises(ConfigError, match="nor such a shared recipe"):
        compose([f"recipe={relative}"])


def test_recipe_reference_yields_to_command_line(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("optim: {decay_iters: '${trainer.train_iters}'}\ntrainer: {train_iters: 50}\n")
    assert compose([f"recipe={file}", "trainer.train_iters=60"]).run.optim.decay_iters == 60


WHOLE = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "stated",
    [
        {"num_layers": 8},
        {"moe": {"num_experts": 4, "ffn_hidden_size": 64}},
        {"name": "mine"},
        {"hidden_dropout": 0.1},
    ]
    + [{k: v for k, v in WHOLE.items() if k != left} for left in WHOLE],
    ids=str,
)
def test_recipe_partial_model_lists_missing_keys_and_fixes(
    tmp_path: Path, stated: dict[str, object]
) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(json.dumps({"trainer": {"seed": 1}, "model": stated}))
    (problem,) = (p for p in validated(tmp_path, file.read_text()) if p.code == "MT018")
    missing = [key for key in WHOLE if key not in stated]
    assert f"lacks {', '.join(missing)};" in problem.rule
    assert "override /model: llama_tiny" in problem.rule
    assert (problem.path, problem.source) == ("model", f"{file}:1")
    compose([f"recipe={file}", *problem.fix.split()])
    rest = [f"model.{key}={WHOLE[key]}" for key in missing]
    assert compose([f"recipe={file}", *rest]).run.model.name == stated.get("name", "custom")
    file.write_text(json.dumps({"defaults": [{"override /model": "llama_tiny"}], "model": stated}))
    assert compose([f"recipe={file}"]).run.model.num_query_groups == 4


def test_recipe_whole_model_inherits_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(json.dumps({"model": WHOLE}))
    composed = compose([f"recipe={tmp_path / 'r.yaml'}"])
    assert composed.run.model == ModelConfig.model_validate(WHOLE)
    assert composed.origins["model.num_query_groups"] == "default"
    assert "model" not in composed.choices
    assert composed.run.optim == compose([]).run.optim


def test_recipe_refused_key_is_judged_with_the_rest(tmp_path: Path) -> None:
    found = validated(
        tmp_path, json.dumps({"model": {**WHOLE, "hidden_size": "wide"}, "parallel": {"tpp": 2}})
    )
    assert {(p.code, p.path) for p in found} == {
        ("MT013", "model.hidden_size"),
        ("MT012", "parallel.tpp"),
    }
