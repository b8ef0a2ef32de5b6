"""A user's own `config.yaml`, and groups of their own: composed as Hydra does, refused with the
line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from mtrain.cli.check_all import part_of
from mtrain.cli.main import main
from mtrain.config.compose.composer import compose
from mtrain.config.compose.interpolate import leaves
from mtrain.config.compose.paths import VARIABLE, conf_dir
from tests.support.configs import refusals

CONFIG = (conf_dir() / "config.yaml").read_text()
NO_OPTIM = CONFIG.replace("  - optim: adamw\n", "")
FAST = {"mygroup/fast.yaml": "# @package trainer\ntrain_iters: 7\n"}
OWN = {
    **FAST,
    "mygroup/slow.yaml": "# @package trainer\ntrain_iters: 700\n",
    "config.yaml": f"{CONFIG}  - mygroup: fast\n",
}
Laid = Callable[[dict[str, str]], Path]


@pytest.fixture
def laid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laid:
    """Return a function that puts files into a folder of choices named by MTRAIN_CONF, outside the
    working folder.
    """

    def lay(files: dict[str, str]) -> Path:
        for name, text in files.items():
            file = tmp_path / "conf" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "conf"

    monkeypatch.setenv(VARIABLE, str(lay({"README.md": ""})))
    monkeypatch.chdir(tmp_path)
    return lay


@pytest.mark.parametrize(
    ("entry", "code", "fix"),
    [
        ("model: nope", "MT011", "choices model"),
        ("/model: llama_tiny", "MT017", "- model: llama_tiny"),
        ("optional model: llama_tiny", "MT017", "- model: llama_tiny"),
        ("model: [a, b]", "MT017", "delete it"),
        ("mygroup@trainer: fast", "MT017", "delete it"),
        ("override hydra/job_logging: disabled", "MT017", "delete it"),
        ("optim: adamw", "MT017", "delete it"),
        ("nowhere", "MT017", "delete it"),
        ('""', "MT017", "delete it"),
        ("trainer: 1.10", "MT017", "- trainer: '1.10'"),
    ],
)
def test_users_config_bad_defaults_entry_has_its_line(
    laid: Laid, entry: str, code: str, fix: str
) -> None:
    text = CONFIG.replace("model: llama_tiny", entry)
    folder = laid({**FAST, "trainer/1.10.yaml": "train_iters: 7\n", "config.yaml": text})
    line = next(n for n, row in enumerate(text.splitlines(), 1) if row == f"  - {entry}")
    line = (
        text.splitlines().index("  - optim: adamw", line) + 1 if entry == "optim: adamw" else line
    )
    found = [p for p in refusals() if (p.code, p.source) == (code, f"{folder}/config.yaml:{line}")]
    assert found
    assert fix in found[0].fix


@pytest.mark.parametrize("value", ["null", "5", "{model: llama_tiny}"])
def test_users_config_non_list_defaults_are_refused(laid: Laid, value: str) -> None:
    folder = laid({"config.yaml": f"defaults: {value}\n"})
    assert [(p.code, p.source) for p in refusals()] == [("MT017", f"{folder}/config.yaml:1")]


@pytest.mark.parametrize("text", [NO_OPTIM, CONFIG.replace("optim: adamw", "optim: null")])
def test_users_config_omitted_group_can_be_chosen(laid: Laid, text: str) -> None:
    laid({"config.yaml": text})
    Path("r.yaml").write_text("defaults:\n  - override /optim: lion\noptim: {lr: 0.5}\n")
    assert "optim" not in compose([]).choices
    for words in (["optim=lion"], ["recipe=r.yaml"]):
        composed = compose(words)
        assert (composed.run.optim.name, composed.choices["optim"]) == ("lion", "lion")
        assert composed.origins["optim.name"].startswith("conf/optim/lion.yaml:")
    assert compose(["recipe=r.yaml"]).run.optim.lr == 0.5
    assert main(["recipe", "new", "new.yaml", "trainer.seed=3"]) == 0
    assert compose(["recipe=new.yaml"]).run.trainer.seed == 3


def test_users_config_omitted_choice_is_not_none(laid: Laid) -> None:
    laid({"config.yaml": f"{NO_OPTIM}trainer: {{seed: 99}}\n"})
    assert "optim" not in compose([]).choices


def test_users_config_omitted_model_is_requested(
    laid: Laid,
) -> None:
    laid({"config.yaml": CONFIG.replace("  - model: llama_tiny\n", "")})
    Path("r.yaml").write_text("model: {num_layers: 3}\n")
    for words in ([], ["recipe=r.yaml"]):
        fix = refusals(*words)[0].fix
        assert compose([*words, fix]).run.model.num_layers > 0


def test_users_config_values_without_self_follow_hydra(laid: Laid) -> None:
    values = "trainer: {seed: 99, train_iters: 3}\n"
    folder = laid({"config.yaml": CONFIG.replace("  - _self_\n", "") + values})
    Path("r.yaml").write_text("trainer: {seed: 5}\n")
    composed = compose(["recipe=r.yaml"])
    assert (composed.run.trainer.seed, composed.run.trainer.train_iters) == (5, 3)
    assert composed.origins["trainer.train_iters"].startswith(f"{folder}/config.yaml:")
    laid({"config.yaml": CONFIG + values})
    assert (compose([]).run.trainer.train_iters, compose([]).run.trainer.eval_iters) == (None, 16)


def test_users_config_value_file_is_named(laid: Laid) -> None:
    folder = laid({"config.yaml": f"{CONFIG}  - base\n", "base.yaml": "trainer: {seed: 99}\n"})
    composed = compose([])
    assert (composed.run.trainer.seed, composed.origins["trainer.seed"]) == (
        99,
        f"{folder}/base.yaml:1",
    )


@pytest.mark.parametrize(
    ("word", "value"),
    [("~mygroup", None), ("~mygroup=fast", None), ("mygroup=slow", 700), ("mygroup=./x.yaml", 8)],
)
def test_users_config_own_group_is_a_group(laid: Laid, word: str, value: int | None) -> None:
    laid(OWN)
    Path("x.yaml").write_text("# @package trainer\ntrain_iters: 8\n")
    assert compose([word]).run.trainer.train_iters == value


def test_users_config_recipe_chooses_from_own_group(laid: Laid) -> None:
    laid(OWN)
    Path("r.yaml").write_text("defaults: [{override /mygroup: slow}]\nlog: {name: x}\n")
    assert compose(["recipe=r.yaml"]).run.trainer.train_iters == 700


def test_users_config_added_choice_may_be_a_path(laid: Laid) -> None:
    laid(FAST)
    Path("x.yaml").write_text("# @package trainer\ntrain_iters: 8\n")
    composed = compose(["+mygroup=./x.yaml"])
    assert (composed.run.trainer.train_iters, composed.origins["trainer.train_iters"]) == (
        8,
        "x.yaml:2",
    )


@pytest.mark.parametrize("word", ["+mygroup=fsat", "+mygroup=", "mygroup=fast"])
def test_users_config_fix_of_added_choice_is_added(laid: Laid, word: str) -> None:
    laid(FAST)
    assert [problem.fix for problem in refusals(word)] == ["+mygroup=fast"]
    assert compose(["+mygroup=fast"]).run.trainer.train_iters == 7


@pytest.mark.parametrize(
    ("word", "fix"), [("+mygroup=slow", "mygroup=slow"), ("~mygroup=slow", "~mygroup")]
)
def test_users_config_wrong_sign_for_group_is_fixed(laid: Laid, word: str, fix: str) -> None:
    laid(OWN)
    assert [problem.fix for problem in refusals(word)] == [fix]
    compose([fix])


def test_users_config_own_group_lists_choices(
    laid: Laid, capsys: pytest.CaptureFixture[str]
) -> None:
    laid(OWN)
    assert main(["choices", "mygroup", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["mygroup"]] == ["fast", "slow"]


def test_users_config_value_over_recipe_is_named(laid: Laid) -> None:
    folder = laid(FAST)
    Path("r.yaml").write_text("trainer:\n  train_iters: 5\n")
    composed = compose(["recipe=r.yaml", "+mygroup=fast"])
    assert composed.run.trainer.train_iters == 7
    assert composed.origins["trainer.train_iters"] == f"{folder}/mygroup/fast.yaml:2"


@pytest.mark.parametrize("name", ["1.10", "2024_01", "null", "0x10"])
def test_users_config_choice_may_look_like_a_number(laid: Laid, name: str) -> None:
    folder = laid({f"trainer/{name}.yaml": "train_iters: 7\n"})
    composed = compose([f"trainer={name}"])
    assert (composed.run.trainer.train_iters, composed.choices["trainer"]) == (7, name)
    assert composed.origins["trainer.train_iters"] == f"{folder}/trainer/{name}.yaml:1"
    assert main(["recipe", "new", "new.yaml", f"trainer={name}"]) == 0
    assert compose(["recipe=new.yaml"]).choices["trainer"] == name


def test_users_config_yaml_number_choice_needs_quotes(laid: Laid) -> None:
    laid({"trainer/1.10.yaml": "train_iters: 7\n"})
    recipe = Path("r.yaml")
    recipe.write_text("defaults:\n  - override /trainer: 1.10\n")
    (problem,) = refusals("recipe=r.yaml")
    assert (problem.code, problem.source) == ("MT017", "r.yaml:2")
    recipe.write_text(f"defaults:\n  {problem.fix}\n")
    assert compose(["recipe=r.yaml"]).run.trainer.train_iters == 7


def test_users_config_defaults_name_is_a_group_file(laid: Laid) -> None:
    folder = laid(
        {
            "trainer/mine/top.yaml": "defaults: [default, _self_]\nseed: 3\n",
            "trainer/mine/default.yaml": "train_iters: 77\n",
            "trainer/mine/lost.yaml": "defaults: [other, _self_]\n",
            "trainer/mine/other.yaml": "train_iters: 77\n",
        }
    )
    composed = compose(["trainer=mine/top"])
    assert (composed.run.trainer.eval_iters, composed.run.trainer.seed) == (16, 3)
    assert composed.origins["trainer.eval_iters"].startswith("conf/trainer/default.yaml:")
    (problem,) = refusals("trainer=mine/lost")
    assert "FOLDER/NAME@_here_" in problem.fix
    (folder / "trainer/mine/lost.yaml").write_text("defaults: [mine/other@_here_, _self_]\n")
    assert compose(["trainer=mine/lost"]).run.trainer.train_iters == 77


def test_users_config_changed_file_changes_next_composition(laid: Laid) -> None:
    laid(
        {
            "trainer/top.yaml": "defaults: [sub/x@_here_, _self_]\n",
            "trainer/sub/x.yaml": "train_iters: 5\n",
        }
    )
    assert compose(["trainer=top"]).run.trainer.train_iters == 5
    laid({"trainer/sub/x.yaml": "defaults: [y]\n", "trainer/sub/y.yaml": "train_iters: 6\n"})
    assert compose(["trainer=top"]).run.trainer.train_iters == 6, "its list is not the former one"
    folder = laid({"trainer/sub/y.yaml": "train_iters: 7\n"})
    assert compose(["trainer=top"]).run.trainer.train_iters == 7
    (folder / "trainer/sub/y.yaml").unlink()
    assert [problem.code for problem in refusals("trainer=top")] == ["MT011"]


def test_users_config_refused_recipe_is_named_in_table(
    laid: Laid, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = laid(
        {"recipes/mine.yaml": "defaults: [_self_, {override /parallel: tp2}]\ntrainer: {seed: 1}\n"}
    )
    # the other recipes are in no other table
    monkeypatch.setattr("mtrain.cli.check_all.recipe_names", lambda: ["llama/tiny_cpu", "mine"])
    words = ["model=llama_tiny", "precision=fp32", "cluster=local"]
    assert main(["check", "--all", "parallel=tp2", *words]) == 0
    assert main(["check", "--all", *words]) == 2
    shown = capsys.readouterr().err
    assert "error[MT017] defaults=_self_: " in shown
    assert f"\n  origin: {folder}/recipes/mine.yaml:1\n" in shown
    laid({"recipes/mine.yaml": "parallel: {tp: 4}\n", "parallel/mine/small.yaml": "tp: 8\n"})
    assert part_of("parallel", "mine").tp == 4
    assert part_of("parallel", "mine/small").tp == 8


LAID = {
    "config.yaml": (
        f"{NO_OPTIM}  - mygroup: fast\n".replace("  - _self_\n", "") + "log: {name: mine}\n"
    ),
    "trainer/top.yaml": "defaults: [sub/x@_here_, default, _self_]\nseed: 3\n",
    "trainer/sub/x.yaml": "train_iters: 5\neval_iters: 2\n",
    "trainer/sub/y.yaml": "defaults: [default, _self_]\nseed: 4\n",
    "trainer/sub/default.yaml": "train_iters: 6\n",
    "mygroup/fast.yaml": "# @package trainer\neval_interval: 7\n",
}


@pytest.mark.filterwarnings("ignore:In 'config'. Defaults list is missing")
@pytest.mark.parametrize(
    "words", [[], ["trainer=top"], ["trainer=sub/y", "log=default"], ["~mygroup"]], ids=str
)
def test_users_config_composes_as_hydra_in_one_folder(laid: Laid, words: list[str]) -> None:
    for file in sorted(conf_dir().rglob("*.yaml")):
        laid({str(file.relative_to(conf_dir())): file.read_text()})
    folder = laid(LAID)
    layout = ["parallel=single"]  # a layout in one word is no file
    with initialize_config_dir(str(folder), version_base="1.3"):
        alone = OmegaConf.to_container(hydra_compose("config", [*layout, *words]), resolve=True)
    assert isinstance(alone, dict)
    run = compose([*layout, *words])
    assert {key: run.run.flat()[key] for key in _leaves(alone)} == _leaves(alone)
    for key, origin in run.origins.items():
        name, _, number = origin.rpartition(":")
        if number.isdigit():
            line = Path(name).read_text().splitlines()[int(number) - 1]
            assert f"{key.rpartition('.')[2]}:" in line, (key, origin)


def _leaves(values: dict[Any, Any]) -> dict[str, Any]:
    return {key: value for key, value in leaves(values) if not isinstance(value, (list, dict))}
