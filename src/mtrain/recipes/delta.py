"""A configuration as a recipe: the nearest choices, and the values that differ from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mtrain.config.compose.choices import is_path
from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import spell
from mtrain.config.compose.interpolate import put
from mtrain.config.compose.layout_string import parse_layout
from mtrain.config.compose.paths import choices_of_group, find_config
from mtrain.config.compose.yaml_reader import load, scalar
from mtrain.config.messages.suggestions import default_choices
from mtrain.config.messages.validate import MISSING, OPEN
from mtrain.config.schema.base import Section
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import UnresolvedParallel
from mtrain.config.schema.run import GROUPS, UnresolvedRun

SCHEMA_LINE = "# yaml-language-server: $schema=recipe.schema.json"
MAX_LINES = 12
WIDTH = 112
FEW = 4
FAR = 5
"""The cost, in halves of a key, of a choice that is neither the default nor exact."""
_WEIGHTS = {"data.kind": 5, "optim.name": 5, "precision.dtype": 5}


@dataclass
class Delta:
    """The choices and values of a recipe, without its description."""

    choices: dict[str, str] = field(default_factory=dict)
    """Group -> choice, if it is not the default one."""
    values: dict[str, Any] = field(default_factory=dict)
    """Nested values, over the choices."""
    remarks: list[str] = field(default_factory=list)
    """Comments above them."""


def delta(
    run: UnresolvedRun, chosen: Mapping[str, str] | None = None, brought: ModelConfig | None = None
) -> Delta:
    """Return the shortest recipe of `run`: for each group the choice that leaves the fewest values
    to set.

    A model that is near no choice is written whole, so that it can be read without knowing another.

    Args:
        run: a configuration; its null values are resolved where it runs.
        chosen: choices that are to be kept.
        brought: the model of the weights that the run begins with, which is its own unless a file
            sets another.
    """
    out = Delta()
    usual = default_choices()[0]
    for group in GROUPS:
        target = getattr(run, group)
        if group == "model" and brought is not None:
            # weights bring their model: a recipe has only its differences
            changes = _changes(target, brought)
            if changes is not None:
                out.values |= {group: changes} if changes else {}
                continue
        nearest = _nearest(group, target, usual.get(group), chosen or {})
        far = nearest.cost > 2 * FEW + FAR
        if group == "model" and far and group not in (chosen or {}):
            out.values[group] = _set_keys(target)  # a whole model needs no choice
            continue
        if nearest.name != usual.get(group) or (group == "model" and nearest.changes):
            out.choices[group] = nearest.name
        if nearest.changes:
            out.values[group] = nearest.changes
    return out


@dataclass(frozen=True)
class _Choice:
    """A choice of a group, and the values that differ from it."""

    name: str
    changes: dict[str, Any]
    cost: int


def _nearest(group: str, target: Any, usual: str | None, chosen: Mapping[str, str]) -> _Choice:
    """Return the choice with the least cost; of equal ones the default, then the first."""
    choices = []
    for name in _candidates(group, target, usual, chosen):
        changes = _changes(target, section(group, name))
        if changes is None:
            continue
        cost = 2 * _size(changes, group)
        if name != usual and name in choices_of_group(group):
            # a choice by name that fits exactly costs little, one that is changed has to save
            # several keys
            cost += FAR if changes and group != "parallel" else 1
        choices.append(_Choice(name, changes, cost))
    if not choices:
        raise AssertionError(f"no choice of {group} can be changed into {target!r}")
    return min(choices, key=lambda choice: (choice.cost, choice.name != usual))


def left_open(written: Delta, keys: Mapping[str, str]) -> Delta:
    """Return the delta with keys to fill in by hand, each with a remark on the reason."""
    for key, why in keys.items():
        if key.rpartition(".")[0] != "recipe":
            put(written.values, key, None if key in OPEN else MISSING)
        written.remarks.append(f"fill in {key}: {OPEN[key][0] if key in OPEN else why}")
    return written


def recipe_text(written: Delta, about: Mapping[str, str], *, short: bool = False) -> str:
    """Return the file: a line for the editor, the description, choices, values.

    With `short`, choices and values take at most 12 lines, however long.
    """
    choices = [
        f"  - override /{group}: {spell(choice)}" for group, choice in written.choices.items()
    ]
    body = (["defaults:", *choices] if choices else []) + [
        line for group, values in written.values.items() for line in _block(group, values, WIDTH)
    ]
    if short and len(body) > MAX_LINES:
        body = (["defaults:", *choices] if choices else []) + _flat(written.values)
    if short and len(body) > MAX_LINES:
        entries = ", ".join(
            f"{{override /{group}: {spell(choice)}}}" for group, choice in written.choices.items()
        )
        body = [f"defaults: [{entries}]", *_flat(written.values)]
    head = [SCHEMA_LINE, "recipe:", *(f"  {key}: {_words(value)}" for key, value in about.items())]
    return "\n".join([*head, *(f"# {remark}" for remark in written.remarks), *body]) + "\n"


def section(group: str, choice: str) -> Section:
    """Return the section of a group that a choice sets by itself."""
    if is_path(choice):
        return _composed(group, choice)
    return _section(group, choice, find_config(f"{group}/{choice}"))


def _composed(group: str, choice: str) -> Section:
    composed: Section = getattr(compose([f"{group}={choice}"]).run, group)
    return composed


@cache
def _section(group: str, choice: str, file: Path | None) -> Section:
    kind: Any = UnresolvedRun.model_fields[group].annotation
    parsed: Section
    if file is None:
        parsed = kind.model_validate(parse_layout(choice))
        return parsed
    document = load(file)
    # only files with Hydra's directives need its composition, which takes 0.2 s
    if "@package" in document.text or "defaults" in document.values or "${" in str(document.values):
        return _composed(group, choice)
    parsed = kind.model_validate(document.values)
    return parsed


def _candidates(group: str, target: Any, usual: str | None, chosen: Mapping[str, str]) -> list[str]:
    if group in chosen:
        return [chosen[group]]
    words = [*([usual] if usual else []), *choices_of_group(group)]
    # Only plain degrees: a layout that is named after a model suggests that model.
    if isinstance(target, UnresolvedParallel):
        models = choices_of_group("model")
        plain = [
            word for word in words if not any(word.startswith(f"{model}_") for model in models)
        ]
        words = [*(word for ranks in (True, False) for word in _layouts(target, ranks)), *plain]
    return list(dict.fromkeys(words))


def _layouts(p: UnresolvedParallel, with_ranks: bool) -> list[str]:
    """Return the layout as one word, with or without the data-parallel size."""
    axes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "vpp": p.vpp, "ep": p.ep, "etp": p.etp or 1}
    # a recipe omits degrees of 1, except etp, whose default is tp
    word = "".join(
        f"{axis}{n}" for axis, n in axes.items() if n > 1 or (axis == "etp" and p.etp is not None)
    )
    if with_ranks:
        if p.ranks is None or p.ranks % p.model_ranks:
            return []
        word += f"dp{p.ranks // p.model_ranks}"
    word += "sp" if p.sequence_parallel else ""
    try:
        parse_layout(word)
    except ValueError:
        return []
    return [word]


def _changes(target: Any, base: Any) -> dict[str, Any] | None:
    """Return the values that change `base` into `target`; None if no file can."""
    out: dict[str, Any] = {}
    for name in type(target).model_fields:
        wanted = getattr(target, name)
        here = getattr(base, name)
        if wanted == here:
            continue
        if isinstance(wanted, Section):
            inner = _set_keys(wanted) if here is None else _changes(wanted, here)
            if inner is None:
                return None
            out[name] = inner
        elif isinstance(wanted, dict) and here and not here.keys() <= wanted.keys():
            return None  # mappings are merged, so a file cannot remove an item
        else:
            out[name] = list(wanted) if isinstance(wanted, tuple) else wanted
    return out


def _set_keys(wanted: Section) -> dict[str, Any]:
    """Return the keys of a section that are not at their default."""
    out: dict[str, Any] = {}
    for name, info in type(wanted).model_fields.items():
        value = getattr(wanted, name)
        if info.is_required() or value != info.get_default(call_default_factory=True):
            out[name] = _set_keys(value) if isinstance(value, Section) else value
    return {key: list(value) if isinstance(value, tuple) else value for key, value in out.items()}


def _size(values: Mapping[str, Any], prefix: str) -> int:
    """Return the size of a recipe's values; keys that a choice sets count more."""
    size = 0
    for key, value in values.items():
        if isinstance(value, dict) and value:
            size += _size(value, f"{prefix}.{key}")
        else:
            size += _WEIGHTS.get(f"{prefix}.{key}", 1)
    return size


def _flat(values: Mapping[str, Any]) -> list[str]:
    return [f"{group}: {spell(inner)}" for group, inner in values.items()]


def _block(key: str, value: Any, width: int, depth: int = 0) -> list[str]:
    """Return a key in one line if it fits, otherwise its keys in separate lines."""
    line = f"{'  ' * depth}{key}: {spell(value)}"
    if not isinstance(value, dict) or not value or len(line) <= width:
        return [line]
    inner = [row for name, item in value.items() for row in _block(name, item, width, depth + 1)]
    return [f"{'  ' * depth}{key}:", *inner]


def _words(text: str) -> str:
    """Return a sentence as YAML, unquoted if possible."""
    plain = (
        text[:1].isalpha() and text[-1:] != ":" and not any(sign in text for sign in (": ", " #"))
    )
    return text if plain and text.isprintable() and scalar(text) == text else spell(text)


def unequal(first: UnresolvedRun, second: UnresolvedRun) -> list[str]:
    """Return keys whose values differ, without a recipe's description."""
    left_values = first.flat()
    right_values = second.flat()
    return [
        key
        for key in {**left_values, **right_values}
        if left_values.get(key, ...) != right_values.get(key, ...)
    ]
