"""Every key there is, the ones near a misspelt one, and the names other systems use for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mtrain.config.engine.unmapped import UNMAPPED
from mtrain.config.messages.intended import as_key
from mtrain.config.schema.base import Effect, Flag, Key
from mtrain.config.schema.run import GROUPS, RunConfig

PLUG_INS = ("cluster.device", "model.family", "trainer.objective")
"""Keys whose words are those that ship, and those of installed plug-ins."""

OTHERWISE = {"distributed_timeout_minutes": ", in seconds"}
"""How a foreign name's value differs from that of the key here."""

DERIVED = {
    "data_parallel_size": "the data-parallel size is derived: ranks / (tp * pp * cp)",
    "dp": "the data-parallel size is derived: ranks / (tp * pp * cp); as a choice: parallel=tp2dp2",
    "data_parallel": "the data-parallel size is derived: ranks / (tp * pp * cp)",
    "num_microbatches": "micro-batches are derived: global_batch_size / (micro_batch_size * dp)",
    "gradient_accumulation_steps": (
        "micro-batches are derived: global_batch_size / (micro_batch_size * dp)"
    ),
    "train_samples": (
        "a run is as long as trainer.train_iters says: samples / trainer.global_batch_size"
    ),
    "betas": "two keys hold them: optim.beta1 and optim.beta2",
    "bf16": "the number format is one key: precision.dtype=bf16",
    "fp16": "the number format is one key: precision.dtype=fp16",
    "pipeline_dtype": "it follows from precision.dtype",
    **dict.fromkeys(
        (
            "bias_activation_fusion",
            "bias_swiglu_fusion",
            "bias_dropout_fusion",
            "apply_rope_fusion",
        ),
        "what is fused follows from the implementations that `kernels` names",
    ),
    "bias_gelu_fusion": (
        "the form of gelu is model.activation=gelu (exact) or gelu_tanh, and what is fused follows"
    ),
    "fp8_param_gather": (
        "weights are drawn, sharded and saved in precision.dtype; only products are in 8 bits"
    ),
    "make_vocab_size_divisible_by": "the vocabulary is always padded to a multiple of 128",
}
"""Names that have no key here, and why."""


RESOLVED = {
    "precision.dtype": "precision.format",
    "data.seq_length": "data.length",
    "optim.lr": "optim.rate",
}
"""Keys that are null until they are resolved -> the property that has a value at any time."""
MERGE = "<<"
"""YAML's key for a mapping that is merged into another one. It is not read."""


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class inside `X`, `X | None`; None for a leaf."""
    if get_origin(annotation) in (Union, UnionType):
        inner = [a for a in get_args(annotation) if a is not NoneType]
        annotation = inner[0] if len(inner) == 1 else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


@cache
def schema_keys() -> dict[str, FieldInfo]:
    """Return every leaf key by its dotted path, the recipe's words about itself included."""
    return {
        path: field for path, field in _all_keys().items() if section_in(field.annotation) is None
    }


@cache
def _all_keys() -> dict[str, FieldInfo]:
    out: dict[str, FieldInfo] = {}

    def walk(prefix: str, section: type[BaseModel]) -> None:
        for name, field in section.model_fields.items():
            path = f"{prefix}{name}"
            out[path] = field
            inner = section_in(field.annotation)
            if inner is not None:
                walk(f"{path}.", inner)

    walk("", RunConfig)
    return out


def field_of(path: str) -> FieldInfo | None:
    """Return the schema's field at `path`, sections included; None where there is none."""
    return _all_keys().get(path)


@cache
def keys() -> dict[str, Key]:
    """What the schema says of each key, and of sections, in its annotation."""
    none = Key()
    return {
        path: next((item for item in field.metadata if isinstance(item, Key)), none)
        for path, field in _all_keys().items()
    }


def key_of(path: str) -> Key:
    """What the schema says of the key at `path` in its annotation; nothing where it
    says nothing.
    """
    return keys().get(path) or Key()


def effect_of(path: str) -> Effect:
    """What changing the key at `path` changes: what is said of it, else of its section."""
    while path:
        effect = key_of(path).effect
        if effect is not None:
            return effect
        path = path.rpartition(".")[0]
    return Effect.RUNTIME


def when_of(path: str) -> str:
    """Return the condition of a key, or of the section that it stands in; empty where it always has
    an effect.
    """
    while path and not key_of(path).when:
        path = path.rpartition(".")[0]
    return key_of(path).when


@cache
def foreign() -> dict[str, str]:
    """Return names of fields of megatron-core, of flags of Megatron-LM and of keys of Hugging Face
    -> the key here.
    """
    own = {path.rpartition(".")[2] for path in schema_keys()}
    out: dict[str, str] = {}
    for path, key in keys().items():
        out |= dict.fromkeys(key.aka.split(), path)
    for path, key in keys().items():
        fields = [name.rpartition(".")[2] for name in key.feeds.split()]
        names = [*key.hf.split(), *fields, *_words_of_flag(flag_of(path))]
        out |= {name: path for name in names if name not in own and name not in out}
    return out


@cache
def opposites() -> frozenset[str]:
    """Return names of flags that make a key false: what they say is the opposite of it."""
    flags = [flag for path in keys() if (flag := flag_of(path)) is not None and flag.off]
    return frozenset(name for flag in flags for name in _words_of_flag(flag))


def _words_of_flag(flag: Flag | None) -> list[str]:
    return [name.lstrip("-").replace("-", "_") for name in (flag.name, *flag.also)] if flag else []


def flag_of(path: str) -> Flag | None:
    """Return the flag of Megatron-LM that says the key at `path` alone; None where
    there is none.
    """
    flag = key_of(path).flag
    return Flag(flag) if isinstance(flag, str) and flag else flag or None


def choices_of(path: str) -> tuple[str, ...]:
    """Return the words that a key, an item of its list or a name in its table may be, where they
    are few; else empty.
    """
    field = field_of(path) or (
        field_of(path.rpartition(".")[0]) if path.rpartition(".")[2].isdigit() else None
    )
    return next(_words(field.annotation), ()) if field is not None else ()


def _words(annotation: Any) -> Iterator[tuple[str, ...]]:
    if get_origin(annotation) is Literal:
        yield get_args(annotation)
    for inner in get_args(annotation):
        yield from _words(inner)


def suggest(path: str) -> tuple[list[str], str]:
    """Return keys that `path` may have meant, best first, and a sentence about it where there is
    something to say.
    """
    near, why = _suggested(path)
    return list(near), why


@lru_cache(
    maxsize=1024
)  # a problem asks for its keys and for its fix, and the search takes milliseconds
def _suggested(path: str) -> tuple[list[str], str]:
    import difflib

    path = ".".join(part for part in as_key(path).split(".") if part != MERGE)
    if path in _all_keys():
        return [path], ""
    last = path.rpartition(".")[2].strip("_")
    if last in DERIVED:
        return [], DERIVED[last]
    if last in foreign():
        otherwise = OTHERWISE.get(last, ", which says the opposite" if last in opposites() else "")
        return [foreign()[last]], f"{last} is called {foreign()[last]} here{otherwise}"
    every = list(schema_keys())
    field = next((name for name in UNMAPPED if name.partition(".")[2] == last), None)
    if field is not None:
        why, text = UNMAPPED[field]
        return [], f"megatron-core's {field} has no key, it is {why}: {text}"
    same_word = [
        key for key in every if key.rpartition(".")[2] == last and not key.startswith("recipe.")
    ]
    if same_word:
        return (
            sorted(same_word, key=lambda k: -difflib.SequenceMatcher(None, k, path).ratio())[:3],
            "",
        )
    if "." not in path and (groups := difflib.get_close_matches(path, GROUPS, n=1, cutoff=0.6)):
        return groups, ""
    near = difflib.get_close_matches(path, every, n=3, cutoff=0.75)
    words = {key.rpartition(".")[2]: key for key in every}
    near += [words[w] for w in difflib.get_close_matches(last, list(words), n=2, cutoff=0.8)]
    if not near:
        near += [
            foreign()[name]
            for name in difflib.get_close_matches(last, list(foreign()), n=1, cutoff=0.85)
        ]
    return list(dict.fromkeys(near))[:3], ""


def is_under_a_value(path: str) -> bool:
    """Return whether a dotted key goes on behind one that holds a plain value, as in
    `model.num_layers.x`.
    """
    names = path.split(".")
    above = [field_of(".".join(names[:i])) for i in range(1, len(names))]
    return any(
        f is not None and section_in(f.annotation) is None and get_origin(f.annotation) is not dict
        for f in above
    )


@cache
def is_content(key: str) -> bool:
    """Return whether a key takes text of the user's own, a list or a mapping: no number, no switch,
    no word of a few.
    """
    field = field_of(key)
    return field is not None and key not in PLUG_INS and _is_free(field.annotation)


def _is_free(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if annotation in (str, dict, tuple) or origin in (dict, tuple, list):
        return True
    return any(
        _is_free(inner)
        for inner in get_args(annotation)
        if not isinstance(inner, (str, int, float))
    )
