"""Folders from other tools: kimi_k2, no MTP layers, text models with images; and kinds of
exports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.compose.composer import compose
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.resolve.resolution import resolve
from mtrain.errors import ConfigError
from mtrain.recipes.huggingface.exporter import config_json, differing, same_model
from mtrain.recipes.huggingface.importer import KINDS, import_config
from tests.parity_hf.families import CASES, GEMMA3, GLM4, MOE, QWEN2_MOE, QWEN_MOE, SIZES, V3
from tests.parity_hf.test_convert import command, data_of, saved
from tests.support.configs import LAPTOP
from tests.support.covering import some
from tests.support.forked import run_alone
from tests.support.launched import mtrain


def read(tmp_path: Path, kind: str, values: dict[str, Any]) -> Any:
    """Import a `config.json`."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **values}))
    return import_config(file)


def logits(folder: Path) -> dict[str, Any]:
    """Return their comparison in the certificate of a conversion."""
    found: dict[str, Any] = json.loads((folder / "conversion.json").read_text())["logits"]
    return found


@pytest.mark.full
def test_foreign_folder_kimi_k2_round_trips_as_deepseek_v3(tmp_path: Path) -> None:
    source = saved("deepseek v3", tmp_path / "theirs")
    run = tmp_path / "run"
    out = tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    config["model_type"] = "kimi_k2"
    (source / "config.json").write_text(json.dumps(config))
    for words in (("import", source, run), ("export", run, out), ("verify", run, source)):
        done = mtrain("convert", *map(str, words), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "largest_error" in logits(run)
    assert "largest_error" in logits(out)
    said = json.loads((out / "config.json").read_text())
    assert (said["model_type"], said["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert data_of(out) == data_of(source)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["deepseek v3", pytest.param("glm 4.5", marks=pytest.mark.full)])
def test_foreign_folder_mtp_layers_follow_weights(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind == "deepseek v3":
        case = "deepseek v3"
    else:
        case = next(name for name in CASES if CASES[name].kind == "glm4_moe")
    source = saved(case, tmp_path / "theirs", num_nextn_predict_layers=1)
    run = tmp_path / "run"
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert command("import", source, run) == 0
    assert "model.mtp_num_layers=null" in capfd.readouterr().out
    assert "mtp_num_layers: 1" not in (run / "run.yaml").read_text()
    assert command("import", source, tmp_path / "asked", "model.mtp_num_layers=1") == 2
    assert "model.mtp_num_layers=null" in capfd.readouterr().err
    assert command("export", run, tmp_path / "out") == 0
    assert data_of(tmp_path / "out") == data_of(source)


@pytest.mark.full
def test_foreign_folder_unnumbered_tensors_are_no_weights(tmp_path: Path) -> None:
    source = saved("deepseek v3", tmp_path / "theirs", n_shared_experts=0)
    run = tmp_path / "run"
    assert any(data == b"" for data in data_of(source).values())
    assert command("import", source, run) == 0
    assert command("export", run, tmp_path / "out") == 0
    assert data_of(tmp_path / "out") == {
        name: data for name, data in data_of(source).items() if data
    }


def images(folder: Path) -> None:
    """Save a Gemma 3 that reads images."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=dict(GEMMA3), vision_config=vision, mm_tokens_per_image=4, image_token_index=130
    )
    torch.manual_seed(0)
    made = Gemma3ForConditionalGeneration(config)
    for tensor in made.parameters():
        tensor.data.normal_(0.0, 0.1)
    made.save_pretrained(folder)


def as_in_memory(folder: Path) -> None:
    """Put the names into a folder that the class has for its parameters: others than
    `save_pretrained` writes.
    """
    from safetensors.torch import load_file, save_file

    held = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in held.items():
        renamed["model." + name.replace("language_model.model.", "language_model.")] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.full
@pytest.mark.parametrize("published", [True, False])
def test_foreign_folder_gemma3_with_images_gives_text_model(
    published: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "theirs"
    run = tmp_path / "run"
    out = tmp_path / "out"
    run_alone(lambda: images(source))
    if not published:
        as_in_memory(source)
    assert command("import", source, run) == 0
    assert "only the text model is read" in capfd.readouterr().out
    found = logits(run)
    assert found["largest_error"] <= 1e-5 * max(1.0, found["largest_logit"]), found
    ignored = json.loads((run / "conversion.json").read_text())["ignored"]
    assert ignored
    assert all("vision_tower" in name or "multi_modal_projector" in name for name in ignored)
    assert command("export", run, out) == 0
    assert logits(out)["largest_error"] <= 1e-5 * max(1.0, found["largest_logit"])
    said = json.loads((out / "config.json").read_text())
    assert (said["model_type"], said["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert not [name for name in data_of(out) if "vision" in name]


def test_foreign_folder_other_kinds_are_written_as_computed_kind(
    tmp_path: Path,
) -> None:
    from mtrain.cli import convert

    for kind, written, values in (
        ("kimi_k2", "deepseek_v3", V3),
        ("gemma3", "gemma3_text", {"text_config": GEMMA3, "vision_config": {}}),
    ):
        run = resolve(read(tmp_path, kind, values).run, LAPTOP)
        (tmp_path / "hf").mkdir(exist_ok=True)
        body = {"model_type": kind, "architectures": ["Other"], **values}
        (tmp_path / "hf/config.json").write_text(json.dumps(body))
        said, config = convert._config_of(run, tmp_path, None)
        assert (said, config["model_type"]) == (written, written)
        assert config["architectures"] == [KINDS[written].architecture(run.model)]


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe with biases": ("qwen3_moe", {**QWEN_MOE, "attention_bias": True}),
    "qwen2_moe without biases": ("qwen2_moe", {**QWEN2_MOE, "qkv_bias": False}),
    "qwen2_moe with windows": (
        "qwen2_moe",
        {**QWEN2_MOE, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "mistral with windows in some layers": (
        "mistral",
        {**SIZES, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "glm4_moe": ("glm4_moe", GLM4),
    "deepseek_v3": ("deepseek_v3", V3),
}


@pytest.mark.parametrize("name", ASKED)
def test_foreign_folder_read_kind_is_written_on_request(name: str, tmp_path: Path) -> None:
    kind, values = ASKED[name]
    found = read(tmp_path, kind, values)
    assert differing(found) == []
    model = resolve(found.run, LAPTOP).model
    again = read(
        tmp_path,
        kind,
        {k: v for k, v in config_json(model, "float32", kind).items() if k != "model_type"},
    )
    assert same_model(resolve(again.run, LAPTOP).model, model) == []


# Megatron-LM's BERT has a head that bends otherwise than its layers, which no class of transformers
# has.
TINY = [
    name
    for name in choices_of_group("model")
    if name.endswith("_tiny") and name != "megatron_bert_tiny"
]


@pytest.mark.parametrize("name", some(TINY, ["phi3_tiny"]))
def test_foreign_folder_transformers_builds_small_export(name: str, tmp_path: Path) -> None:
    import transformers

    model = resolve(compose([f"model={name}"]).run, LAPTOP).model
    body = config_json(model, "float32")
    (tmp_path / "config.json").write_text(json.dumps(body))

    def build() -> int:
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        with torch.device("meta"):
            made = getattr(transformers, body["architectures"][0])(config)
        return int(made.get_input_embeddings().weight.shape[0])

    assert run_alone(build) == model.vocab_size


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mixtral", {**MOE, "num_experts_per_tok": 1}),
        ("qwen3_moe", {**QWEN_MOE, "num_experts_per_tok": 1, "norm_topk_prob": True}),
        ("gpt_oss", {**CASES["gpt oss beyond its window"].values, "num_experts_per_tok": 1}),
    ],
)
def test_foreign_folder_top1_expert_with_fixed_score_is_refused(
    kind: str, values: dict[str, Any], tmp_path: Path
) -> None:
    found = read(tmp_path, kind, values)
    assert any("num_experts_per_tok = 1" in text for text in differing(found))
    with pytest.raises(ConfigError) as caught:
        config_json(found.run.model, "float32", kind)
    assert "num_experts_per_tok" in str(caught.value)


def test_foreign_folder_top1_expert_with_own_score_is_read(tmp_path: Path) -> None:
    values = {**QWEN_MOE, "num_experts_per_tok": 1, "norm_topk_prob": False}
    assert differing(read(tmp_path, "qwen3_moe", values)) == []
