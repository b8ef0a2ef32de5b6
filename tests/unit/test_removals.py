"""Removals with `~`, and text that has another meaning for a composer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from tests.support.configs import refusals


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "optim.lr", "~optim.lr"],
        ["recipe", "new", "x.yaml", "~optim"],
        ["recipe", "show", "llama/tiny_cpu", "~optim"],
        ["recipe", "lock", "llama/tiny_cpu", "~optim.lr"],
        ["recipe", "export", "--megatron", "~optim"],
    ],
)
def test_removal_works_in_recipe_verbs(words: list[str]) -> None:
    assert main(words) == 0


def test_removal_recipe_and_run_file_may_lie_at_home(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(here))
    Path("r.yaml").write_text("trainer: {seed: 3}\n")
    assert compose(["recipe=~/r.yaml"]).run.trainer.seed == 3
    assert main(["explain", "trainer.seed", "~/r.yaml"]) == 0
    assert main(["recipe", "lock", "~/r.yaml", "-o", "held.yaml"]) == 0
    assert compose(["run=~/held.yaml"]).run.trainer.seed == 3


def test_removal_of_group_removes_its_choice() -> None:
    Path("r.yaml").write_text("defaults: [{override /optim: lion}]\noptim: {lr: 0.5}\n")
    composed = compose(["recipe=r.yaml", "~optim"])
    assert (composed.run.optim.name, composed.run.optim.lr) == ("adamw", 0.5)
    assert (composed.origins["optim.name"], composed.origins["optim.lr"]) == ("default", "r.yaml:2")
    assert "optim" not in composed.choices


def test_removal_later_value_is_removed() -> None:
    assert "optim" not in compose(["~optim=adamw"]).choices
    assert compose(["~trainer.eval_iters=16"]).origins["trainer.eval_iters"] == "default"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("~optim=lion", "the choice of optim is adamw"),
        ("~model=nonsense", "the choice of model is llama_tiny"),
        ("~trainer.eval_iters=3", "trainer.eval_iters is 16, at conf/trainer/default.yaml:5"),
        ("~trainer.train_iters=[", "cannot be read"),
        ("~trainer.train_iters=1,2", "cannot be read"),
    ],
)
def test_removal_of_absent_value_is_refused(word: str, said: str) -> None:
    (problem,) = refusals(word)
    assert (problem.code, problem.source, problem.fix) == (
        "MT010",
        "command line",
        word.partition("=")[0],
    )
    assert said in problem.rule


def test_removal_group_of_run_file_has_no_choice() -> None:
    assert main(["recipe", "lock", "llama/tiny_cpu", "-o", "held.yaml"]) == 0
    assert "the choice of optim is unset" in refusals("run=held.yaml", "~optim=adamw")[0].rule


@pytest.mark.parametrize("value", ["'${nothing.here}'", "null", "[1, 2]"])
def test_removal_covers_any_key(value: str) -> None:
    Path("r.yaml").write_text(f"trainer: {{seed: {value}}}\n")
    composed = compose(["recipe=r.yaml", "~trainer.seed"])
    assert composed.run.trainer.seed == type(composed.run.trainer).model_fields["seed"].default
    assert composed.origins["trainer.seed"] == "default"


@pytest.mark.parametrize("key", ["trainer.train_iters", "log.runs_dir"])
def test_removal_required_key_is_requested(key: str) -> None:
    group, _, name = key.partition(".")
    Path("r.yaml").write_text(f"{group}:\n  {name}: ???\n")
    (problem,) = refusals("recipe=r.yaml")
    assert (problem.code, problem.path, problem.source) == ("MT015", key, "r.yaml:2")
    composed = compose(["recipe=r.yaml", problem.fix])
    assert composed.origins[key] == "command line"


@pytest.mark.parametrize("begin", ["\\ue000", "\\ue000[1]", "\\0"])
def test_removal_text_may_begin_with_tilde(begin: str) -> None:
    Path("r.yaml").write_text(f'log: {{name: "{begin}oops"}}\n')
    (problem,) = refusals("recipe=r.yaml")
    assert (problem.code, problem.path) == ("MT014", "log.name")
    assert str(problem.value).endswith("oops")


def test_removal_path_in_choice_file_is_refused() -> None:
    Path("theirs.yaml").write_text("runs_dir: /tmp/elsewhere\n")
    (problem,) = refusals("log=./theirs.yaml")
    assert (problem.code, problem.source) == ("MT019", "theirs.yaml:1")
    assert (
        compose(["log=./theirs.yaml", "log.runs_dir=/tmp/elsewhere"]).run.log.runs_dir
        == "/tmp/elsewhere"
    )


def test_removal_recipe_inlines_choice_file() -> None:
    Path("ok.yaml").write_text("defaults: [llama_tiny, _self_]\nname: my\nnum_layers: 2\n")
    assert main(["recipe", "new", "n.yaml", "model=./ok.yaml"]) == 0
    assert "ok.yaml" not in Path("n.yaml").read_text().partition("defaults:")[2]
    assert compose(["recipe=n.yaml"]).run.model == compose(["model=./ok.yaml"]).run.model


@pytest.mark.parametrize("path", ["./ok.yaml", "'my ok.yaml'"])
def test_removal_table_takes_choice_file(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(path.strip("'")).write_text("defaults: [llama_tiny, _self_]\nname: my\nnum_layers: 2\n")
    assert (
        main(["check", "--all", f"model={path}", "parallel=tp2", "precision=fp32", "cluster=local"])
        == 0
    )
    assert "1 of 1 combinations can launch" in capsys.readouterr().out
