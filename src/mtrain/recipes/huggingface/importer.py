"""A Hugging Face `config.json` as the shape of a model, by its `model_type`.

The file is data: code that it names is never loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtrain.config import families
from mtrain.config.compose.yaml_reader import MAX_DEPTH, MAX_NODES, UNSHOWN, refuse_hidden
from mtrain.config.disk.files import read_text
from mtrain.config.schema.model import ModelConfig
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.huggingface.classifiers import CLASSIFIER
from mtrain.recipes.huggingface.config_file import ConfigFile, Family, Json, Kind, class_of
from mtrain.recipes.huggingface.families import ALIASES, FAMILIES
from mtrain.recipes.huggingface.families import CLASSES as DECODERS
from mtrain.recipes.huggingface.granite import GRANITE
from mtrain.recipes.huggingface.writers import WRITERS
from mtrain.recipes.imported import WHOLE, Imported, as_published, build, name_of, numeric_changes
from mtrain.recipes.megatron.arguments import Arguments, Draft

WITH_IMAGES = {"gemma3": "gemma3_text"}
"""`model_type` of models that read images -> that of their text model."""
_OUTSIDE = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


def import_config(path: Path, extra: Sequence[str] = ()) -> Imported:
    """Read a `config.json`; `extra` are overrides in our own grammar, for layout, data and other
    keys.

    Raises:
        ConfigError: the file is no JSON, or has an unknown family or a refused value.
    """
    source = str(path)
    given = read_json(path, source)
    values = as_text(given)
    known = KINDS.get(kind_of(values))
    if known is None:
        kinds = ", ".join((*KINDS, *ALIASES, *WITH_IMAGES))
        rule = f"models of type {values.get('model_type')!r} are not read; those are: {kinds}"
        raise _error("MT703", rule, source)
    family = known.reads
    file = ConfigFile(values, family, class_of(kind_of(values), values))
    try:
        d = _read(file, family)
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        rule = f"a value has a wrong type or size: {error}"
        raise _error("MT703", rule, source) from None
    # the text model of a model that also reads images
    if values is not given:
        file.notes.append(
            f"{given['model_type']} reads images too: only the text model is read;"
            " vision_config and the projector are left out"
        )
    _read_head(file, d)
    d["model.name"] = name_of(path.resolve().parent if path.stem == "config" else path)
    file.finish()
    # the recipe is left open until a person has looked at these
    doubts = numeric_changes(file.unplaced)
    left = {WHOLE: "; ".join(doubts)} if doubts else {}
    return Imported(
        as_published(build(d, Arguments(()), extra, source)), file.unplaced, file.notes, left
    )


def _read_head(file: ConfigFile, draft: Draft) -> None:
    """Add the value head of a classifier of one label; refuse one of several."""
    names = file.original.get("architectures")
    if not isinstance(names, list) or not str(names[:1]).endswith(f"{CLASSIFIER}']"):
        return
    labels = file.original.get("id2label")
    # transformers assumes two labels if a file has no number
    said = len(labels) if isinstance(labels, dict) else file.original.get("num_labels", 2)
    if said != 1:
        key = "id2label" if isinstance(labels, dict) else "num_labels"
        file.differs(key, f"the model has {said} labels, and a value head gives one number")
    draft |= {"model.head": "value", "objective.name": "reward"}


def kind_of(values: Json) -> str:
    """Return the `model_type` of the family that reads a file; empty if the file has none."""
    kind = values.get("model_type")
    kind = WITH_IMAGES.get(kind, kind) if isinstance(kind, str) else ""
    return ALIASES.get(kind, kind)


def as_text(values: Json) -> Json:
    """Return the configuration of a file's text model: the file itself, or an object inside if the
    model reads images.

    Token ids, and whether embeddings are tied, may stand outside of that object.
    """
    kind = values.get("model_type")
    text = values.get("text_config", {})
    if not isinstance(kind, str) or kind not in WITH_IMAGES or not isinstance(text, dict):
        return values
    outer = {key: values[key] for key in _OUTSIDE if values.get(key) is not None}
    inner = WITH_IMAGES[kind]
    return (
        {**outer, "model_type": inner, **text} if text.get("model_type", inner) == inner else values
    )


def _read(file: ConfigFile, family: Family) -> Draft:
    file.copy()
    for more in family.more:
        more(file)
    # null marks values that follow from other keys, so that changing one leaves no contradiction
    groups = file.out.get("model.num_query_groups")
    heads = file.out.get("model.num_attention_heads")
    if groups == heads:
        file.out["model.num_query_groups"] = None
    width = file.out.get("model.kv_channels")
    hidden = file.out.get("model.hidden_size")
    if width is not None and heads and width * heads == hidden:
        file.out["model.kv_channels"] = None
    # a file may hold 0 or 1 for 0.0 or 1.0
    for key in ("model.layernorm_epsilon", "model.init_method_std", "model.attention_dropout"):
        if key in file.out:
            file.out[key] = float(file.out[key])
    return file.out


def read_json(path: Path, source: str) -> Json:
    """Return a JSON object of bounded size and depth, without duplicate keys.

    Raises:
        ConfigError: the file holds anything else.
    """
    text = read_text(path, source, (".json",))
    # characters that a terminal does not show could hide keys from a reader
    refuse_hidden(text, source, UNSHOWN)

    def pairs(items: list[tuple[str, Any]]) -> Json:
        out = dict(items)
        for key in out:  # an escape such as \u001b can spell what the text itself may not hold
            refuse_hidden(key, source, UNSHOWN)
        if len(out) < len(items):
            twice = next(key for key, _ in items if [k for k, _ in items].count(key) > 1)
            rule = "written twice in one object"
            raise ConfigError([Problem("MT004", twice, None, rule, "keep one of them", source)])
        return out

    try:
        values = json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise _error("MT003", f"not JSON: {error}", source) from None
    if not isinstance(values, dict):
        raise _error("MT003", "the top level must be an object", source)
    # level by level and not recursive: the nesting of a foreign file is not bounded
    depth = 0
    nodes = 0
    layer = [values]
    while layer:
        depth = depth + 1
        nodes = nodes + len(layer)
        if depth > MAX_DEPTH or nodes > MAX_NODES:
            rule = f"nested deeper than {MAX_DEPTH} levels, or more than {MAX_NODES} values"
            raise _error("MT005", rule, source)
        layer = [inner for value in layer for inner in _inside(value)]
    return values


def _error(code: str, rule: str, source: str) -> ConfigError:
    return ConfigError([Problem(code, "", None, rule, "", source)])


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list):
        return value
    return []


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
