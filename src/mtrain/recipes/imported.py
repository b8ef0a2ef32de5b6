"""A configuration made from another system's files, and the parts without a place in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain.config.compose.composer import compose
from mtrain.config.compose.interpolate import put
from mtrain.config.compose.overrides import read_overrides
from mtrain.config.compose.paths import choices_of_group
from mtrain.config.compose.yaml_reader import parse
from mtrain.config.messages.validate import validate
from mtrain.config.resolve.conditional import CONDITIONAL
from mtrain.config.schema.run import UnresolvedRun
from mtrain.errors import ConfigError, Problem
from mtrain.recipes.delta import section
from mtrain.recipes.megatron.arguments import Arguments, Draft, Unplaced
from mtrain.recipes.megatron.table import flags_of

_KEY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)+\Z")
WHOLE = "recipe.verified"
"""The key that is left open if unknown flags may be missing: a person has to look."""
REQUIRED = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")
CHANGES = "changes the numbers"
"""The beginning of the reason of a flag without which the training differs."""
MARK = "# mtrain: "
"""The beginning of a line that `export` writes for a key without a flag."""


@dataclass
class Imported:
    """A configuration made from another system's."""

    run: UnresolvedRun
    unplaced: list[Unplaced] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Assumptions and findings, in sentences."""
    open: dict[str, str] = field(default_factory=dict)
    """Keys that are left to fill in, with the reason; their values in `run` mean nothing."""


def build(
    draft: Draft,
    arguments: Arguments,
    extra: Sequence[str],
    source: str,
    exported: Draft | None = None,
) -> UnresolvedRun:
    """Return the configuration of the keys that were read, then the `exported` keys, then the
    `extra` overrides.

    Raises:
        ConfigError: a required key is missing, or a value is refused; names the flag.
    """
    overrides = read_overrides(extra)
    problems = list(overrides.problems)
    if overrides.recipe is not None or overrides.run is not None:
        problems.append(
            Problem(
                "MT010", "", None, "an import starts from no recipe or run", "leave recipe= out"
            )
        )
    if problems:
        raise ConfigError(problems)
    values = _base_values(draft, overrides.choices)
    for key, value in draft.items():
        if key.partition(".")[0] not in overrides.choices:
            put(values, key, value)
    for key, value in {**(exported or {}), **overrides.values}.items():
        put(values, key, value)
    run, problems = validate(values, lambda path: _where(path, arguments, source))
    if run is None:
        raise ConfigError([_with_reason(problem, arguments) for problem in problems])
    return _quiet(run, arguments)


def _with_reason(problem: Problem, arguments: Arguments) -> Problem:
    """Return the problem of a missing key, with the reason if its flag was given."""
    if problem.code != "MT015":
        return problem
    flag = next(
        (flag for flag in flags_of().get(problem.path, ()) if flag in arguments.unplaced), None
    )
    detail = problem.detail
    if flag:
        detail += f": {flag} {arguments.unplaced[flag].text}"
    if "--yaml-cfg" in arguments.flags:
        detail += "; the file of --yaml-cfg is not read: import that file"
    return replace(problem, detail=detail)


def _base_values(draft: Draft, choices: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys without a flag: the choices', for model and layout the schema's defaults."""
    picked = {
        "data": draft.get("data.kind") or "mock",
        "precision": draft.get("precision.dtype") or "auto",
        **choices,
    }
    words = [f"{group}={choice}" for group, choice in picked.items()]
    values = compose(words).run.to_dict()
    for group in ("model", "parallel"):
        # not the default choice, whose model and layout nobody chose here
        if group not in choices:
            values[group] = {}
    return values


def _where(path: str, arguments: Arguments, source: str) -> str:
    given = [flag for flag in flags_of().get(path, ()) if flag in arguments.flags]
    return f"{source}: {given[0]}" if given else source


def _quiet(run: UnresolvedRun, arguments: Arguments) -> UnresolvedRun:
    """Return `run` with neutral values for keys without effect, as Megatron-LM ignores them."""
    values = run.to_dict()
    # Megatron-LM ignores such flags silently, and the checks here refuse them
    for key in CONDITIONAL:
        if key.value(run) != key.off and not key.active(run):
            put(values, key.path, key.off)
            for flag in flags_of().get(key.path, ()):
                arguments.refuse(flag, "no effect", f"has no effect without {key.needs}")
    return UnresolvedRun.model_validate(values)


def numeric_changes(flags: Sequence[Unplaced]) -> list[str]:
    """Return sentences on flags without which the training differs."""
    texts: dict[str, list[str]] = {}
    for item in flags:
        if item.why == "not supported" and item.text.startswith(CHANGES):
            texts.setdefault(item.text, []).append(f"{item.flag} {item.value}".strip())
    return [f"{', '.join(named)} is not taken over, and {text}" for text, named in texts.items()]


def exported_keys(text: str, source: str) -> Draft:
    """Return the keys of the lines that an export wrote for keys without a flag: each a key and a
    value in YAML.

    Raises:
        ConfigError: a marked line has no KEY=VALUE.
    """
    out: Draft = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith(MARK):
            continue
        key, equals, value = line[len(MARK) :].partition("=")
        if not equals or not _KEY.match(key):
            rule = f"a line that begins with `{MARK}` holds KEY=VALUE"
            raise ConfigError([Problem("MT003", "", None, rule, "delete it", f"{source}:{number}")])
        out[key] = parse(f"value: {value}", f"{source}:{number}").values["value"]
    return out


def name_of(path: Path) -> str:
    """Return a model's name made from a file's."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", path.stem).strip("_.-")
    return stem or "imported"


def as_published(run: UnresolvedRun) -> UnresolvedRun:
    """Return the run with the published training of its model, if that ships under some name."""
    for choice in choices_of_group("model"):
        known: Any = section("model", choice)
        # these do not change what the model computes
        here = {key: getattr(run.model, key) for key in ("name", "published", "kv_channels")}
        if known.head_dim == run.model.head_dim and known.model_copy(update=here) == run.model:
            model = run.model.model_copy(update={"published": known.published})
            return run.model_copy(update={"model": model})
    return run


def same_shape(draft: Draft) -> str | None:
    """Return the shipped model of the same layers and widths, the nearest if several."""
    shape = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
    )
    distances: dict[str, int] = {}
    for choice in choices_of_group("model"):
        model = section("model", choice)
        if all(getattr(model, key) == draft.get(f"model.{key}") for key in shape):
            known = [(f"model.{key}", value) for key, value in model]
            distances[choice] = sum(draft[key] != value for key, value in known if key in draft)
    return min(distances, key=distances.__getitem__, default=None)
