"""Every key, suggestions for misspelt keys, names in other systems, and texts as values."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal, DecimalException
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mtrain.config.engine.release import UNMAPPED
from mtrain.config.schema.base import Effect, Flag, Key
from mtrain.config.schema.run import GROUPS, UnresolvedRun

PLUG_INS = ("cluster.device", "model.family", "objective.name")
"""Keys whose values are the shipped names plus those of installed plug-ins."""

OTHERWISE = {"distributed_timeout_minutes": ", in seconds"}
"""Differences between the value of a foreign name and that of our key."""

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
"""Names without a key here, and the reason."""


MERGE = "<<"
"""YAML's merge key, which mtrain does not read."""


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
    """Return every leaf key by its dotted path, including the metadata of a recipe."""
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

    walk("", UnresolvedRun)
    return out


def field_of(path: str) -> FieldInfo | None:
    """Return the schema's field at `path`, sections included; None if the schema has none."""
    return _all_keys().get(path)


@cache
def keys() -> dict[str, Key]:
    """Return the schema's annotation of each key and section."""
    out: dict[str, Key] = {}
    for path, field in _all_keys().items():
        key = next((item for item in field.metadata if isinstance(item, Key)), Key())
        section, _, name = path.rpartition(".")
        outer = section_in(_all_keys()[section].annotation) if section else None
        out[path] = key.named(f"{getattr(outer, 'core_prefix', '')}{name}")
    return out


def key_of(path: str) -> Key:
    """Return the annotation of the key at `path`; an empty one if it has none."""
    return keys().get(path) or Key()


def effect_of(path: str) -> Effect:
    """Return the effect of changing the key at `path`: its own, or that of its section."""
    while path:
        effect = key_of(path).effect
        if effect is not None:
            return effect
        path = path.rpartition(".")[0]
    return Effect.RUNTIME


def when_of(path: str) -> str:
    """Return the condition of a key or of its section; empty if it always has an effect."""
    while path and not key_of(path).when:
        path = path.rpartition(".")[0]
    return key_of(path).when


@cache
def foreign() -> dict[str, str]:
    """Return the key for each name of megatron-core's, Megatron-LM's and Hugging Face's."""
    # A name that a key here already has must not point to another key.
    own = {path.rpartition(".")[2] for path in schema_keys()}
    out: dict[str, str] = {}
    # Explicit aliases win over names that are derived from fields and flags.
    for path, key in keys().items():
        out |= dict.fromkeys(key.aka.split(), path)
    for path, key in keys().items():
        fields = [name.rpartition(".")[2] for name in key.feeds.split()]
        names = [*key.hf.split(), *fields, *_words_of_flag(flag_of(path))]
        out |= {name: path for name in names if name not in own and name not in out}
    return out


@cache
def opposites() -> frozenset[str]:
    """Return the names of flags that set a key to false."""
    flags = [flag for path in keys() if (flag := flag_of(path)) is not None and flag.off]
    return frozenset(name for flag in flags for name in _words_of_flag(flag))


def _words_of_flag(flag: Flag | None) -> list[str]:
    return [name.lstrip("-").replace("-", "_") for name in (flag.name, *flag.also)] if flag else []


def flag_of(path: str) -> Flag | None:
    """Return the Megatron-LM flag that sets only the key at `path`; None without one."""
    flag = key_of(path).flag
    return flag if isinstance(flag, Flag) else None


def choices_of(path: str) -> tuple[str, ...]:
    """Return the choices of a key, of its list's items or its table's names; else empty."""
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
    """Return the keys that `path` may have meant, best first, and a sentence about it or ""."""
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
    # Search from the certain to the vague: derived values, foreign names, fields without a key, the
    # same last word, then similar spelling.
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
    """Return whether a dotted key continues below a plain key, as `model.num_layers.x`."""
    names = path.split(".")
    above = [field_of(".".join(names[:i])) for i in range(1, len(names))]
    return any(
        f is not None and section_in(f.annotation) is None and get_origin(f.annotation) is not dict
        for f in above
    )


@cache
def is_content(key: str) -> bool:
    """Return whether a key takes free text, a list or a mapping."""
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


_CYRILLIC = dict(zip("аеорсухіјѕкмтвнгп", "aeopcyxijskmtbhrn", strict=True))
_CAPITALS = dict(zip("АЕОРСУХІЈЅКМТВНΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "AEOPCYXIJSKMTBHABEZHIKMNOPTYX", strict=True))
_GREEK = dict(zip("αεηικνορτυχ", "aenikvoptux", strict=True))
_DASHES = dict.fromkeys("‐‑‒–—―−", "-")
LOOKALIKES = str.maketrans(
    {**_CYRILLIC, **_CAPITALS, **_GREEK, **_DASHES, "ı": "i", "’": "'", "“": '"', "”": '"'}
)
"""Letters of other alphabets that look Latin (Unicode's confusables) and typographic signs."""
TRUE = ("true", "yes", "y", "on", "t", "1", "enabled")
FALSE = ("false", "no", "n", "off", "f", "0", "disabled")
NULL = ("null", "none", "nil", "~", "", "undefined")
_NUMBER = re.compile(
    r"([-+]?)([0-9][0-9_, ]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([-+]?[0-9]{1,3}))?\s*([A-Za-z]*|%)\Z"
)
_TIMES = {"ms": "0.001", "s": "1", "sec": "1", "m": "60", "min": "60", "h": "3600", "d": "86400"}
_SIZES = {"m": "0.0009765625", "g": "1", "t": "1024"}
_COUNTS = {"k": "1e3", "m": "1e6", "g": "1e9", "b": "1e9", "t": "1e12", "%": "0.01"}
_OF_TOKENS = re.compile(r"(_size|_length|_embeddings|_rank|_dim|_channels)\Z")
"""Keys for which k means 1,024: a sequence of 4k has 4,096 tokens."""


def plain(text: str) -> str:
    """Return `text` with confusable letters replaced."""
    return unicodedata.normalize("NFKC", text).translate(LOOKALIKES)


def as_key(text: str) -> str:
    """Return `text` in the spelling of a dotted key: lower case, underscores, no leading dashes."""
    return re.sub(r"[-\s]+", "_", plain(text).strip().lstrip("-").lower())


def is_nothing(value: Any) -> bool:
    """Return whether a value means "nothing": null, an empty text, `none`."""
    return value is None or (isinstance(value, str) and plain(value).strip().lower() in NULL)


def as_name(value: Any) -> str:
    """Return a value as the text in a file."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return plain(str(value)).strip()


def readings(path: str, value: Any) -> Iterator[list[Any]]:
    """Yield values of other types that `value` at `path` may have meant, likeliest first."""
    if isinstance(value, list) and len(value) == 1:
        # Words come first: `on` and `1` are switches wherever a key takes them.
        yield [value[0]]
    if isinstance(value, (bool, dict)) or value is None:
        return
    text = plain(str(value)).strip().strip("\"'").strip()
    word = text.lower()
    yield [
        reading for words, reading in ((TRUE, True), (FALSE, False), (NULL, None)) if word in words
    ]
    numbers = list(_numbers(path, text))
    yield [kind for number in numbers for kind in _kinds(number)]
    yield [round(number) for number in numbers if abs(number) < 1 << 63]
    if isinstance(value, list):
        return
    parts = [part.strip() for part in text.strip("[]()").split(",")]
    yield [str(value)]
    yield [[value]]
    yield [parts]
    yield [
        [
            int(n) if n == n.to_integral_value() else float(n)
            for part in parts[:64]
            for n in _numbers(path, part)
        ]
    ]


def _kinds(number: Decimal) -> Iterator[Any]:
    """Yield a number as an integer, if it is integral, and as a float."""
    if number == number.to_integral_value() and abs(number) < 1 << 63:
        yield int(number)
    yield float(number)


def _numbers(path: str, text: str) -> Iterator[Decimal]:
    """Yield the numbers that a text with separators, a unit or a stray letter may mean."""
    match = _NUMBER.match(text)
    if match is None or len(text) > 64:
        return
    sign, digits, power, unit = match.groups()
    digits = digits.replace("_", "").replace(" ", "")
    # 1,000 is a thousand, 1,5 a European decimal.
    grouped = re.fullmatch(r"[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?", digits) is not None
    digits = digits.replace(",", "" if grouped else ".")
    try:
        number = Decimal(f"{sign}{digits}e{power or 0}")
        for scale in _scales(path, unit.lower()):
            yield number * Decimal(scale)
    except DecimalException:
        return


def _scales(path: str, unit: str) -> list[str]:
    last = path.rpartition(".")[2]
    if last.endswith("_s"):
        return [_TIMES.get(unit, "1")]
    if last.endswith(("_gib", "_mib")):
        scale = _SIZES.get(unit[:1], "1")
        return [str(Decimal(scale) * 1024) if last.endswith("_mib") and unit else scale]
    # 4k tokens are 4,096 to most people, and 4,000 to some.
    if unit in ("k", "ki") and _OF_TOKENS.search(last):
        return ["1024", "1000"]
    return [_COUNTS.get(unit, "1")]
