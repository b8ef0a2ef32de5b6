"""Whether the arguments that Megatron-LM keeps in a checkpoint are those of a run's model.

The table between flags and keys reads both: the arguments as the flags that set them, and the run as the flags that
an export of its recipe has. What neither can say is compared by the field of megatron-core that a key feeds. Needs
no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from mtrain.config.keys import key_of, keys
from mtrain.config.run import RunConfig
from mtrain.recipes.arguments import Arguments, Entry
from mtrain.recipes.flags_other import OTHERS
from mtrain.recipes.gaps import shown
from mtrain.recipes.hf_write import TRAINING
from mtrain.recipes.imported import read_flags
from mtrain.recipes.table import flags_of, table

_OF = "model."
_NEGATED = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-position-embedding": "add_position_embedding",
}
"""Switches that make an argument false -> its name; any other flag is called as the argument that it sets."""
_LEFT_OUT = ("vocab_size", "max_position_embeddings", "mask_padded_vocab", "mtp_use_repeated_layer")
"""Keys of which the weights say enough, or that change no number of a token."""
_NO_SUCH_PART = "changes the numbers: the network has no such part here"
_SAME_NUMBERS = ("--apply-query-key-layer-scaling", "--use-legacy-models")
"""Of that group: scores are divided by the layer's number and multiplied with it again; another code of the same."""
_WHOLE = 150
"""Arguments of which a checkpoint has more when Megatron-LM saved it: what is not among them was not there yet."""


class Apart(NamedTuple):
    """An argument that says another model."""

    name: str
    there: Any
    key: str
    """Ours; empty: there is none."""
    here: Any
    becomes: Any
    """The value of the key that the argument says."""
    why: str = ""


@cache
def _entries() -> tuple[Entry, ...]:
    """Those of the table that say a key of a model, and are compared."""
    left = {f"{_OF}{key}" for key in _LEFT_OUT}
    return tuple(e for e in table() if e.flags and any(k.startswith(_OF) and k not in left for k in e.keys))


def argument_of(flag: str) -> str:
    """The argument that a flag sets."""
    return _NEGATED.get(flag) or flag.removeprefix("--").replace("-", "_")


def arguments_said(run: RunConfig) -> dict[str, Any]:
    """What the flags of a run's model set, each by its name; None where there is no flag."""
    given = Arguments(_words_of(run)).flags
    out: dict[str, Any] = {}
    for flag in (flag for entry in _entries() for flag in entry.flags):
        if flag in _NEGATED:
            out[argument_of(flag)] = flag not in given
        else:
            out[argument_of(flag)] = _value(list(map(shown, given[flag]))) if flag in given else None
    return out


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
    """The flags that set the arguments of a checkpoint."""
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
    return ["+".join(f"[{item}]" for item in value)] if flag == "--moe-layer-freq" else [str(item) for item in value]


def differing(kept: Mapping[str, Any], run: RunConfig) -> list[Apart]:
    """Arguments of a checkpoint that are not those of a run's model."""
    if not kept:
        return []
    theirs, there, _ = read_flags(_words_kept(kept), None)
    _, here, _ = read_flags(_words_of(run), None)
    ours, out, sections = arguments_said(run), list[Apart](), set[str]()
    for entry in _entries():
        if not _is_said(entry, kept) or _is_yarn(entry.flags[0], kept, run):
            continue
        refused = [theirs.unplaced[flag] for flag in entry.flags if flag in theirs.unplaced]
        refused = [one for one in refused if one.text.startswith("changes the numbers") or one.why == "unreadable"]
        for one in refused:
            out.append(Apart(argument_of(one.flag), kept[argument_of(one.flag)], "", None, None, one.text))
        for key in [key for key in entry.keys if _is_compared(key) and not refused]:
            x, y = _effective(there, key), _effective(here, key)
            section = key.rpartition(".")[0]
            alone = section != "model" and (_has(there, section) != _has(here, section))
            if x == y or (alone and section in sections):
                continue
            if alone:  # a whole section that one side lacks is one difference
                sections.add(section)
            name = _named(entry, kept, ours)
            out.append(Apart(name, kept[name], key, y, x))
    return [*out, *_of_fields(kept, run), *_parts(kept)]


def _has(draft: Mapping[str, Any], section: str) -> bool:
    return any(key.startswith(f"{section}.") and value is not None for key, value in draft.items())


def _is_said(entry: Entry, kept: Mapping[str, Any]) -> bool:
    """Whether a checkpoint says what an entry reads: all of its arguments, or one that is set."""
    held = [
        f for f in entry.flags if argument_of(f) in kept and (f not in _NEGATED or kept[argument_of(f)] is not None)
    ]
    is_set = any(kept[argument_of(flag)] not in (None, flag in _NEGATED) for flag in held)
    return bool(held) and (len(kept) > _WHOLE or len(held) == len(entry.flags) or is_set)


def _is_compared(key: str) -> bool:
    name = key.removeprefix(_OF)
    return name != key and name not in TRAINING and name not in _LEFT_OUT


def _effective(draft: Mapping[str, Any], key: str) -> Any:
    """The value of a key, where null is a number that others give."""
    value = draft.get(key)
    heads = draft.get("model.num_attention_heads")
    if value is None and key == "model.num_query_groups" and draft.get("model.mla.kv_lora_rank") is None:
        return heads
    if value is None and key == "model.kv_channels" and heads and draft.get("model.hidden_size"):
        return draft["model.hidden_size"] // heads
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _named(entry: Entry, kept: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The argument to name: the first that is not what an export of ours says, or that is there."""
    names = [argument_of(flag) for flag in entry.flags if argument_of(flag) in kept]
    return next((name for name in names if (kept[name] or None) != (ours[name] or None)), names[0])


def _is_yarn(flag: str, kept: Mapping[str, Any], run: RunConfig) -> bool:
    """Whether both sides have positions by yarn, which the flags call a kind and the keys a scaling."""
    scaling = run.model.rope_scaling
    yarn = scaling is not None and scaling.rope_type == "yarn" and kept.get("position_embedding_type") == "yarn"
    return flag == "--position-embedding-type" and yarn


def _of_fields(kept: Mapping[str, Any], run: RunConfig) -> Iterator[Apart]:
    """Keys without a flag whose field of megatron-core a checkpoint names."""
    values = run.flat()
    for key in keys():
        field = key_of(key).feeds
        if not key.startswith(_OF) or key in flags_of() or not _is_compared(key) or field not in kept:
            continue
        here = values.get(key) if values.get(key) is not None else key_of(key).null
        there = kept[field]
        if key in values and there is not None and here is not None and there != here:
            yield Apart(field, there, key, here, there)


def _parts(kept: Mapping[str, Any]) -> Iterator[Apart]:
    """Parts of a network that none has here; a number may be a default that says nothing."""
    for flag, (_, text) in OTHERS.items():
        name = argument_of(flag)
        value = kept.get(name)
        present = value is True or (isinstance(value, str | list) and bool(value))
        if text == _NO_SUCH_PART and flag not in _SAME_NUMBERS and present:
            yield Apart(name, value, "", None, None, text)
