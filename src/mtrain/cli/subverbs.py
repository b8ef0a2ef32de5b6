"""Verbs that have subverbs: each a word, and a function of a module."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from importlib import import_module
from keyword import iskeyword
from typing import Any

from mtrain.errors import ConfigError, Problem


def function_of(verb: str, word: str, subverbs: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function of a subverb: of the word's name in its module of the verb's package,
    with `_` for `-`.

    A word that Python has for itself, such as `import` or `list`, has one `_` more.

    Raises:
        ConfigError: there is no such subverb.
    """
    if word not in subverbs:
        near = difflib.get_close_matches(word, subverbs, n=2, cutoff=0.5)
        rule = f"{word}: there is no such subverb; subverbs: {', '.join(subverbs)}"
        fix = " or ".join(f"{verb} {name}" for name in near) or f"{verb} --help"
        raise ConfigError([Problem("MT010", "", None, rule, fix, "command line")])
    name = word.replace("-", "_")
    taken = iskeyword(name) or name == "list"
    found: Callable[..., Any] = getattr(
        import_module(f"mtrain.cli.{verb}.{subverbs[word]}"), f"{name}_" if taken else name
    )
    return found
