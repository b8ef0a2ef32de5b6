"""Every known `model_type` of Hugging Face, with its rules to read and write it."""

from __future__ import annotations

from collections.abc import Callable

from mtrain.config import families
from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface import deepseek_v32, nemotron, qwen3_next
from mtrain.recipes.huggingface.config_file import Kind
from mtrain.recipes.huggingface.families import FAMILIES
from mtrain.recipes.huggingface.granite import GRANITE
from mtrain.recipes.huggingface.writers import WRITERS

DECODERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
}
"""Decoder-only `model_type` -> its class in transformers, in the order of the search."""


def _always(name: str) -> Callable[[ModelConfig], str]:
    return lambda model: name


def _mistral(model: ModelConfig) -> str:
    return DECODERS["mistral"] if model.window_attn_skip_freq is None else "MinistralForCausalLM"


def _of_families() -> dict[str, Kind]:
    """Return the kinds of `config.json` in the folder of each family, by `model_type`."""
    found: dict[str, Kind] = {}
    for name in families.configs():
        if families.has(name, "hf_config"):
            found |= families.part(name, "hf_config", "KINDS", dict)
    return found


KINDS: dict[str, Kind] = {
    **{kind: Kind(FAMILIES[kind], WRITERS[kind], _always(name)) for kind, name in DECODERS.items()},
    "mistral": Kind(FAMILIES["mistral"], WRITERS["mistral"], _mistral),
    "deepseek_v32": Kind(
        deepseek_v32.READS, deepseek_v32.writes, _always("DeepseekV32ForCausalLM")
    ),
    "qwen3_next": Kind(qwen3_next.QWEN3_NEXT, qwen3_next.writes, _always("Qwen3NextForCausalLM")),
    "nemotron": Kind(nemotron.READS, nemotron.writes, _always("NemotronForCausalLM")),
    **_of_families(),
    "granitemoehybrid": GRANITE,
}
"""`model_type` -> its rules to read and write it."""
