"""What `~` takes away, and text that stands for something else to a composer."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.cli.main import main
from mtrain.config.compose import compose
from mtrain.errors import ConfigError, Problem


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusals(*words: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    return list(caught.value.problems)


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
def test_verbs_that_take_the_name_of_a_recipe_take_keys_away(words: list[str]) -> None:
    assert main(words) == 0


@pytest.mark.parametrize("key", ["trainer.train_iters", "log.runs_dir"])
def test_a_value_that_is_left_to_others_is_asked_for(key: str) -> None:
    group, _, name = key.partition(".")
    Path("r.yaml").write_text(f"{group}:\n  {name}: ???\n")
    (problem,) = refusals("recipe=r.yaml")
    assert (problem.code, problem.path, problem.source) == ("MT015", key, "r.yaml:2")
    composed = compose(["recipe=r.yaml", problem.fix])
    assert composed.origins[key] == "command line"


@pytest.mark.parametrize("begin", ["\\ue000", "\\ue000[1]", "\\0"])
def test_text_begins_as_it_likes(begin: str) -> None:
    Path("r.yaml").write_text(f'log: {{name: "{begin}oops"}}\n')
    (problem,) = refusals("recipe=r.yaml")
    assert (problem.code, problem.path) == ("MT014", "log.name")
    assert str(problem.value).endswith("oops")


def test_a_recipe_writes_out_what_the_file_of_a_choice_says() -> None:
    Path("ok.yaml").write_text("defaults: [llama_tiny, _self_]\nname: my\nnum_layers: 2\n")
    assert main(["recipe", "new", "n.yaml", "model=./ok.yaml"]) == 0
    assert "ok.yaml" not in Path("n.yaml").read_text().partition("defaults:")[2]
    assert compose(["recipe=n.yaml"]).run.model == compose(["model=./ok.yaml"]).run.model


@pytest.mark.parametrize("path", ["./ok.yaml", "'my ok.yaml'"])
def test_the_table_takes_the_file_of_a_choice(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(path.strip("'")).write_text("defaults: [llama_tiny, _self_]\nname: my\nnum_layers: 2\n")
    assert main(["check", "--all", f"model={path}", "parallel=tp2", "precision=fp32", "cluster=local"]) == 0
    assert "1 of 1 combinations can launch" in capsys.readouterr().out
