"""Folders of `peft` that are not what they should be: each is refused with a sentence, and nothing
else happens.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mtrain.cli.main import main
from mtrain.config.schema.peft import PeftConfig
from mtrain.errors import ConfigError, CorruptData
from tests.support.forked import import_engine
from tests.support.launched import light

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "peft_version": "0.19.1"}
PEFT = PeftConfig(kind="lora", r=4, alpha=8.0)


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    import_engine()


def refused(folder: Path, **more: Any) -> str:
    """Return the error for a configuration with these keys; empty if it is accepted."""
    from mtrain.convert.peft.folder import _refuse_others, read_config

    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | more))
    try:
        _refuse_others(folder, read_config(folder), PEFT)
    except ConfigError as error:
        if all(problem.fix for problem in error.problems):
            return str(error)
        return "a problem without a fix"
    return ""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "more",
    [
        {"r": 8},
        {"r": {"a": float("nan")}},
        {"lora_alpha": None},
        {"use_dora": True},
        {"use_rslora": True},
        {"peft_type": "IA3"},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 4], [2, 5]]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 16}},
        {"rank_pattern": [3]},
        {"alpha_pattern": {"q_proj": "x"}, "rank_pattern": {"q_proj": 4}},
    ],
    ids=lambda more: "-".join(more),
)
def test_adapter_folder_unlike_computation_is_refused(more: dict[str, Any], tmp_path: Path) -> None:
    assert refused(tmp_path) == ""
    assert refused(tmp_path, rank_pattern={"q_proj": 8}, alpha_pattern={"q_proj": 16}) == ""
    assert "MT521" in refused(tmp_path, **more)


def test_adapter_folder_several_adapters_scale_separately(tmp_path: Path) -> None:
    from mtrain.convert.peft.adapters import PeftAdapters
    from mtrain.convert.peft.folder import _config

    for alpha, scaled in ((8.0, 24), (0.5, 1.5), (0.3, 3 * 0.3)):
        peft = PeftConfig(kind="lora", r=4, alpha=alpha)
        body = _config(peft, PeftAdapters(ranks={"qkv_proj": 12}), "0.19.1", None)
        assert body["alpha_pattern"] == {"qkv_proj": scaled}
        assert scaled / 12 == pytest.approx(peft.scale)


def test_adapter_folder_deep_value_is_refused_in_a_sentence(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    assert "a list" in refused(tmp_path, bias=deep)
    assert "an object" in refused(tmp_path, r={"a": deep})


def test_adapter_folder_version_sets_expert_layout() -> None:
    from mtrain.convert.peft.folder import _is_swapped

    swapped = {
        None: True,
        "0.17.1": True,
        "0.18.1": True,
        "0.19.0": False,
        "0.21.2.dev0@main": False,
        "1.0": False,
    }
    assert {version: _is_swapped({"peft_version": version}) for version in swapped} == swapped
    assert all(_is_swapped({"peft_version": odd}) for odd in ("x", {}, "²", "", "."))


def test_adapter_folder_is_kept_with_megatron_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN))
    words = ["model=llama_tiny", "peft=lora", f"peft.init_from={tmp_path}"]
    assert (
        main(["convert", "import", "--megatron", str(tmp_path), str(tmp_path / "run"), *words]) == 2
    )
    assert "MT521" in capsys.readouterr().err


@pytest.mark.full
def test_adapter_folder_comparison_uses_its_own_process(tmp_path: Path) -> None:
    from mtrain.ckpt.new_file import Writer

    llama = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
    }
    llama |= {
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
    }
    for file, body in (("config.json", llama), ("adapter_config.json", PLAIN)):
        (tmp_path / file).write_text(json.dumps(body))
    for file in ("model.safetensors", "adapter_model.safetensors"):
        with Writer(tmp_path / file, ["x"]) as writer:
            writer.write("x", "F32", (1,), memoryview(bytes(4)))
            writer.close({"format": "pt"})
    words = ("peft=lora", "peft.r=4", "peft.alpha=8", f"peft.init_from={tmp_path}")
    done = light("convert", "import", str(tmp_path), "run", *words, cwd=tmp_path)
    assert (done.returncode, "does not fit the adapters of this run" in done.stderr) == (4, True), (
        done.stderr
    )
    assert not (tmp_path / "run").exists()


def test_adapter_folder_damaged_is_refused_cleanly(tmp_path: Path) -> None:
    from mtrain.ckpt.new_file import Writer
    from mtrain.convert.huggingface.model import layer_table
    from mtrain.convert.peft.folder import read_adapters
    from mtrain.loading.configuration import load
    from tests.support.forked import run_alone

    run = load(
        ["model=llama_tiny", "parallel=single", "peft=lora", "peft.r=4", "peft.alpha=8.0"]
    ).run
    config = tmp_path / "adapter_config.json"
    weights = tmp_path / "adapter_model.safetensors"
    config.write_text(json.dumps(PLAIN))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with Writer(weights, [key]) as writer:
        writer.write(key, "F32", (4, 8), memoryview(bytes(128)))
        writer.close({"format": "pt"})
    good = {config: config.read_bytes(), weights: weights.read_bytes()}

    def job() -> list[str]:
        draw = random.Random(1)
        out = []
        for _ in range(60):
            file = draw.choice([config, weights])
            data = bytearray(good[file])
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            file.write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
            try:
                read_adapters(tmp_path, run, layer_table("llama"))
            except (CorruptData, ConfigError) as error:
                out.append(str(error))
            file.write_bytes(good[file])
        return out

    said = run_alone(job)
    assert len(said) == 60, "an adapter of a single layer does not fit either"
    assert all("adapter_" in text for text in said)
