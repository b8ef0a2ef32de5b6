"""`config.json` of Nemotron-3, Nemotron-4 and Minitron: biased norms around 1, an MLP without a
gate, partial rotary positions.
"""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json
from mtrain.recipes.huggingface.families import LLAMA
from mtrain.recipes.huggingface.readers import UNGATED_WORDS, llama_biases
from mtrain.recipes.huggingface.rope import partly_rotary
from mtrain.recipes.huggingface.writers import partly

UNREAD = {
    **dict.fromkeys(
        ("rope_percent", "rope_percentage"), "partial_rotary_factor sets the rotary part of a head"
    ),
    "layer_norm_eps": "norm_eps sets it",
    "kv_channels": "head_dim sets the width of a head",
}
"""Keys of published files that transformers does not read -> the key that it reads."""
WORDS = {"squared_relu": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_new"}
"""Activations of an MLP without a gate -> the word in the file."""


def _block(file: ConfigFile) -> None:
    word = file.get("hidden_act")
    file.out["model.activation"] = (
        UNGATED_WORDS.get(word, "squared_relu") if isinstance(word, str) else "squared_relu"
    )
    file.must(
        "hidden_act",
        tuple(UNGATED_WORDS),
        f"changes the numbers: there are {', '.join(UNGATED_WORDS)}",
    )
    if "partial_rotary_factor" in file.given and file.given["partial_rotary_factor"] is None:
        file.refuse(
            "partial_rotary_factor",
            "not supported",
            "changes the numbers: transformers takes no null here",
        )
    for key, text in UNREAD.items():
        file.idle((key,), f"is not read for this family: {text}")


READS = Family(
    {
        **{theirs: ours for theirs, ours in LLAMA.items() if theirs != "rms_norm_eps"},
        "norm_eps": LLAMA["rms_norm_eps"],
    },
    {
        "model.normalization": "LayerNorm",
        "model.layernorm_zero_centered_gamma": True,
        "model.position_embedding_type": "rope",
    },
    {
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "initializer_range": 0.0134,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "partial_rotary_factor": 0.5,
    },
    (_block, llama_biases, partly_rotary),
)


def writes(model: ModelConfig) -> Json:
    """Return the keys of the file beyond the copied ones."""
    biases = {
        "attention_bias": model.add_bias_linear or model.add_proj_bias,
        "mlp_bias": model.add_bias_linear or model.add_mlp_bias,
    }
    return {"hidden_act": WORDS[model.activation], **partly(model), **biases}
