"""Names of weights and modules that patterns select, the same in every layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from mtrain.config.schema.run import RunConfig
from mtrain.errors import Problem
from mtrain.models.count import one_expert, whole
from mtrain.models.gpt.torch_dist import one_name
from mtrain.models.registry import family_of

KEY = "log.statistics.modules"
OUTPUTS = re.compile(
    r"(?:.+\.layers\.\d+(?:\.(?:self_attention|cross_attention|mixer|mlp))?|output_layer)"
)
"""Modules whose outputs are described: layers (the residual stream), attention, MLP, logits."""
_UNCOUNTED = re.compile(r"\.layers\.(?!\d)")
_EXPERT = re.compile(r"\.experts\.(?:experts\.)?(?:\d+\.)?")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_TOKENS = re.compile(r"\*\*|\*|\?|[^*?]+")
_ANY = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


def name_of(key: str, offset: Sequence[int] = ()) -> str:
    """Return the name of a weight that is saved under `key`: with the number of its layer, which
    `offset` begins with where the key has none, and one name for all experts of a layer.
    """
    layers = offset[: len(_UNCOUNTED.findall(key))]
    return _EXPERT.sub(".experts.", one_name(key, layers))


def weights_of(run: RunConfig) -> list[str]:
    """Return the names of the trained weights; none if the family does not list them."""
    family = family_of(run.model)
    if family.weights is None:
        return []
    alone = one_expert(run.model)
    listed = family.weights(run.model, alone, whole(run.model))
    if run.peft.kind is not None and family.adapted is not None:
        listed = family.adapted(listed, run.model_copy(update={"parallel": alone}))
    trained = (w for w in listed if not w.frozen)
    return list(dict.fromkeys(name_of(family.saved_as(run.model, w.name)) for w in trained))


def modules_of(weights: Iterable[str]) -> list[str]:
    """Return the modules that hold the weights, outer ones first."""
    parts = (name.split(".") for name in weights)
    return list(dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p))))


def pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern.

    `*` matches any characters of one part of a name, `?` one character, `**` any parts.
    A module is selected with everything inside.
    """
    words = "".join(_ANY.get(word) or re.escape(word) for word in _TOKENS.findall(text))
    return re.compile(rf"{words}(?:\..*)?")


def selects(patterns: Sequence[str], name: str) -> bool:
    """Return whether any of the patterns selects a weight or module."""
    return any(pattern(text).fullmatch(name) for text in patterns)


def choices(run: RunConfig) -> list[str]:
    """Return all modules and weights, with `*` for the numbers of layers."""
    weights = weights_of(run)
    return list(dict.fromkeys(_NUMBER.sub("*", n) for n in (*modules_of(weights), *weights)))


def problems(run: RunConfig, origins: Mapping[str, str]) -> list[Problem]:
    """Return the problem of patterns of `log.statistics` that select nothing."""
    patterns = run.log.statistics.modules
    weights = weights_of(run) if run.log.statistics.interval is not None else []
    names = [*modules_of(weights), *weights]
    empty = [text for text in patterns if not any(map(pattern(text).fullmatch, names))]
    if not names or not empty:
        return []
    known = choices(run)
    near = {t: get_close_matches(_NUMBER.sub("*", t), known, n=3, cutoff=0.4) for t in empty}
    lists = [[next(iter(near[t]), "**") if t in near else t for t in patterns]]
    if len(empty) == 1:
        lists = [[word if t in near else t for t in patterns] for word in near[empty[0]] or ["**"]]
    fix = " or ".join(f"{KEY}=[{','.join(dict.fromkeys(fixed))}]" for fixed in lists)
    what = f"{', '.join(empty)}; {run.model.name} has {len(names)} modules and weights"
    return [Problem("MT372", KEY, list(patterns), what, fix, origins.get(KEY, ""))]
