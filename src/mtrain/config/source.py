"""The part of composition that Hydra does: the grammar of override values, and defaults lists of group files.

Importing Hydra takes as long as all the rest of `check`. So what is plain (a number, a word, group files without
defaults lists of their own) is read here, to the same result, which a test compares; all else is Hydra's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from mtrain.config.load import MAX_DEPTH
from mtrain.errors import ConfigError, Problem


class Sweep(ValueError):
    """A value that stands for several runs: `1,2` or `range(1,4)`."""


_INT = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,3})?\Z")
_WORD = re.compile(r"(?!(?i:null|true|false|nan|inf)\Z)[A-Za-z_/][A-Za-z0-9_/.-]*\Z")
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}


def parse_value(text: str) -> Any:
    """The value that `text` spells in Hydra's override grammar.

    Raises:
        Sweep: it spells several values.
        ValueError: it is not in the grammar; says where.
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    if _WORD.match(text):
        return text
    return hydra_value(text)


def hydra_value(text: str) -> Any:
    """`parse_value` by Hydra itself, for any text."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if _depth(text) > MAX_DEPTH:  # which takes Hydra the square of it
        raise ValueError("nested too deep")
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
        if override.is_sweep_override():
            raise Sweep("several values")
        return _plain(override.value())
    except HydraException:
        raise ValueError(_unreadable(text)) from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _depth(text: str) -> int:
    """How many brackets are open at once, those in quotes aside."""
    steps = ((c in "[{(") - (c in "]})") for c in _QUOTED.sub("", text))
    return max(accumulate(steps), default=0)


def _unreadable(text: str) -> str:
    """Why a text is no value."""
    for opening, closing in ("[]", "{}", "()"):
        if text.count(opening) != text.count(closing):
            return f"a {opening} or {closing} has no partner"
    if text.count("'") % 2 or text.count('"') % 2:
        return "a quote that is opened is not closed"
    if re.match(r"[A-Za-z_]+\(", text):
        return "there is no such function of several values: choice(a,b), range(1,4), glob(word*), sort(b,a)"
    if "${" in text:
        return "a reference is ${group.key}"
    odd = next((c for c in text if not (c.isalnum() or c in " _/.-+:%@?*[]{},='\"$")), "")
    quotes = "put the value into quotes, if it is text"
    return f"{odd!r} is part of no plain value; {quotes}" if odd else quotes


def sweep_values(text: str, names: Sequence[str], limit: int) -> list[str] | None:
    """The values that `text` sweeps over, each as an override's value; None where it is one plain value.

    `names` are what `glob(...)` chooses from.

    Raises:
        ValueError: not in the grammar, more than `limit` values, or a kind that cannot be counted.
    """
    if _INT.match(text) or _FLOAT.match(text) or _WORD.match(text) or text in _CONSTANTS:
        return None
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob, RangeSweep
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"key={text}")
        if not override.is_sweep_override():
            return None
        sweep = override.value()
        if isinstance(sweep, Glob):
            return sweep.filter(list(names))
        if not override.is_discrete_sweep():
            raise ValueError("only values that can be counted are swept: a,b or choice() or range() or glob()")
        if isinstance(sweep, RangeSweep) and _length(sweep) > limit:
            raise ValueError(f"more than {limit} values")
        found = list(override.sweep_string_iterator())
    except (HydraException, ArithmeticError):
        raise ValueError(_unreadable(text)) from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    if len(found) > limit:
        raise ValueError(f"more than {limit} values")
    return found


def _length(sweep: Any) -> float:
    """How many numbers a range has, without making them."""
    if not sweep.step:
        raise ValueError("a range with a step of 0 never ends")
    return max(0.0, (float(sweep.stop) - float(sweep.start)) / float(sweep.step))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{type(value).__name__} is no plain value")


def defaults_list(
    conf: Path, choices: Mapping[str, str], layouts: Mapping[str, Mapping[str, Any]]
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """The files that the choices and their own defaults lists name, in order of rising precedence.

    Args:
        conf: folder of `config.yaml` and the groups.
        choices: group -> choice, over those of `config.yaml`.
        layouts: choices of the parallel group that have no file, with their values.

    Returns:
        Pairs (path under `conf` without its ending, dotted key it fills), and group -> choice.

    Raises:
        ConfigError: Hydra refuses; its first sentence is the rule.
    """
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for name, values in layouts.items():
        ConfigStore.instance().store(group="parallel", name=name, node=dict(values))
    overrides = [f"{group}={choice}" for group, choice in choices.items()]
    try:
        with initialize_config_dir(config_dir=str(conf), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            result = loader.compute_defaults_list("config", overrides, RunMode.RUN)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, AttributeError) as error:
        lost = getattr(error, "missing_cfg_file", None)
        missing = lost[0] if isinstance(lost, (list, tuple)) else lost
        what = f"{missing} is named, and is not there" if lost else "an entry cannot be read"
        rule = f"the group files do not compose: in a defaults list, {what}"
        fix = "write entries as `- NAME` of a file in the same folder, and `_self_` where its own keys come"
        raise ConfigError([Problem("MT011", "", None, rule, fix, conf.name)]) from None
    files = [
        (entry.config_path, entry.package or "")
        for entry in result.defaults
        if entry.config_path and not entry.config_path.startswith("hydra/")
    ]
    known = {str(group): str(choice) for group, choice in result.overrides.known_choices.items()}
    return files, {g: c for g, c in known.items() if not g.startswith("hydra/")}
