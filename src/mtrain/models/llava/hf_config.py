"""Reader and writer of LLaVA's `config.json`, which nests a language model and a tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface.config_file import (
    ConfigFile,
    Family,
    Json,
    Kind,
    class_of,
    tables_of,
)
from mtrain.recipes.huggingface.families import FAMILIES
from mtrain.recipes.huggingface.writers import WRITERS

_NUMBERS = "changes the numbers: "
_PROJECTOR_WORDS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "quick_gelu": "quick_gelu",
}
"""transformers' activation functions -> mtrain's."""
_TABLES = tables_of(__file__)
# Published files omit the defaults of transformers' LlamaConfig.
_LLAMA = FAMILIES["llama"]
_TEXT = replace(_LLAMA, absent=_LLAMA.absent | _TABLES["language"]["absent"])
# Defaults are those of transformers' CLIPVisionConfig.
_VISION = Family.of(_TABLES["vision"])


def _inner(f: ConfigFile, key: str, family: Family, kind: str, absent: Json) -> ConfigFile:
    """Return the object that a key holds, read like a file.

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
    inner.copy()
    return inner


def _merge(f: ConfigFile, key: str, inner: ConfigFile) -> None:
    inner.finish()
    f.out |= inner.out
    f.notes += inner.notes
    f.unplaced += [replace(one, flag=f"{key}.{one.flag}") for one in inner.unplaced]


def language(f: ConfigFile) -> None:
    """Read the language model, a Llama. Its embeddings are tied if either object ties them."""
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
    vision = _inner(f, "vision_config", _VISION, "clip_vision_model", _TABLES["tower"])
    _activation(vision, "hidden_act", "model.llava.vision_activation")
    for key in ("image_size", "patch_size"):
        if isinstance(vision.get(key), list | tuple):
            vision.differs(key, "images and patches are squares")
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
        f.differs("vision_feature_layer", "features of one layer are taken")
        layer = -2
    f.out["model.llava.feature_layer"] = layer
    _activation(f, "projector_hidden_act", "model.llava.projector_activation")
    f.out["model.llava.projector_bias"] = bool(f.get("multimodal_projector_bias"))


def _activation(f: ConfigFile, key: str, ours: str) -> None:
    word = f.get(key)
    f.out[ours] = _PROJECTOR_WORDS.get(word if isinstance(word, str) else "", "gelu")
    f.must(key, list(_PROJECTOR_WORDS), f"{_NUMBERS}there are {', '.join(_PROJECTOR_WORDS)}")


READS = Family.of(_TABLES["model"], more=(language, tower, join))
"""Mapping from the keys of such a file to mtrain's."""


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
