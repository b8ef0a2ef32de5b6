"""Weights that a run begins with are of a model: it is the run's where none is chosen, and must be
where one is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtrain.api import load
from mtrain.cli.main import main
from mtrain.config.compose.dump import run_yaml
from mtrain.errors import ConfigError
from mtrain.loading import checkpoints
from mtrain.recipes.delta import unequal
from tests.support.configs import LAPTOP, within_a_second
from tests.support.launched import light

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 640,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
ODD_HEADS = {**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-6}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
OPTIONS = "data=mock optim.lr=1e-4"


def folder(path: Path, config: dict[str, Any]) -> Path:
    """Write a Hugging Face folder with a valid configuration and dummy weights, which `check` never
    reads.
    """
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": np.zeros((8, 4), np.float32)}, path / "model.safetensors")
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [LLAMA, QWEN, MIXTRAL], ids=lambda config: config["model_type"])
def test_start_model_comes_from_weights_folder(config: dict[str, Any], tmp_path: Path) -> None:
    folder(tmp_path / "their.model", config)
    done = light("show", "checkpoint.init_from=their.model", *OPTIONS.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows: dict[str, str] = {}
    for line in done.stdout.splitlines():
        rows.setdefault(line.split(":")[0].strip(), line)  # the model comes first
    for key, theirs in (("num_layers", "num_hidden_layers"), ("vocab_size", "vocab_size")):
        value, _, origin = rows[key].partition("#")
        assert (value.split()[1], origin.strip()) == (
            str(config[theirs]),
            "their.model/config.json",
        )
    assert rows["hidden_dropout"].endswith("# default"), (
        "what their file does not say is not from it"
    )


def test_start_finds_model_within_a_second(tmp_path: Path) -> None:
    hf = folder(tmp_path / "hf", LLAMA)
    (tmp_path / "r.yaml").write_text(
        f"checkpoint: {{init_from: {hf}}}\nmodel: {{attention_dropout: 0.5}}\n"
    )
    for words in (
        f"{OPTIONS} checkpoint.init_from={hf}",
        f"{OPTIONS} checkpoint.init_from={hf} peft=lora trainer=sft",
        f"{OPTIONS} recipe={tmp_path}/r.yaml",
    ):
        with within_a_second():
            run = load(words.split(), LAPTOP, {}, to_run=False).run
        assert (run.model.num_layers, run.model.hidden_size, run.model.vocab_size) == (3, 64, 640)
    assert run.model.attention_dropout == 0.5, (
        "a recipe changes the model of the weights that it names"
    )


def test_start_model_of_run_comes_from_run_file(tmp_path: Path) -> None:
    words = ["model=llama_tiny", "model.num_layers=2", *OPTIONS.split()]
    (tmp_path / "first").mkdir()
    (tmp_path / "first/run.yaml").write_text(run_yaml(load(words, LAPTOP, {}).run))
    found = checkpoints.composed([f"checkpoint.init_from={tmp_path}/first", *OPTIONS.split()])
    assert found.run.model.num_layers == 2
    assert found.origins["model.num_layers"].startswith(f"{tmp_path}/first/run.yaml:")
    (tmp_path / "first/checkpoints/step_00000001").mkdir(parents=True)
    found = checkpoints.composed(
        [f"checkpoint.init_from={tmp_path}/first/checkpoints/step_00000001"]
    )
    assert found.run.model.num_layers == 2


def test_start_other_chosen_model_names_each_key(
    tmp_path: Path,
) -> None:
    folder(tmp_path / "hf", LLAMA)
    for verb in (["check"], []):
        done = light(
            *verb, "model=llama_tiny", "checkpoint.init_from=hf", *OPTIONS.split(), cwd=tmp_path
        )
        assert done.returncode == 2
        for key, here, there in (
            ("num_layers", 4, 3),
            ("hidden_size", 256, 64),
            ("vocab_size", 4096, 640),
        ):
            line = next(row for row in done.stderr.splitlines() if f"model.{key}={here}:" in row)
            assert line.startswith("error[MT503] ")
            assert f"there it is {there})" in line
        assert done.stderr.count("origin: conf/model/llama_tiny.yaml:") >= 3
        assert "Leave the choice of model out" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_start_key_unlike_weights_is_refused(
    tmp_path: Path,
) -> None:
    hf = folder(tmp_path / "hf", LLAMA)
    with pytest.raises(ConfigError) as caught:
        load([f"checkpoint.init_from={hf}", "model.num_layers=4", *OPTIONS.split()], LAPTOP, {})
    (problem,) = (p for p in caught.value.problems if p.severity == "error")
    assert (problem.code, problem.path, problem.source) == (
        "MT503",
        "model.num_layers",
        "command line",
    )
    assert problem.fix == "model.num_layers=3"
    load([f"checkpoint.init_from={hf}", problem.fix, *OPTIONS.split()], LAPTOP, {})


def test_start_equal_chosen_model_passes(tmp_path: Path) -> None:
    hf = folder(tmp_path / "hf", LLAMA)
    words = (
        "model=llama_tiny model.num_layers=3 model.hidden_size=64 model.ffn_hidden_size=96"
        " model.num_query_groups=2 model.num_attention_heads=4 model.vocab_size=640"
        " model.max_position_embeddings=128"
    )
    found = load([*words.split(), f"checkpoint.init_from={hf}", *OPTIONS.split()], LAPTOP, {})
    assert found.origins["model.normalization"].startswith("conf/model/llama_tiny.yaml:")


def test_start_indivisible_heads_use_one_cpu_rank(tmp_path: Path) -> None:
    hf = folder(tmp_path / "hf", ODD_HEADS)
    run = load([f"checkpoint.init_from={hf}", *OPTIONS.split()], LAPTOP, {}).run
    assert (run.parallel.tp, run.parallel.ranks) == (1, 1)


def test_start_folder_without_weights_is_refused(tmp_path: Path) -> None:
    hf = folder(tmp_path / "hf", LLAMA)
    (hf / "model.safetensors").unlink()
    done = light("check", "checkpoint.init_from=hf", *OPTIONS.split(), cwd=tmp_path)
    assert done.returncode == 4
    assert "neither model.safetensors.index.json nor model.safetensors" in done.stderr


@pytest.mark.parametrize("more", [[], ["model.attention_dropout=0.5", "peft=lora"]])
def test_start_recipe_names_weights_not_model(
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder(tmp_path / "hf", LLAMA)
    monkeypatch.chdir(tmp_path)
    words = [*OPTIONS.split(), "checkpoint.init_from=hf", *more]
    assert main(["recipe", "new", "r.yaml", *words]) == 0
    text = (tmp_path / "r.yaml").read_text()
    assert "override /model" not in text
    assert "num_layers" not in text
    expected = checkpoints.composed(words).run
    assert unequal(checkpoints.composed(["recipe=r.yaml"]).run, expected) == []
    capsys.readouterr()
    assert main(["show", "--changed", *words]) == 0
    changed = [line.partition("  #")[0] for line in capsys.readouterr().out.splitlines()]
    assert "checkpoint.init_from=hf" in changed
    assert unequal(checkpoints.composed(changed).run, expected) == []
