"""Every known `model_type` of Hugging Face, with its rules to read and write it."""

from __future__ import annotations

from collections.abc import Callable

from mtrain.config import families
from mtrain.config.schema.model import ModelConfig
from mtrain.recipes.huggingface.config_file import Kind
from mtrain.recipes.huggingface.families import CLASSES as DECODERS
from mtrain.recipes.huggingface.families import FAMILIES
from mtrain.recipes.huggingface.granite import GRANITE
from mtrain.recipes.huggingface.writers import WRITERS


def _always(name: str) -> Callable[[ModelConfig], str]:
    return lambda model: name


def _mistral(model: ModelConfig) -> str:
    return DECODERS["mistral"] if model.window_attn_skip_freq is None else "MinistralForCausalLM"


def _of_families() -> dict[str, Kind]:
    """Return the kinds of `config.json` in the folder of each family, by `model_type`."""
    found: dict[str, Kind] = {}
    for name in families.configs():
        if families.has(name, "hf_config"):
            own = families.part(name, "hf_config", "KINDS", dict)
            # a plug-in may add kinds, and cannot replace one that ships
            found |= {kind: own[kind] for kind in own if kind not in (*found, *DECODERS)}
    return found


KINDS: dict[str, Kind] = {
    **{kind: Kind(FAMILIES[kind], WRITERS[kind], _always(name)) for kind, name in DECODERS.items()},
    "mistral": Kind(FAMILIES["mistral"], WRITERS["mistral"], _mistral),
    **_of_families(),
    "granitemoehybrid": GRANITE,
}
"""`model_type` -> its rules to read and write it."""
