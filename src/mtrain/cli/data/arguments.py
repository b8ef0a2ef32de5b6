"""Words of the subverbs of `data`: paths, `name=value`, and `--name VALUE`, which means
the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain.cli.named_values import Word, read_words, yes
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import program, user_path
from mtrain.errors import ConfigError, Problem


def read_arguments(
    argv: Sequence[str],
    known: Mapping[str, Word],
    usage: str,
    least: int = 1,
    most: int | None = None,
) -> tuple[dict[str, Any], list[Path]]:
    """Return the values of the `known` words and the paths of a subverb, of which `least` to `most`
    are needed.

    Raises:
        ConfigError: an unknown flag or word, an invalid value, too few or too many paths.
    """
    values, rest = read_words(as_words(argv, known, usage), known)
    strange = [word for word in rest if "=" in word and not os.path.exists(word)]
    if strange:
        name, _, value = strange[0].partition("=")
        rule = f"is no word of this subverb; words: {', '.join(known) or 'none'}"
        raise ConfigError([Problem("MT003", name, value, rule, _fix(usage), COMMAND_LINE)])
    if len(rest) < least or (most is not None and len(rest) > most):
        if most == least:
            need = f"{least}"
        else:
            if most is None:
                need = f"at least {least}"
            else:
                need = f"{least} to {most}"
        rule = f"{need} path{'s' if most != 1 else ''} needed, {len(rest)} given"
        raise ConfigError([Problem("MT002", "", None, rule, _fix(usage), COMMAND_LINE)])
    return values, [user_path(word) for word in rest]


def needs(values: Mapping[str, Any], name: str, usage: str) -> Any:
    """Return the value of a word that has no default.

    Raises:
        ConfigError: it was not said.
    """
    if values[name] is None:
        raise ConfigError([Problem("MT002", name, None, "is needed", _fix(usage), COMMAND_LINE)])
    return values[name]


def as_words(argv: Sequence[str], known: Mapping[str, Word], usage: str) -> list[str]:
    """Return flags with their values as words `name=value`.

    Raises:
        ConfigError: a flag that is not there, or that lacks its value.
    """
    out = list[str]()
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        if not word.startswith("-") or word == "-":
            out.append(word)
        elif not flag.startswith("--") or name not in known:
            flags = ", ".join(f"--{each.replace('_', '-')}" for each in known)
            rule = f"{flag}: there is no such flag here; flags: {flags}"
            raise ConfigError([Problem("MT010", "", None, rule, _fix(usage), COMMAND_LINE)])
        elif equals:
            out.append(f"{name}={value}")
        elif known[name].read is yes:
            out.append(f"{name}=true")
        elif queue:
            out.append(f"{name}={queue.pop(0)}")
        else:
            raise ConfigError(
                [Problem("MT010", "", None, f"{flag}: needs a value", _fix(usage), COMMAND_LINE)]
            )
    return out


def _fix(usage: str) -> str:
    return f"{program()} data {usage}"
