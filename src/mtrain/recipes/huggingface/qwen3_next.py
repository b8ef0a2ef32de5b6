"""`config.json` of Qwen3-Next: linear attention except in every n-th layer, gated attention,
experts and a shared expert.
"""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json
from mtrain.recipes.huggingface.families import GATED, LLAMA, QWEN_MOE
from mtrain.recipes.huggingface.readers import attention_biases, gate, qwen_experts, shared_expert
from mtrain.recipes.huggingface.rope import partly_rotary
from mtrain.recipes.huggingface.writers import gate_of, partly, qwen_moe

LINEAR = "linear_attention"
SOFTMAX = "full_attention"
OWN = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
"""Keys of `model.linear_attention`; Hugging Face's have the prefix `linear_`."""


def _layers(count: int, every: int) -> list[str]:
    return [SOFTMAX if (i + 1) % every == 0 else LINEAR for i in range(count)]


def _linear_attention(file: ConfigFile) -> None:
    """Read the pattern of layers, and the sizes of those with linear attention."""
    file.must(
        "hidden_act",
        ("silu", "swish"),
        "changes the numbers: convolutions of linear attention have SiLU here",
    )
    file.must(
        "use_sliding_window",
        (False,),
        "changes the numbers: attention of this family has no window",
    )
    every = file.get("full_attention_interval")
    kinds = file.get("layer_types", _layers(file.layers, every))
    every = kinds.index(SOFTMAX) + 1 if SOFTMAX in kinds else max(every, len(kinds) + 1)
    if every < 2 or kinds != _layers(file.layers, every):
        key = "layer_types" if file.given.get("layer_types") else "full_attention_interval"
        file.refuse(
            key,
            "not supported",
            "changes the numbers: linear attention is in all layers but every n-th here",
        )
    file.out["model.linear_attention.freq"] = max(2, every)
    for key in OWN:
        file.out[f"model.linear_attention.{key}"] = file.get(f"linear_{key}")


def _experts(file: ConfigFile) -> None:
    """Read the experts of Qwen3-MoE and a shared one, unless every layer is dense."""
    qwen_experts(file)
    shared_expert(file)
    if file.out["model.moe.first_dense_layers"] >= file.layers:
        file.out = {
            key: value for key, value in file.out.items() if not key.startswith("model.moe.")
        }


QWEN3_NEXT = Family(
    LLAMA,
    {
        **GATED,
        "model.layernorm_zero_centered_gamma": True,
        "model.qk_layernorm": True,
        "model.attention_output_gate": True,
    },
    {
        **QWEN_MOE,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_local_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    (gate, attention_biases, partly_rotary, _experts, _linear_attention),
    {"num_experts": "num_local_experts"},
)


def writes(model: ModelConfig) -> Json:
    """Return the keys of the file beyond the copied ones."""
    own = model.linear_attention
    if own is None:
        raise ValueError("there is no linear attention")
    out = {**gate_of(model), "mlp_only_layers": list(range(model.num_layers))}
    if model.moe is not None:
        out = {
            **qwen_moe(model),
            "shared_expert_intermediate_size": model.moe.shared_expert_intermediate_size or 0,
        }
    return {
        **out,
        **partly(model),
        "attention_bias": model.add_qkv_bias and model.add_proj_bias,
        "layer_types": _layers(model.num_layers, own.freq),
        **{f"linear_{key}": getattr(own, key) for key in OWN},
    }
