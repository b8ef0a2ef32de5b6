"""A choice on the command line takes the place of what a recipe or run file says of its group."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.config.compose.composer import Composed, compose
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.paths import VARIABLE
from mtrain.config.schema.run import GROUPS
from tests.support.launched import light

RECIPE = """\
defaults:
  - override /model: llama_tiny
  - override /data: indexed
model: {num_layers: 8}
peft: {r: 3}
parallel: {pp: 2}
precision: {max_skipped_updates: 7}
data: {kind: indexed, path: corpus, seq_length: 64}
optim: {lr: 1e-2}
trainer: {global_batch_size: 24}
objective: {gamma: 0.7}
rollout: {rows: 5}
kernels: {norm: reference}
checkpoint: {keep: 7}
log: {interval: 3}
cluster: {nodes: 2}
resilience: {restarts: 5}
"""
CHOICES = {
    "model": "gpt2",
    "peft": "lora",
    "parallel": "tp4",
    "precision": "fp32",
    "data": "sft",
    "optim": "lion",
    "trainer": "sft",
    "objective": "orpo",
    "rollout": "sglang",
    "kernels": "auto",
    "checkpoint": "off",
    "log": "quiet",
    "cluster": "cpu",
    "resilience": "off",
}
VALUES = {
    "model": ("num_layers", 8),
    "peft": ("r", 3),
    "parallel": ("pp", 2),
    "precision": ("max_skipped_updates", 7),
    "data": ("seq_length", 64),
    "optim": ("lr", 1e-2),
    "trainer": ("global_batch_size", 24),
    "objective": ("gamma", 0.7),
    "rollout": ("rows", 5),
    "kernels": ("norm", "reference"),
    "checkpoint": ("keep", 7),
    "log": ("interval", 3),
    "cluster": ("nodes", 2),
    "resilience": ("restarts", 5),
}
"""group -> a key that the recipe sets, and its value there."""
OF_RECIPES = [group for group in GROUPS if group != "launch"]
"""Groups that a recipe may set."""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(RECIPE)
    return tmp_path


def _value(composed: Composed, group: str) -> object:
    return composed.run.flat()[f"{group}.{VALUES[group][0]}"]


@pytest.mark.parametrize("group", OF_RECIPES)
def test_choice_replaces_only_its_group_of_recipe(group: str, recipe: Path) -> None:
    alone = compose([f"{group}={CHOICES[group]}"])
    composed = compose(["recipe=mine.yaml", f"{group}={CHOICES[group]}"])
    assert getattr(composed.run, group) == getattr(alone.run, group)
    for other, (_, value) in VALUES.items():
        assert other == group or _value(composed, other) == value
    lost = f"{group}.{VALUES[group][0]}="
    assert [(w.code, w.path, lost in w.rule) for w in composed.warnings] == [("MT020", group, True)]


def test_choice_other_data_kind_needs_no_repetition(recipe: Path) -> None:
    (warning,) = compose(["recipe=mine.yaml", "data=mock"]).warnings
    assert "data.path=corpus" in warning.rule
    assert warning.fix.endswith("data.seq_length=64")


@pytest.mark.parametrize("group", OF_RECIPES)
def test_choice_yields_to_command_line_key(group: str, recipe: Path) -> None:
    key, value = VALUES[group]
    text = str(value).lower()
    composed = compose(["recipe=mine.yaml", f"{group}.{key}={text}", f"{group}={CHOICES[group]}"])
    assert _value(composed, group) == value
    assert not any(f"{group}.{key}=" in warning.rule for warning in composed.warnings)


def test_choice_chats_replace_indexed_recipe_data(
    recipe: Path,
) -> None:
    words = (
        "recipe=mine.yaml",
        "trainer=sft",
        "data=sft",
        "data.path=chats.jsonl",
        "parallel=tp2",
        "cluster=cpu",
    )
    found = light("check", *words, cwd=recipe)
    assert "MT340" in found.stderr  # a file of chats is missing, not an .idx
    assert "MT306" not in found.stderr
    assert "dropped: data.kind=indexed data.seq_length=64" in found.stderr


def test_choice_dropped_run_file_values_are_named(recipe: Path) -> None:
    Path("run.yaml").write_text(
        run_yaml(compose(["data=text", "data.path=docs", "optim.lr=0.3"]).run)
    )
    composed = compose(["run=run.yaml", "data=sft"])
    assert (composed.run.data.kind, composed.run.data.path, composed.run.optim.lr) == (
        "sft",
        None,
        0.3,
    )
    (warning,) = composed.warnings
    assert "run.yaml" in warning.rule
    assert "data.path=docs" in warning.rule


FILES = {
    "trainer/everything.yaml": (
        "# @package _global_\ndefaults: [override /data: sft]\n"
        "trainer: {train_iters: 7}\noptim: {lr: 0.5}\n"
    ),
    "trainer/beside.yaml": "defaults: [/data/sft@_global_.data, _self_]\ntrain_iters: 7\n",
    "experiment/chats.yaml": (
        "# @package _global_\ndefaults: [override /data: sft]\noptim: {lr: 0.5}\n"
    ),
    "optim/slow.yaml": "defaults: [adamw, _self_]\nlr: 0.5\n",
}


@pytest.fixture
def folder(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        file = recipe / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv(VARIABLE, str(recipe / "conf"))
    return recipe


@pytest.mark.parametrize(
    ("word", "kind", "lr", "batch", "length"),
    [
        ("trainer=everything", "sft", 0.5, None, None),
        ("trainer=beside", "sft", 1e-2, None, 64),
        ("+experiment=chats", "sft", 0.5, 24, None),
        ("optim=slow", "indexed", 0.5, 24, 64),
    ],
)
def test_choice_brings_other_groups_over_recipe(
    word: str, kind: str, lr: float, batch: int | None, length: int | None, folder: Path
) -> None:
    composed = compose(["recipe=mine.yaml", word])
    run = composed.run
    assert (run.data.kind, run.optim.lr, run.trainer.global_batch_size, run.data.seq_length) == (
        kind,
        lr,
        batch,
        length,
    )
    assert {warning.code for warning in composed.warnings} == {"MT020"}


def test_choice_brings_other_groups_over_run_file(folder: Path) -> None:
    Path("run.yaml").write_text(run_yaml(compose(["data=text", "optim.lr=0.3"]).run))
    run = compose(["run=run.yaml", "trainer=everything"]).run
    assert (run.data.kind, run.optim.lr, run.trainer.train_iters) == ("sft", 0.5, 7)


def test_choice_file_is_named_as_written(recipe: Path) -> None:
    (recipe / "lay.yaml").write_text(
        "# @package _global_\nparallel: {tp: 4}\ntrainer: {global_batch_size: 8}\n"
    )
    composed = compose(["recipe=mine.yaml", "parallel=./lay.yaml"])
    assert {(warning.path, warning.value) for warning in composed.warnings} == {
        ("parallel", "./lay.yaml")
    }


def test_choice_every_sweep_run_replaces_group(recipe: Path) -> None:
    words = (
        "data=mock,stdlib",
        "cluster=cpu",
        "parallel=tp2",
        "peft=none",
        "model=llama_tiny",
        "precision=fp32",
        "objective=next_token",
        "rollout=local",
    )
    found = light("check", "-m", "recipe=mine.yaml", *words, cwd=recipe)
    assert "2 of 2 pass" in found.stdout, found.stdout + found.stderr
    assert found.stdout.count("dropped: data.") == 2
