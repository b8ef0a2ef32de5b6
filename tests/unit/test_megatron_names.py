"""Names of weights in checkpoints of megatron-core: every spelling is that of one weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.api import load
from mtrain.cli.convert_megatron import export_megatron, import_megatron
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import run_yaml
from mtrain.errors import ConfigError
from mtrain.models.gpt import torch_dist
from tests.support.tables import tables

TABLES = tables("megatron_names")

ONE = TABLES["one"]


@pytest.mark.parametrize("name", ONE)
def test_megatron_names_weight_has_one_name(name: str) -> None:
    numbers, one = ONE[name]
    numbers = tuple(numbers)
    assert torch_dist.counted_axes(name) == len(numbers)
    assert torch_dist.one_name(name, numbers) == one
    assert torch_dist.is_weight(name)


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight",
        "chained_0.optimizer.state.fp32_param.output_layer.weight",
        (
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16,"
            " torch.float32).bucket_idx_0.param"
        ),
        "decoder.layers.self_attention.linear_qkv._extra_state",
        "model.decoder.final_layernorm._extra_state",
        "rng_state",
        "rerun_state_machine_state",
    ],
)
def test_megatron_names_non_weights_are_excluded(name: str) -> None:
    assert not torch_dist.is_weight(name)


BY_TE_AND_OWN = {
    ("llama_tiny", "0.input_layernorm"): ("self_attention.linear_qkv.layer_norm_weight",),
    ("llama_tiny", "0.pre_mlp_layernorm"): ("mlp.linear_fc1.layer_norm_weight",),
    ("mixtral_tiny", "0.pre_mlp_layernorm"): (
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
    ),
    ("deepseek_tiny", "0.input_layernorm"): ("input_layernorm.weight",),
    ("deepseek_tiny", "0.pre_mlp_layernorm"): (
        "mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.weight",
    ),
    ("deepseek_tiny", "1.pre_mlp_layernorm"): ("pre_mlp_layernorm.weight",),
    ("deepseek_tiny", "1.self_attention.q_layernorm"): (
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
    ),
    ("glm45_tiny", "1.self_attention.q_layernorm"): ("self_attention.q_layernorm.weight",),
}


@pytest.mark.parametrize(("model", "norm"), BY_TE_AND_OWN, ids=map(" ".join, BY_TE_AND_OWN))
def test_megatron_names_norm_has_name_of_both_layer_kinds(model: str, norm: str) -> None:
    run = compose([f"model={model}"]).run
    number, _, _ = norm.partition(".")
    expected = tuple(f"decoder.layers.{number}.{name}" for name in BY_TE_AND_OWN[model, norm])
    assert torch_dist.names_written(f"decoder.layers.{norm}.weight", run.model) == expected


def test_megatron_names_numbers_are_extracted_and_restored() -> None:
    name = "decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight"
    stacked, numbers = torch_dist.gathered(name, layers=True)
    assert (stacked, numbers) == ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (3, 5))
    assert torch_dist.one_name(stacked, numbers) == name
    apart, numbers = torch_dist.gathered(name, layers=False)
    assert (apart, numbers) == ("decoder.layers.3.mlp.experts.experts.linear_fc1.weight", (5,))
    assert torch_dist.one_name(apart, numbers) == name
    assert torch_dist.gathered("mtp.layers.0.enorm.weight", layers=True) == (
        "mtp.layers.0.enorm.weight",
        (),
    )


@pytest.mark.parametrize("family", ["bert", "t5", "llava"])
def test_megatron_names_other_families_are_excluded(family: str, tmp_path: Path) -> None:
    words = [f"model={family}_tiny", "data=mock"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/manifest.json").touch()
    (tmp_path / "run/run.yaml").write_text(run_yaml(load(words).run))
    refused = f"model.family={family}: cannot convert this family because Megatron-LM has no model"
    with pytest.raises(ConfigError, match=refused):
        import_megatron([str(tmp_path), str(tmp_path / "new"), *words])
    refused = f"model.family={family}: cannot convert this family because Megatron-LM has no model"
    with pytest.raises(ConfigError, match=refused):
        export_megatron([str(tmp_path / "run"), str(tmp_path / "new")])
