"""A folder of choices outside of the repository: it adds and shadows choices, and is named in three
ways.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from mtrain.cli.completion import candidates
from mtrain.cli.main import main
from mtrain.config.compose import paths
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import run_yaml
from mtrain.config.compose.paths import VARIABLE, config_dirs
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import ConfigError
from tests.support.configs import LAPTOP, refusals, tiny
from tests.support.tables import tables

TABLES = tables("user_folders")

FILES = TABLES["files"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "mine"


@pytest.fixture
def named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def test_user_folder_choices_keep_their_lines(named: Path) -> None:
    composed = compose(["model=small", "cluster=box"])
    assert (composed.run.model.num_layers, composed.run.model.hidden_size) == (2, 256)
    assert composed.origins["model.num_layers"] == f"{named}/model/small.yaml:6"
    assert composed.origins["model.hidden_size"].startswith("conf/model/llama_tiny.yaml:")
    assert composed.run.cluster.name == "box"


def test_user_folder_choice_shadows_shipped(named: Path) -> None:
    composed = compose([])
    assert composed.run.optim.lr == 0.025
    assert composed.origins["optim.lr"] == f"{named}/optim/adamw.yaml:2"


def test_user_folder_choice_may_lie_in_group_folder(named: Path) -> None:
    composed = compose(["model=mine/deep"])
    assert (composed.run.model.name, composed.run.model.num_layers) == ("deep", 6)
    assert composed.choices["model"] == "mine/deep"


def test_user_folder_recipe_is_found_by_name(named: Path) -> None:
    assert compose(["recipe=go"]).run.trainer.train_iters == 3
    assert compose(["recipe=team/deep"]).run.model.name == "deep"


def test_user_folder_group_is_added_as_hydra(named: Path) -> None:
    composed = compose(["+experiment=fast", "optim.lr=0.5"])
    assert (composed.run.model.name, composed.run.trainer.train_iters) == ("small", 5)
    assert composed.origins["trainer.train_iters"] == f"{named}/experiment/fast.yaml:4"
    assert composed.choices["model"] == "small"
    with pytest.raises(ConfigError, match=r"\+experiment=fast"):
        compose(["experiment=fast"])


def test_user_folder_first_counts_most(named: Path, tmp_path: Path) -> None:
    (tmp_path / "over/model").mkdir(parents=True)
    (tmp_path / "over/model/small.yaml").write_text("defaults: [llama_tiny, _self_]\nname: over\n")
    with config_dirs([str(tmp_path / "over")]):
        assert compose(["model=small"]).run.model.name == "over"
        assert compose(["model=mine/deep"]).run.model.name == "deep"
    assert compose(["model=small"]).run.model.name == "small"


def test_user_folder_flag_holds_anywhere_for_one_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for words in (["--config-dir", str(folder), "check"], ["check", f"--config-dir={folder}"]):
        assert main([*words, "model=small", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ok"]
    assert main(["check", "model=small"]) == 2
    assert "there is no such choice" in capsys.readouterr().err


@pytest.mark.full
def test_user_folder_sweep_and_list_use_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["check", "-m", "--config-dir", str(folder), "model=small,mine/deep", "recipe=go"])
        == 0
    )
    assert "2 of 2 pass" in capsys.readouterr().out
    assert main(["choices", "model", "--config-dir", str(folder)]) == 0
    assert "small" in capsys.readouterr().out
    assert main(["recipe", "list", "--config-dir", str(folder)]) == 0
    assert "team/deep" in capsys.readouterr().out
    assert "model=small" in candidates(
        f"mtrain --config-dir {shlex.quote(str(folder))} check model=sm"
    )


def test_user_folder_package_may_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "their_package"
    for name, text in FILES.items():
        file = package / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mtrain.conf]\ntheirs = their_package.conf\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    paths._of_packages.cache_clear()
    try:
        assert compose(["model=small"]).run.model.name == "small"
        assert compose(["recipe=go"]).run.cluster.name == "box"
    finally:
        paths._of_packages.cache_clear()


@pytest.mark.parametrize("text", ["model={path}", "model='{path}'"])
def test_user_folder_choice_may_be_a_path(text: str, tmp_path: Path) -> None:
    file = tmp_path / "my model.yaml" if "'" in text else tmp_path / "my.yaml"
    file.write_text("defaults: [llama_tiny, _self_]\nname: my\nnum_layers: 2\n")
    composed = compose([text.format(path=file), "optim.lr=0.5"])
    assert (composed.run.model.name, composed.run.model.num_layers) == ("my", 2)
    assert composed.origins["model.num_layers"] == f"{file}:3"
    assert composed.choices["model"] == str(file)


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [
        ("model=./nothing.yaml", "MT011", "no such file"),
        ("model={folder}/recipes/go.yaml", "MT010", "is a recipe"),
        ("optim={folder}/cluster/box.yaml", "MT012", "there is no such key"),
    ],
)
def test_user_folder_foreign_path_is_refused(folder: Path, word: str, code: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([word.format(folder=folder)])
    assert code in {p.code for p in caught.value.problems}
    assert any(said in p.rule for p in caught.value.problems)


def test_user_folder_recipe_names_no_path(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("defaults: [{override /model: ./my.yaml}]\n")
    with pytest.raises(ConfigError, match="a recipe is one file"):
        compose([f"recipe={tmp_path / 'r.yaml'}"])


def test_user_folder_removed_value_is_default_again() -> None:
    composed = compose(["~optim.eps", "~optim.lr", "model=llama_tiny"])
    assert composed.run.optim.eps == type(composed.run.optim).model_fields["eps"].default
    assert composed.origins["optim.eps"] == composed.origins["optim.lr"] == "default"
    assert compose(["~checkpoint"]).run.checkpoint == type(composed.run.checkpoint)()


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("defaults: [bad, _self_]\n", "MT011", "leads back to its own file"),
        (
            "defaults: [nothing, _self_]\n",
            "MT011",
            "model/nothing is listed, and there is no such file",
        ),
        ("defaults: [{/hydra/launcher: basic}]\n", "MT006", "neither a part of Hydra"),
        ("defaults: [{/data: '${oc.env:HOME}'}]\n", "MT006", "nor a reference"),
        ("# @package hydra\nrun: 1\n", "MT006", "configures no loader"),
        ("hydra: {run: 1}\n", "MT006", "configures no loader"),
        ("_target_: os.system\n", "MT006", "configures no loader"),
        ("name: ${oc.env:HOME}\n", "MT007", "resolvers never run"),
        ("name: !!python/name:os.system\n", "MT006", "the tag"),
        ("name: 1\nname: 2\n", "MT004", "written twice"),
    ],
)
def test_user_folder_file_is_data_with_its_line(
    named: Path, text: str, code: str, said: str
) -> None:
    (named / "model/bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["model=bad"])
    assert any(p.code == code and said in p.rule for p in caught.value.problems), (
        caught.value.problems
    )


def test_user_folder_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config-dir", "/nothing/here"]) == 2
    assert "/nothing/here" in capsys.readouterr().err


def test_user_folder_enables_hooks_and_a_recipe_does_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "log").mkdir()
    (folder / "log/mine.yaml").write_text("hooks: [garbage]\n")
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text("log: {hooks: [garbage]}\n")
    with pytest.raises(ConfigError) as refused:
        compose([f"recipe={recipe}"])
    assert [problem.code for problem in refused.value.problems] == ["MT523"]
    assert compose([f"recipe={recipe}", "log.hooks=[garbage]"]).run.log.hooks == ("garbage",)
    monkeypatch.setenv(VARIABLE, str(folder))
    assert compose(["log=mine"]).run.log.hooks == ("garbage",)


def test_user_folder_names_a_judge_and_a_recipe_does_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "rollout").mkdir()
    url = "http://judge:8000/score"
    text = f"reward_url: {url}\n"
    (folder / "rollout/mine.yaml").write_text(text)
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(f"rollout: {{reward_url: {url}}}\n")
    assert {problem.code for problem in refusals(f"recipe={recipe}")} == {"MT480"}
    own = [f"recipe={recipe}", f"rollout.reward_url={url}"]
    assert compose(own).run.rollout.reward_url == url
    monkeypatch.setenv(VARIABLE, str(folder))
    assert compose(["rollout=mine"]).run.rollout.reward_url == url


def test_user_folder_run_file_enables_hooks_only_at_home(tmp_path: Path) -> None:
    home = tmp_path / "run"
    saved = home / "checkpoints/step_00000002"
    saved.mkdir(parents=True)
    text = run_yaml(resolve(tiny(log__hooks=["garbage"]), LAPTOP))
    for file in (home / "run.yaml", saved / "run.yaml"):
        file.write_text(text)

    def codes(file: Path) -> set[str]:
        return {problem.code for problem in refusals(f"run={file}")}

    # Somebody else's: no start of a run here has written it.
    assert codes(home / "run.yaml") == {"MT523"}
    facts = {"home": os.path.realpath(home), "hooks": ["garbage"]}
    (home / "env.json").write_text(json.dumps(facts))
    for file in (home / "run.yaml", saved / "run.yaml"):
        assert compose([f"run={file}"]).run.log.hooks == ("garbage",)
    (home / "env.json").write_text(json.dumps(facts | {"hooks": ["loss_spikes"]}))
    assert codes(home / "run.yaml") == {"MT523"}
    (home / "env.json").write_text(json.dumps(facts))
    shutil.copytree(home, tmp_path / "copied")
    assert codes(tmp_path / "copied/run.yaml") == {"MT523"}
    words = [f"run={tmp_path}/copied/run.yaml", "log.hooks=[garbage]"]
    assert compose(words).run.log.hooks == ("garbage",)
