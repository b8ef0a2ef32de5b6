"""The decoders of transformers: an entry of `families.json` each, and readers for keys that are not
copied.

An entry names the class of transformers and holds fields of `Family`. A field is a list of names
of shared `sets` and of objects; a later part overrides an earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from mtrain.config.messages.keys import key_of
from mtrain.recipes.huggingface import readers, rope
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json

_FILE = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
_Parts = Sequence[str | Json]


def _named(*names: str) -> dict[str, str]:
    """Return keys of `model` under the names that the schema records for Llama's `config.json`."""
    return {key_of(f"model.{name}").hf.split()[0]: f"model.{name}" for name in names}


COMMON = _named(
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "init_method_std",
    "attention_dropout",
)
_LLAMA = COMMON | _named("num_query_groups", "kv_channels", "layernorm_epsilon")
# the schema owns these names, so they are not data of the file
_FILE["sets"]["keys"] = {
    "common": [COMMON],
    "llama": [_LLAMA],
    "latent": [COMMON, _named("layernorm_epsilon")],
    "gemma": [_LLAMA, _named("final_logit_softcapping")],
}

# Order matters: `two_bases` asks whether a window was read, and the rotary readers whether MLA was,
# which the experts of DeepSeek read.
_MORE: dict[str, tuple[Callable[[ConfigFile], None], ...]] = {
    "llama": (readers.gate, readers.llama_biases, rope.rotary),
    "mistral": (readers.gate, rope.window_everywhere, rope.rotary),
    "mixtral": (readers.gate, rope.window_everywhere, rope.rotary, readers.mixtral_experts),
    "qwen2": (readers.gate, rope.window_in_upper_layers, rope.rotary),
    "qwen2_moe": (readers.gate, rope.window_in_odd_layers, rope.rotary, readers.qwen2_experts),
    "qwen3": (
        readers.gate,
        readers.attention_biases,
        rope.window_in_upper_layers,
        rope.rotary,
    ),
    "qwen3_moe": (
        readers.gate,
        readers.attention_biases,
        rope.optional_window,
        rope.rotary,
        readers.qwen_experts,
    ),
    "gemma2": (readers.gemma_attention, rope.window_in_every_other_layer, rope.rotary),
    "gemma3_text": (readers.gemma_attention, rope.window_except_every_nth, rope.two_bases),
    "olmo2": (readers.gate, rope.rotary),
    "minimax_m2": (readers.gate, rope.first_channels_rotary, readers.minimax_experts),
    "gpt_oss": (rope.window_in_every_other_layer, rope.rotary, readers.gpt_oss_experts),
    "deepseek_v2": (readers.gate, readers.deepseek_v2_experts, rope.rotary),
    "deepseek_v3": (readers.gate, readers.deepseek_v3_experts, rope.rotary),
    "deepseek_v32": (
        readers.gate,
        readers.deepseek_v3_experts,
        rope.rotary,
        readers.indexed_layers,
    ),
    "glm4_moe": (readers.gate, rope.partly_rotary, readers.glm4_experts),
    "phi3": (readers.gate, rope.window_everywhere, rope.phi3_rotary),
    "gpt2": (readers.gpt2_block,),
    "gpt_neox": (rope.neox_rotary, readers.neox_block),
    "qwen3_next": (
        readers.gate,
        readers.attention_biases,
        rope.partly_rotary,
        readers.qwen3_next_experts,
        readers.linear_attention,
    ),
    "nemotron": (readers.nemotron_block, readers.llama_biases, rope.partly_rotary),
}


def _merged(field: str, parts: _Parts) -> Json:
    out: Json = {}
    for part in parts:
        out |= _merged(field, _FILE["sets"][field][part]) if isinstance(part, str) else part
    return out


CLASSES: dict[str, str] = {kind: body.pop("class") for kind, body in _FILE["kinds"].items()}
"""`model_type` -> the class of transformers that loads it, in the order of the search."""
FAMILIES = {
    kind: Family(
        more=_MORE[kind], **{field: _merged(field, parts) for field, parts in body.items()}
    )
    for kind, body in _FILE["kinds"].items()
}
ALIASES = {"kimi_k2": "deepseek_v3", "ministral": "mistral"}
"""Another `model_type` of models that a family computes -> that of the family."""
