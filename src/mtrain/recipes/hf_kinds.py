"""Every `model_type` of Hugging Face that is known, of any family of models: how it is read and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrain.config.model import ModelConfig
from mtrain.recipes import hf_llava
from mtrain.recipes.hf_families import FAMILIES
from mtrain.recipes.hf_keys import Family, Json
from mtrain.recipes.hf_writers import WRITERS


@dataclass(frozen=True)
class Kind:
    """One `model_type`."""

    reads: Family
    writes: Callable[[ModelConfig], Json]
    """What its `config.json` says of a model beyond the keys that are copied. Raises KeyError, ValueError, TypeError
    or AttributeError where it can say no such model."""
    architecture: Callable[[ModelConfig], str]
    """The class of transformers that loads the folder of a model."""

    @property
    def family(self) -> str:
        """`model.family` of the models that it describes."""
        return str(self.reads.fixed.get("model.family", "gpt"))


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
"""Decoder-only: `model_type` -> its class in transformers, in the order in which one is looked for."""


def _always(name: str) -> Callable[[ModelConfig], str]:
    return lambda model: name


KINDS: dict[str, Kind] = {
    **{kind: Kind(FAMILIES[kind], WRITERS[kind], _always(name)) for kind, name in DECODERS.items()},
    "llava": Kind(hf_llava.READS, hf_llava.writes, _always("LlavaForConditionalGeneration")),
}
"""`model_type` -> how it is read and written."""
