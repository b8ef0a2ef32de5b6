"""Hydra's Compose API over files that were read and checked before: Hydra opens none of mtrain's
files.

Hydra asks its configuration sources for each name; the source here asks the current composition. It
is registered like any Hydra plug-in and answers only while a composition runs, so that another
application of Hydra in the same process is not affected.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra._internal import config_loader_impl
from hydra._internal import defaults_list as lists
from hydra.conf import RuntimeConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrain.config.compose.library import Library
from mtrain.errors import ConfigError, Problem

VERSION_BASE = "1.3"
HYDRA = "hydra/config"
# A stand-in for Hydra's own configuration: mtrain runs no Hydra job, and building the real one
# takes longer than composing.
_NOTES: dict[str, Any] = {
    "overrides": {"hydra": [], "task": []},
    "runtime": RuntimeConf(),
    "job": {
        "name": "mtrain",
        "config_name": None,
        "override_dirname": None,
        "env_copy": [],
        "env_set": {},
        "config": {"override_dirname": {"kv_sep": "=", "item_sep": ",", "exclude_keys": []}},
    },
}


class NotComposed(Exception):
    """An error of Hydra's composition, with the first line of its message."""


_Inputs = tuple[str, tuple[str, ...], Hashable]
Asked = tuple[str, str, Any]
"""A question to a library, which is the name of its method, a configuration's name, the answer."""
DefaultsList = tuple[list[tuple[str, str]], dict[str, str]]
"""Names of configurations, each with the dotted key that it fills; and group -> choice."""
MOST_MADE = 512
# Compositions of this process by their inputs: a sweep or a list of recipes repeats them.
_made: dict[_Inputs, Any] = {}
# Defaults lists by the same inputs, each with what Hydra asked the library: only with equal answers
# is the list the same.
_listed: dict[_Inputs, tuple[list[Asked], DefaultsList]] = {}
# The newest list of a primary and its arguments, as Hydra found it, with what it asked.
_found: dict[tuple[str, tuple[str, ...]], tuple[list[Asked], lists.DefaultsList]] = {}


@dataclass(frozen=True)
class _Composing:
    """A composition that is running."""

    library: Library
    primary: str
    """The name of its primary configuration."""
    whole: bool
    """True if Hydra needs the values of the files, and not only their defaults lists."""
    asked: list[Asked] = field(default_factory=list)

    def answer(self, question: str, name: str) -> Any:
        """Return the library's answer, and record it."""
        found = getattr(self.library, question)(name)
        self.asked.append((question, name, found))
        return found


# The composition whose library Hydra reads at the moment.
_composing: ContextVar[_Composing | None] = ContextVar("composing", default=None)


class _Source(ConfigSource):
    """Hydra's view of the current library."""

    @staticmethod
    def scheme() -> str:
        return "mtrain"

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        if config_path == HYDRA:
            return ConfigResult(
                self.provider, self.path, OmegaConf.create(_NOTES), {"package": None}
            )
        now = _now()
        now.answer("text", config_path)
        part = now.library.part(config_path)
        values = {k: v for k, v in part.values.items() if now.whole or k == "defaults"}
        if config_path == now.primary:
            defaults = values.get("defaults", [])
            itself = [] if "_self_" in defaults else ["_self_"]
            values["defaults"] = [*defaults, *itself]
        return ConfigResult(
            self.provider, self.path, OmegaConf.create(values), {"package": part.package}
        )

    def is_group(self, config_path: str) -> bool:
        return bool(_now().answer("is_group", config_path))

    def is_config(self, config_path: str) -> bool:
        return config_path == HYDRA or bool(_now().answer("has", config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _now() -> _Composing:
    composing = _composing.get()
    assert composing is not None, "no composition is running"
    return composing


class _SearchPath(SearchPathPlugin):
    """A search path that puts the library first while a composition runs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if _composing.get() is not None:
            search_path.prepend("mtrain", "mtrain://")


Plugins.instance().register(_Source)
Plugins.instance().register(_SearchPath)


def composed(
    library: Library, primary: str, arguments: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that Hydra composes: plain mappings, lists and scalars, references as they
    are written.

    Args:
        library: what there is to compose.
        primary: the name of the configuration with the defaults list.
        arguments: a command line in Hydra's grammar, of choices and of keys that are taken away.
        settings: dotted key -> value, laid over that as Hydra does for `++key=value`.

    Raises:
        NotComposed: Hydra refuses.
    """
    key = (primary, tuple(arguments), library.said())
    if key not in _made:
        if len(_made) >= MOST_MADE:
            _made.clear()
        with _hydra(library, primary, whole=True), _without_listing_again(library, *key[:2]):
            _made[key] = OmegaConf.to_container(compose(primary, list(arguments)), resolve=False)
    # Callers change the values in place.
    values = copy.deepcopy(_made[key])
    if not isinstance(values, dict):
        return {}
    if settings:
        changed = _sections(values, settings)
        config = OmegaConf.create(changed)
        for path, value in settings.items():
            OmegaConf.update(config, path, value, merge=True, force_add=True)
        values |= cast("dict[Any, Any]", OmegaConf.to_container(config, resolve=False))
    return {str(name): value for name, value in values.items()}


def _sections(values: dict[Any, Any], settings: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the sections that settings change: nodes of the others would take most of the time.

    A path in brackets or a reference may lead to any section, so all are returned then.
    """
    names = {path.partition(".")[0] for path in settings}
    found = {name: values[name] for name in names if name in values}
    if any("[" in name for name in names) or "${" in repr(found):
        return values
    return found


@contextmanager
def _without_listing_again(
    library: Library, primary: str, arguments: tuple[str, ...]
) -> Iterator[None]:
    """Give Hydra the defaults list that it found before, if it would find it again: making the list
    takes half the time of a composition.
    """
    asked, found = _found.get((primary, arguments), ([], None))
    if found is None or not _still_answers(library, asked):
        yield
        return
    with _replaced(config_loader_impl, "create_defaults_list", lambda **_: found):
        yield


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of Hydra inside the block."""
    real = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, real)


_interpolation_map = lists._create_interpolation_map


def _map_of_references(
    overrides: lists.Overrides, entries: list[InputDefault], self_added: bool
) -> DictConfig:
    """Return what references in a defaults list may name, if the list has any.

    Hydra makes this map for every file, which takes half the time of its defaults lists.
    """
    if any(entry.is_interpolation() for entry in entries):
        return _interpolation_map(overrides, entries, self_added)
    return OmegaConf.create()


def _still_answers(library: Library, asked: Sequence[Asked]) -> bool:
    return all(getattr(library, question)(name) == answer for question, name, answer in asked)


def quoted(sign: str, group: str, choice: str) -> str:
    """Return a choice in Hydra's grammar, quoted: `1.10` and `null` are names too."""
    return f"{sign}{group}='{choice}'"


def defaults_list(library: Library, primary: str, arguments: Sequence[str]) -> DefaultsList:
    """Return the composed configurations in rising precedence, each with the dotted key that it
    fills, and group -> choice.

    Raises:
        NotComposed: Hydra refuses.
    """
    key = (primary, tuple(arguments), library.said())
    if key in _listed:
        asked, (entries, known) = _listed[key]
        if _still_answers(library, asked):
            return list(entries), dict(known)
    asked, made = _listed_by_hydra(library, primary, arguments)
    if len(_listed) >= MOST_MADE:
        _listed.clear()
        _found.clear()
    _listed[key] = list(dict.fromkeys(asked)), made
    entries, known = made
    return list(entries), dict(known)


def _listed_by_hydra(
    library: Library, primary: str, arguments: Sequence[str]
) -> tuple[list[Asked], DefaultsList]:
    """Return a defaults list, and what Hydra asked the library."""
    with _hydra(library, primary, whole=False) as asked:
        loader = GlobalHydra.instance().config_loader()
        found = loader.compute_defaults_list(primary, list(arguments), RunMode.RUN)
    _found[primary, tuple(arguments)] = list(dict.fromkeys(asked)), found
    entries = [
        (entry.config_path, entry.package or "") for entry in found.defaults if entry.config_path
    ]
    known = {
        str(group): str(choice) for group, choice in found.overrides.known_choices.items() if choice
    }
    return asked, ([(name, key) for name, key in entries if not name.startswith("hydra/")], known)


@contextmanager
def _hydra(library: Library, primary: str, *, whole: bool) -> Iterator[list[Asked]]:
    """Start Hydra over a library, and restore its state afterwards; yield what it asks.

    Entries that another application put into Hydra's store are hidden meanwhile: Hydra would merge
    them below mtrain's of the same name.
    """
    composing = _Composing(library, primary, whole)
    token = _composing.set(composing)
    # Hydra is a singleton: a program that uses it itself, and calls mtrain's API, must find it as
    # it left it.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    store = ConfigStore.instance()
    everything = store.repo
    store.repo = {}
    try:
        with (
            initialize_config_module("hydra.conf", job_name="mtrain", version_base=VERSION_BASE),
            _replaced(lists, "_create_interpolation_map", _map_of_references),
        ):
            yield composing.asked
    # Hydra follows a defaults list without a bound.
    except RecursionError:
        raise NotComposed("a defaults list leads back to its own file") from None
    except (
        HydraException,
        OmegaConfBaseException,
        ValueError,
        AttributeError,
        AssertionError,
    ) as error:
        lost = getattr(error, "missing_cfg_file", None)
        if lost:
            missing = lost[0] if isinstance(lost, (list, tuple)) else lost
            raise NotComposed(
                f"in a defaults list, {missing} is listed, and there is no such file"
            ) from None
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        lines = str(cause).strip().splitlines() or [type(error).__name__]
        raise NotComposed(lines[0]) from None
    finally:
        store.repo = everything
        GlobalHydra.instance().hydra = outer
        _composing.reset(token)


def not_composed(error: Exception, before: Sequence[Problem]) -> ConfigError:
    """Return the error for group files that do not compose, after the problems found `before`."""
    rule = f"the group files do not compose: {error}"
    fix = (
        "write entries of defaults as `- NAME` of a file of the same group, as `-"
        " FOLDER/NAME@_here_` of one in a folder of it, and `_self_` where its own keys come"
    )
    return ConfigError([*before, Problem("MT011", "", None, rule, fix, "conf")])
