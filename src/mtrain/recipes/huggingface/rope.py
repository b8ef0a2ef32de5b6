"""Rotary positions and windows of a `config.json` of transformers 4 or 5."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mtrain.recipes.huggingface.config_file import ConfigFile, Json

_BASE = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_READ_BY = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": """
        factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale
        mscale_all_dim truncate
    """,
    "longrope": """
        factor original_max_position_embeddings attention_factor short_factor long_factor
    """,
}
READ_BY = {kind: _BASE | set(keys.split()) for kind, keys in _READ_BY.items()}
"""Kind of rotary positions -> the keys that it reads."""
KNOWN = frozenset().union(*READ_BY.values())
# a truth value picks one: layers without a window are the first, false
LAYER_TYPES = ("full_attention", "sliding_attention")
# Megatron-LM's --use-rope-scaling fixes these numbers and takes only the factor
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary(file: ConfigFile) -> None:
    """Read base and scaling of rotary positions of entire heads."""
    _rotary(file, "rope_theta", "partial_rotary_factor", 1.0)


def partly_rotary(file: ConfigFile) -> None:
    """Read rotary positions of a part of each head (GLM-4.5)."""
    _rotary(file, "rope_theta", "partial_rotary_factor", None)


def phi3_rotary(file: ConfigFile) -> None:
    """Read those of Phi-3, whose first files have two other words for longrope."""
    _rotary(
        file, "rope_theta", "partial_rotary_factor", None, {"su": "longrope", "yarn": "longrope"}
    )


def neox_rotary(file: ConfigFile) -> None:
    """Read those of GPT-NeoX, under its own names or, in newer files, the usual ones."""
    for theirs, alias, absent in (
        ("rotary_emb_base", "rope_theta", 1e4),
        ("rotary_pct", "partial_rotary_factor", 0.25),
    ):
        file.read.add(alias)
        if file.given.get(alias) not in (None, file.values.get(theirs, absent)):
            file.refuse(
                alias,
                "no effect",
                f"is read by no layer of GPTNeoX in transformers, which has {theirs}",
            )
    _rotary(file, "rotary_emb_base", "rotary_pct", None)


def first_channels_rotary(file: ConfigFile) -> None:
    """Read those of MiniMax-M2, which rotates a part of each head and may set its width."""
    width = file.get("rotary_dim")
    head = file.get("head_dim")
    if (
        width is not None and "partial_rotary_factor" not in file.given
    ):  # null means the entire head
        file.values["partial_rotary_factor"] = width / head
    _rotary(file, "rope_theta", "partial_rotary_factor", None)
    if width is not None and file.out["model.rotary_percent"] != width / head:
        file.refuse("rotary_dim", "no effect", "partial_rotary_factor sets another width")


def two_bases(file: ConfigFile) -> None:
    """Read both rotary bases and the scaling of layers without a window (Gemma 3)."""
    parameters: Json = file.values.get("rope_parameters") or {}
    local: Json = parameters.get("sliding_attention") or {}
    if parameters:
        file.values["rope_parameters"] = {
            key: value for key, value in parameters.items() if key != "sliding_attention"
        }
        if file.given.get("rope_scaling") or not parameters.keys() <= set(LAYER_TYPES):
            text = "here it holds only full_attention and sliding_attention, without rope_scaling"
            file.differs("rope_parameters", text, parameters)
    base = local.get("rope_theta", file.get("rope_local_base_freq"))
    if file.given.get("rope_local_base_freq", base) != base:
        file.refuse(
            "rope_local_base_freq", "no effect", "rope_theta in rope_parameters has another value"
        )
    if (
        local.get("rope_type", local.get("type", "default")) != "default"
        or not local.keys() <= _BASE
    ):
        text = "positions of layers with a window have only a base here"
        file.differs("rope_parameters", text, {"sliding_attention": local})
    rotary(file)
    file.out["model.rotary_base_local"] = float(base) if file.out.get("model.window_size") else None


def _rotary(
    file: ConfigFile,
    base_key: str,
    share_key: str,
    whole: float | None,
    words: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Read rotary positions.

    `whole` is the only share that is computed, None: any; `words` translates other words for a
    kind.
    """
    name, inner = _parameters(file)
    for outer, key in ((base_key, "rope_theta"), (share_key, "partial_rotary_factor")):
        # transformers 5 writes the keys into the parameters; where both are present, those are read
        file.read.add(outer)
        if None not in (file.given.get(outer), inner.get(key)) and file.given[outer] != inner[key]:
            file.refuse(outer, "no effect", f"{key} in {name} has another value")
    file.out["model.rotary_base"] = float(inner.get("rope_theta", file.get(base_key, 10000.0)))
    share = float(inner.get("partial_rotary_factor", file.get(share_key, 1.0)))
    if whole is None:
        file.out["model.rotary_percent"] = share
    elif share != whole:
        text = "changes the numbers: this family rotates the entire head"
        if "partial_rotary_factor" in inner:
            file.inside(name, "partial_rotary_factor", "not supported", text, share)
        else:
            file.refuse(share_key, "not supported", text)
    kind = str(inner.get("rope_type", inner.get("type", "default")))
    # the first files of some families have another word for the same computation
    kind = words.get(kind, kind)
    _length_before(file, kind, inner)
    # MLA has its own keys of the scaling
    latent = "model.mla.kv_lora_rank" in file.out
    for key, value in inner.items():
        if key not in KNOWN:
            file.unknown(key, set(KNOWN), name)
        elif kind in READ_BY and key not in READ_BY[kind]:
            file.inside(name, key, "no effect", f"is not read for rope_type {kind}", value)
    if "rope_type" in inner and inner.get("type", inner["rope_type"]) != inner["rope_type"]:
        file.inside(
            name, "type", "no effect", "rope_type is present too and is read first", inner["type"]
        )
    if latent and kind == "yarn":
        _yarn(file, name, inner)
    elif latent and kind != "default":
        file.differs(name, f"rotary positions of kind {kind}; MLA has yarn")
    elif kind not in READ_BY:
        others = ", ".join(READ_BY)
        file.differs(name, f"rotary positions of kind {kind}; there are {others}")
    elif kind != "default":
        _scaling(file, kind, name, inner)


def _scaling(file: ConfigFile, kind: str, name: str, inner: Json) -> None:
    """Set `model.rope_scaling`, or one of the keys for linear scaling and for Llama 3.1's."""
    before = inner.get("original_max_position_embeddings", file.get("max_position_embeddings"))
    factor: Any = inner.get("factor")
    # these two derive the factor from the lengths before and after
    if factor is None and kind in ("yarn", "longrope"):
        factor = file.get("max_position_embeddings") / before
    needed = {
        "llama3": ["low_freq_factor", "high_freq_factor"],
        "longrope": ["short_factor", "long_factor"],
    }
    missing = ["a factor"] * (factor is None) + [
        key for key in needed.get(kind, ()) if key not in inner
    ]
    if missing:
        text = f"changes the numbers: {kind} without {' and '.join(missing)}; it is left out"
        file.refuse(name, "unreadable", text)
    elif kind == "linear":
        file.out["model.rotary_seq_len_interpolation_factor"] = float(factor)
    elif (
        # the flag of Megatron-LM, which our short key follows, fixes the other numbers
        kind == "llama3"
        and {**inner, "original_max_position_embeddings": before}.items() >= LLAMA3.items()
    ):
        file.out["model.rope_scaling_factor"] = float(factor)
    else:
        out = _read_by(file, kind, name, inner) | {"rope_type": kind, "factor": float(factor)}
        # dynamic scaling starts at max_position_embeddings itself
        if kind != "dynamic":
            out["original_max_position_embeddings"] = before
        file.out |= {f"model.rope_scaling.{key}": value for key, value in out.items()}


def _read_by(file: ConfigFile, kind: str, name: str, inner: Json) -> Json:
    """Return the numbers that a kind of scaling reads from a file, except factor and length."""
    own = READ_BY[kind] - _BASE - {"factor", "original_max_position_embeddings"}
    out = {key: inner[key] for key in sorted(own & inner.keys())}
    for key in ("beta_fast", "beta_slow"):
        if key in out and not out[key]:
            del out[key]  # transformers takes 0 as unset
    pair = [key for key in ("mscale", "mscale_all_dim") if key in out]
    if out.get("attention_factor") is not None or not all(
        out.get(key) for key in ("mscale", "mscale_all_dim")
    ):
        for key in pair:
            text = "is read only if mscale and mscale_all_dim are set, and attention_factor is not"
            file.inside(name, key, "no effect", text, out.pop(key))
    return {key: _floats(value) for key, value in out.items()}


def _floats(value: Any) -> Any:
    if isinstance(value, list):
        return [float(each) for each in value]
    # `truncate` is a switch among the numbers
    return value if isinstance(value, bool) else float(value)


def _length_before(file: ConfigFile, kind: str, inner: Json) -> None:
    """Move the length from outside into the rotary parameters: it is read first (Phi-3)."""
    outer = "original_max_position_embeddings"
    if outer not in READ_BY.get(kind, ()):
        file.idle((outer,), f"is not read for rope_type {kind}")
    elif file.get(outer) is not None:
        inner[outer] = file.get(outer)


def _parameters(file: ConfigFile) -> tuple[str, Json]:
    """Return the key of the rotary parameters, and the parameters without nulls."""
    file.read |= {"rope_scaling", "rope_parameters"}
    name = "rope_scaling" if file.values.get("rope_scaling") else "rope_parameters"
    if name == "rope_scaling" and file.given.get("rope_parameters"):
        file.refuse("rope_parameters", "no effect", "rope_scaling is present too and is read first")
    parameters = file.values.get(name) or {}
    if not isinstance(parameters, dict):
        raise TypeError(f"{name} is no object")
    # transformers 5 may list the parameters by kind of layer
    layers = {
        key: value
        for key, value in parameters.items()
        if key in LAYER_TYPES and isinstance(value, dict)
    }
    inner = {key: value for key, value in parameters.items() if key not in layers}
    for value in layers.values():
        if value != next(iter(layers.values())):
            file.differs(name, "all layers rotate by the same angles here")
        inner = {**inner, **next(iter(layers.values()))}
    return name, {key: value for key, value in inner.items() if value is not None}


def _yarn(file: ConfigFile, name: str, inner: Json) -> None:
    length = inner.get("original_max_position_embeddings", file.get("max_position_embeddings"))
    if "factor" in inner:
        factor = float(inner["factor"])
    else:
        factor = file.get("max_position_embeddings") / length
    mscale = float(inner.get("mscale", 0.0))
    of_all = float(inner.get("mscale_all_dim", 0.0))
    if of_all and not mscale:
        file.inside(
            name,
            "mscale_all_dim",
            "not supported",
            "changes the numbers: it requires an mscale here",
            of_all,
        )
    if mscale and not of_all:  # transformers reads only both together
        if mscale != 1.0:
            file.inside(
                name,
                "mscale",
                "no effect",
                "transformers reads it only with mscale_all_dim",
                mscale,
            )
        mscale = 1.0
    file.out |= {
        "model.mla.rope_type": "yarn",
        "model.mla.rotary_scaling_factor": factor,
        "model.mla.original_max_position_embeddings": length,
        "model.mla.mscale": mscale or 1.0,
        "model.mla.mscale_all_dim": of_all,
    }
    for key in ("beta_fast", "beta_slow"):
        if inner.get(key):
            file.out[f"model.mla.{key}"] = float(inner[key])
    # megatron-core computes this factor itself, so a stored one has to agree
    ours = _temperature(factor, mscale or 1.0) / _temperature(factor, of_all)
    given = inner.get("attention_factor", ours)
    if not math.isclose(given, ours, rel_tol=1e-6):
        text = f"changes the numbers: it is {ours:.6g} here, from mscale and mscale_all_dim"
        file.inside(name, "attention_factor", "not supported", text, given)
    if inner.get("truncate", True) is not True:
        text = "changes the numbers: the range of stretched frequencies has whole ends here"
        file.inside(name, "truncate", "not supported", text, inner["truncate"])


def _temperature(factor: float, mscale: float) -> float:
    # as in the paper of yarn, arXiv 2309.00071
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def window_everywhere(file: ConfigFile) -> None:
    """Read a window of all layers that is narrower than the positions (Mistral, Phi-3)."""
    width = file.get("sliding_window")
    if (
        width is not None
        and width >= file.get("max_position_embeddings")
        and not file.get("layer_types")
    ):
        file.idle(
            ("sliding_window",),
            "is as wide as the positions, so that every token sees all earlier ones",
        )
        return
    usual = "full_attention" if width is None else "sliding_attention"
    _windows(file, width, [usual] * file.layers)


def window_in_upper_layers(file: ConfigFile) -> None:
    """Read a window from layer `max_window_layers` on (Qwen2, Qwen3)."""
    width = _optional_width(file, ("max_window_layers",))
    first = file.get("max_window_layers", 28)
    layers = range(file.layers)
    _windows(file, width, [LAYER_TYPES[width is not None and i >= first] for i in layers])


def window_in_odd_layers(file: ConfigFile) -> None:
    """Read a window in the first, third, ... layer below `max_window_layers` (Qwen2-MoE)."""
    width = _optional_width(file, ("max_window_layers",))
    last = file.get("max_window_layers", 28)
    layers = range(file.layers)
    _windows(
        file, width, [LAYER_TYPES[width is not None and i % 2 == 0 and i < last] for i in layers]
    )


def optional_window(file: ConfigFile) -> None:
    """Read a window in all layers, if `use_sliding_window` is true (Qwen3-MoE)."""
    width = _optional_width(file, ())
    _windows(file, width, [LAYER_TYPES[width is not None]] * file.layers)


def window_in_every_other_layer(file: ConfigFile) -> None:
    """Read a window in the first, third, ... layer (GPT-OSS)."""
    _windows(
        file, file.get("sliding_window"), [LAYER_TYPES[i % 2 == 0] for i in range(file.layers)]
    )


def window_except_every_nth(file: ConfigFile) -> None:
    """Read a window in all layers but every sixth or `sliding_window_pattern`-th (Gemma 3)."""
    every = file.get("sliding_window_pattern", 6)
    _windows(
        file,
        file.get("sliding_window"),
        [LAYER_TYPES[(i + 1) % every != 0] for i in range(file.layers)],
    )


def _optional_width(file: ConfigFile, more: Sequence[str]) -> int | None:
    if file.get("use_sliding_window", False):
        width: int | None = file.get("sliding_window")
        return width
    file.idle(("sliding_window", *more), "is read only with use_sliding_window")
    return None


def _windows(file: ConfigFile, width: int | None, usual: Sequence[str]) -> None:
    """Set our keys: a window in all layers but every n-th."""
    kinds = file.get("layer_types", list(usual))
    full = [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"]
    # an interval beyond the last layer leaves a window in all
    every = full[0] if full else len(kinds) + 1
    fits = len(kinds) == len(usual) and set(kinds) <= set(LAYER_TYPES)
    if fits and len(full) == len(kinds):
        file.idle(("sliding_window",) if width is not None else (), "no layer has a window")
        return
    if not fits or every < 2 or full != list(range(every, len(kinds) + 1, every)):
        key = "layer_types" if file.given.get("layer_types") else "max_window_layers"
        file.differs(key, "a window is in all layers but every n-th here")
    elif width is None:
        file.differs("layer_types", "layers have a window, and no width is set")
    else:
        file.out["model.window_size"] = width
        file.out["model.window_attn_skip_freq"] = every if full else None
