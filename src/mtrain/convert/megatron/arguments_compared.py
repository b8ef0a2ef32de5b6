"""Comparison of Megatron-LM's arguments in a checkpoint with a run's model.

The table between flags and keys reads both: the arguments as the flags that set them, and the run
as the flags of its exported recipe. A key without a flag is compared by the field of megatron-core
that it feeds.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from mtrain.config.messages.keys import effect_of, key_of, schema_keys
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import RunConfig
from mtrain.convert.megatron.arguments import (
    NO_ARGUMENT,
    Difference,
    as_rope,
    is_whole,
    scaling_arguments,
    scaling_differences,
)
from mtrain.recipes.huggingface.exporter import TRAINING
from mtrain.recipes.megatron.arguments import Arguments, Entry, default_of
from mtrain.recipes.megatron.flags_unmapped import NO_SUCH_PART, OTHERS
from mtrain.recipes.megatron.reading import read_flags
from mtrain.recipes.megatron.table import flags_of, table
from mtrain.recipes.shell.gaps import shown

_OF = "model."
_NEGATED = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-position-embedding": "add_position_embedding",
}
"""Switches that make an argument false -> its name; other flags have the argument's name."""
_LEFT_OUT = ("vocab_size", "max_position_embeddings", "mask_padded_vocab", "mtp_use_repeated_layer")
"""Keys that the weights determine, or that change no number of a token."""
_SAME_NUMBERS = ("--apply-query-key-layer-scaling", "--use-legacy-models")
"""Unmapped flags without effect on the result: scores are divided by the layer's number and
multiplied by it again; and older code for the same network.
"""
_BALANCE = "model.moe.router_load_balancing_type"
_SINKHORN = "sinkhorn"
"""The balancing that weighs experts by other scores in evaluation, too, not only in training."""

_SAME_NAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "max_position_embeddings",
    "position_embedding_type",
    "add_bias_linear",
    "add_qkv_bias",
    "normalization",
    "padded_vocab_size",
    "rotary_base",
    "rotary_percent",
    "vocab_size",
    "qk_layernorm",
    "mtp_num_layers",
)


@cache
def _entries() -> tuple[Entry, ...]:
    """Return the entries of the table for compared keys of a model."""
    # without keys that the weights determine
    left = {f"{_OF}{key}" for key in _LEFT_OUT}
    return tuple(
        e for e in table() if e.flags and any(k.startswith(_OF) and k not in left for k in e.keys)
    )


def argument_of(flag: str) -> str:
    """Return the argument that a flag sets."""
    return _NEGATED.get(flag) or flag.removeprefix("--").replace("-", "_")


def megatron_arguments(run: RunConfig) -> dict[str, Any]:
    """Return the arguments that the flags of a run's model set; None for an unset flag."""
    given = Arguments(_words_of(run)).flags
    out: dict[str, Any] = {}
    for flag in (flag for entry in _entries() for flag in entry.flags):
        # the argument is there in any case, so that it always has a value
        if flag in _NEGATED:
            out[argument_of(flag)] = flag not in given
        else:
            out[argument_of(flag)] = (
                _value(list(map(shown, given[flag]))) if flag in given else None
            )
    return out


def arguments_of(run: RunConfig) -> dict[str, Any]:
    """Return the arguments that Megatron-LM compares, or loads with --use-checkpoint-args."""
    m = run.model
    moe = m.moe
    words: dict[str, Any] = {name: getattr(m, name) for name in _SAME_NAME}
    words |= {
        "seq_length": run.data.seq_length,
        "num_query_groups": m.query_groups,
        "group_query_attention": m.query_groups != m.num_attention_heads,
        "kv_channels": m.head_dim,
        "norm_epsilon": m.layernorm_epsilon,
        "swiglu": m.activation == "swiglu",
        "untie_embeddings_and_output_weights": not m.tie_word_embeddings,
        "multi_latent_attention": m.mla is not None,
        "add_position_embedding": True,
        "num_experts": moe.num_experts if moe else None,
        "moe_ffn_hidden_size": moe.ffn_hidden_size if moe else None,
        "moe_router_topk": moe.router_topk if moe else None,
        "moe_grouped_gemm": moe is not None,
        "moe_layer_freq": 1,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_optim": True,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
    }
    if moe and moe.first_dense_layers:
        layers = range(m.num_layers)
        words["moe_layer_freq"] = [int(i >= moe.first_dense_layers) for i in layers]
    return megatron_arguments(run) | words | unflagged_arguments(run)


def _value(words: list[str]) -> Any:
    if len(words) != 1:
        return [_value([word]) for word in words] if words else True
    try:
        return ast.literal_eval(words[0])
    except (ValueError, SyntaxError):
        return words[0]


def _words_of(run: RunConfig) -> list[str]:
    values = run.flat()
    return [word for entry in _entries() for word in entry.write(values)]


def _words_kept(kept: Mapping[str, Any]) -> list[str]:
    """Return the flags that set the arguments of a checkpoint."""
    out: list[str] = []
    for flag in (flag for entry in _entries() for flag in entry.flags):
        value = kept.get(argument_of(flag))
        if flag in _NEGATED:
            out += [flag] * (value is False)
        elif value is True:
            out.append(flag)
        elif value is not None and value is not False:
            out += [flag, *_spelled(flag, value)]
    return out


def _spelled(flag: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple):
        return [str(value)]
    if flag == "--window-size":
        return [",".join(map(str, value))]
    if flag == "--moe-layer-freq":
        return ["+".join(f"[{item}]" for item in value)]
    return [str(item) for item in value]


def differing(kept: Mapping[str, Any], run: RunConfig) -> list[Difference]:
    """Return the arguments of a checkpoint that differ from a run's model."""
    if not kept:
        return []
    # both sides go through the same table, so that a default is the same on both
    theirs, there, _ = read_flags(_words_kept(as_rope(kept)), None)
    _, here, _ = read_flags(_words_of(run), None)
    ours = megatron_arguments(run)
    out = list[Difference]()
    sections = set[str]()
    for entry in _entries():
        if not _is_stated(entry, kept):
            continue
        # a refused flag matters only for a part that the model has
        counts = any(
            _is_compared(key) and key != _BALANCE and _is_there(there, key) for key in entry.keys
        )
        refused = [
            theirs.unplaced[flag] for flag in entry.flags if counts and flag in theirs.unplaced
        ]
        refused = [one for one in refused if one.why in ("not supported", "unreadable")]
        for one in refused:
            out.append(
                Difference(
                    argument_of(one.flag), kept[argument_of(one.flag)], "", None, None, one.text
                )
            )
        for key in [key for key in entry.keys if _is_compared(key) and not refused]:
            x = _effective(there, key)
            y = _effective(here, key)
            section = key.rpartition(".")[0]
            one_sided = section != "model" and (_has(there, section) != _has(here, section))
            if _same(key, x, y) or (one_sided and section in sections):
                continue
            if one_sided:  # a whole section that one side lacks is one difference
                sections.add(section)
            name = _named(entry, kept, ours)
            out.append(Difference(name, kept[name], key, y, x))
    return [*out, *_without_flags(kept, there, run), *scaling_differences(kept, run), *_parts(kept)]


def _has(draft: Mapping[str, Any], section: str) -> bool:
    return any(key.startswith(f"{section}.") and value is not None for key, value in draft.items())


def _is_there(draft: Mapping[str, Any], key: str) -> bool:
    """Return whether a draft has the section of a key."""
    section = key.rpartition(".")[0]
    return section == "model" or _has(draft, section)


def _is_stated(entry: Entry, kept: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has all arguments that an entry reads, or a set one."""
    held = [
        f
        for f in entry.flags
        if argument_of(f) in kept and (f not in _NEGATED or kept[argument_of(f)] is not None)
    ]
    # an old file may lack one of the arguments of an entry
    is_set = any(kept[argument_of(flag)] not in (None, flag in _NEGATED) for flag in held)
    return bool(held) and (is_whole(kept) or len(held) == len(entry.flags) or is_set)


def _is_compared(key: str) -> bool:
    name = key.removeprefix(_OF)
    return name != key and (name not in TRAINING or key == _BALANCE) and name not in _LEFT_OUT


def _same(key: str, x: Any, y: Any) -> bool:
    return (x == _SINKHORN) == (y == _SINKHORN) if key == _BALANCE else bool(x == y)


def _effective(draft: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, where null is a number that others give."""
    value = draft.get(key)
    heads = draft.get("model.num_attention_heads")
    if (
        value is None
        and key == "model.num_query_groups"
        and draft.get("model.mla.kv_lora_rank") is None
    ):
        return heads
    if value is None and key == "model.kv_channels" and heads and draft.get("model.hidden_size"):
        return draft["model.hidden_size"] // heads
    if value is None and key == "model.mla.layernorm_epsilon":
        return draft.get("model.layernorm_epsilon")
    if (
        value is None
        and key == "model.softmax_scale"
        and draft.get("model.mup.embedding_mult") is None
    ):
        width = _effective(draft, "model.kv_channels")
        return width**-0.5 if width else None
    # 1 and 1.0 are the same number in two spellings
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
        return float(value)
    return value


def _named(entry: Entry, kept: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return the argument to name: the first that differs from our export's, or exists."""
    names = [argument_of(flag) for flag in entry.flags if argument_of(flag) in kept]
    return next((name for name in names if (kept[name] or None) != (ours[name] or None)), names[0])


@cache
def _unflagged() -> dict[str, str]:
    """Return keys without a flag that change a model's results -> their arguments.

    An argument is the field of megatron-core that the key feeds; if it feeds none, mtrain's exports
    store the key itself.
    """
    out = {}
    for key in schema_keys():
        changes = effect_of(key) in (Effect.ARCHITECTURE, Effect.NUMERICS)
        # which has its own arguments
        of_model = key.startswith(_OF) and not key.startswith("model.rope_scaling.")
        if of_model and changes and key not in flags_of() and _is_compared(key):
            out[key] = key_of(key).feeds or key.removeprefix(_OF)
    return out


def unflagged_arguments(run: RunConfig) -> dict[str, Any]:
    """Return the keys without a flag of a run's model, each under its argument in an export."""
    values = run.flat()
    return {
        name: values[key] for key, name in _unflagged().items() if key in values
    } | scaling_arguments(run.model)


def _without_flags(
    kept: Mapping[str, Any], draft: Mapping[str, Any], run: RunConfig
) -> Iterator[Difference]:
    """Yield the keys without a flag that differ from a checkpoint, or from Megatron-LM's default.

    `draft` holds the keys that the flags set; a few follow from other flags.
    """
    values = run.flat()
    for key, name in _unflagged().items():
        if key not in values or (name not in kept and not is_whole(kept)):
            continue
        # an argument that did not exist yet meant the default
        usual = draft[key] if key in draft else default_of(key)
        there = kept.get(name, usual)
        x, y = (_meant({**values, key: value}, key) for value in (there, values[key]))
        close = isinstance(x, float) and isinstance(y, float) and math.isclose(x, y, rel_tol=1e-9)
        if x != y and not close and (key not in draft or None not in (x, y)):
            yield Difference(
                name, there, key, values[key], there, "" if name in kept else NO_ARGUMENT
            )


def _meant(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, with null as its meaning in the schema or from others."""
    value = _effective(values, key)
    null = key_of(key).null
    return float(null) if value is None and isinstance(null, int | float) else value


def _parts(kept: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield parts of a network that mtrain does not have; a number may be an unused default."""
    for flag, (_, text) in OTHERS.items():
        name = argument_of(flag)
        value = kept.get(name)
        present = value is True or (isinstance(value, str | list) and bool(value))
        if text == NO_SUCH_PART and flag not in _SAME_NUMBERS and present:
            yield Difference(name, value, "", None, None, text)
