"""The `config.json` of LLaVA: a language model's and a vision tower's inside of it, read and
written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json, Kind, class_of
from mtrain.recipes.huggingface.families import FAMILIES
from mtrain.recipes.huggingface.writers import WRITERS

_NUMBERS = "changes the numbers: "
_PROJECTOR_WORDS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "quick_gelu": "quick_gelu",
}
"""Their activation functions -> ours."""
_TEXT = replace(
    FAMILIES["llama"],
    absent={
        **FAMILIES["llama"].absent,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
)
"""Published files leave out what is the default of transformers' LlamaConfig."""
_TOWER = {
    "image_size": 336,
    "patch_size": 14,
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
}
"""The vision tower of a file that says nothing of one."""
_VISION = Family(
    {
        "image_size": "model.llava.image_size",
        "patch_size": "model.llava.patch_size",
        "num_hidden_layers": "model.llava.vision_layers",
        "hidden_size": "model.llava.vision_hidden_size",
        "intermediate_size": "model.llava.vision_ffn_hidden_size",
        "num_attention_heads": "model.llava.vision_heads",
        "layer_norm_eps": "model.llava.vision_layernorm_epsilon",
    },
    {},
    {
        "image_size": 224,
        "patch_size": 32,
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "layer_norm_eps": 1e-5,
        "hidden_act": "quick_gelu",
    },
    irrelevant={
        **dict.fromkeys(("projection_dim", "vocab_size"), "is read by other models of CLIP"),
        **dict.fromkeys(("initializer_range", "initializer_factor"), "says how weights are drawn"),
    },
)
"""The defaults are those of transformers' CLIPVisionConfig."""


def _inner(f: ConfigFile, key: str, family: Family, kind: str, absent: Json) -> ConfigFile:
    """Return the object that a key holds, read as a file of its own.

    Raises:
        TypeError: it holds something else.
    """
    held = f.get(key)
    if held is not None and not isinstance(held, dict):
        raise TypeError(f"{key} is no object")
    values = dict(absent if held is None else held)
    inner = ConfigFile(values, family, class_of(kind, values))
    found = values.get("model_type", kind)
    if found != kind:
        f.inside(key, "model_type", "not supported", f"{_NUMBERS}here it is {kind}", found)
    for theirs, ours in family.keys.items():
        value = inner.get(theirs)
        if value is not None:
            inner.out[ours] = value
    inner.out |= family.fixed
    return inner


def _merge(f: ConfigFile, key: str, inner: ConfigFile) -> None:
    inner.finish()
    f.out |= inner.out
    f.notes += inner.notes
    f.unplaced += [replace(one, flag=f"{key}.{one.flag}") for one in inner.unplaced]


def language(f: ConfigFile) -> None:
    """Read the language model, a Llama. Its embeddings are tied where either object says so."""
    text = _inner(f, "text_config", _TEXT, "llama", {})
    for more in _TEXT.more:
        more(text)
    tied = bool(f.get("tie_word_embeddings", False)) or bool(
        text.out.get("model.tie_word_embeddings")
    )
    _merge(f, "text_config", text)
    f.out["model.tie_word_embeddings"] = tied
    if f.get("vocab_size", text.get("vocab_size")) != text.get("vocab_size"):
        f.refuse("vocab_size", "no effect", "text_config says another value")


def tower(f: ConfigFile) -> None:
    """Read the vision tower, CLIP's."""
    vision = _inner(f, "vision_config", _VISION, "clip_vision_model", _TOWER)
    _activation(vision, "hidden_act", "model.llava.vision_activation")
    vision.must("num_channels", (3,), f"{_NUMBERS}images have three channels")
    vision.must("attention_dropout", (0, 0.0), f"{_NUMBERS}the vision tower has no dropout")
    for key in ("image_size", "patch_size"):
        if isinstance(vision.get(key), list | tuple):
            vision.refuse(key, "not supported", f"{_NUMBERS}images and patches are squares")
            del vision.out[_VISION.keys[key]]
    vision.out["model.llava.vision_layernorm_epsilon"] = float(vision.get("layer_norm_eps"))
    _merge(f, "vision_config", vision)


def join(f: ConfigFile) -> None:
    """Read which features are taken, how they are projected, and where they stand."""
    layer = f.get("vision_feature_layer")
    # Newer files may list layers; one layer in a list is the usual model.
    if isinstance(layer, list) and len(layer) == 1:
        layer = layer[0]
    if isinstance(layer, list):
        f.refuse(
            "vision_feature_layer", "not supported", f"{_NUMBERS}features of one layer are taken"
        )
        layer = -2
    f.out["model.llava.feature_layer"] = layer
    f.must("vision_feature_select_strategy", ("default",), f"{_NUMBERS}the class token is left out")
    _activation(f, "projector_hidden_act", "model.llava.projector_activation")
    f.out["model.llava.projector_bias"] = bool(f.get("multimodal_projector_bias"))


def _activation(f: ConfigFile, key: str, ours: str) -> None:
    word = f.get(key)
    f.out[ours] = _PROJECTOR_WORDS.get(word if isinstance(word, str) else "", "gelu")
    f.must(key, list(_PROJECTOR_WORDS), f"{_NUMBERS}there are {', '.join(_PROJECTOR_WORDS)}")


READS = Family(
    {"image_token_index": "model.llava.image_token_id"},
    {"model.family": "llava"},
    {
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
        "multimodal_projector_bias": True,
    },
    (language, tower, join),
    {"image_token_id": "image_token_index"},
    {
        "image_seq_length": "is computed from image_size and patch_size",
        "ignore_index": "is read by no version that is in use",
    },
)
"""Mapping from the keys of such a file to ours."""


def writes(m: ModelConfig) -> Json:
    """Return the keys of a `config.json` for a model, without those that are copied."""
    own = m.llava
    if own is None:
        raise ValueError("the model has no vision tower")
    text: Json = {"model_type": "llama"}
    for theirs, ours in FAMILIES["llama"].keys.items():
        text[theirs] = getattr(m, ours.removeprefix("model."))
    text |= {"num_key_value_heads": m.query_groups, "head_dim": m.head_dim, **WRITERS["llama"](m)}
    vision: Json = {"model_type": "clip_vision_model", "hidden_act": _word(own.vision_activation)}
    for theirs, ours in _VISION.keys.items():
        vision[theirs] = getattr(own, ours.removeprefix("model.llava."))
    return {
        "text_config": text,
        "vision_config": vision,
        "vision_feature_layer": own.feature_layer,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": _word(own.projector_activation),
        "multimodal_projector_bias": own.projector_bias,
        "image_seq_length": own.image_tokens,
        "tie_word_embeddings": m.tie_word_embeddings,
    }


def _word(activation: str) -> Any:
    return next(theirs for theirs, ours in _PROJECTOR_WORDS.items() if ours == activation)


KINDS = {"llava": Kind(READS, writes, lambda model: "LlavaForConditionalGeneration")}
