"""Hydra's Compose API over files that have been read and checked before: Hydra opens none of ours
itself.

Hydra asks its sources of configurations for each name; the one here asks whoever composes. It is
registered with Hydra as any plugin of that kind, and says nothing while nobody composes, so that
another application of Hydra in the same process goes on as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from hydra import compose, initialize_config_module
from hydra.conf import RuntimeConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtrain.errors import ConfigError, Problem

VERSION_BASE = "1.3"
HYDRA = "hydra/config"
_NOTES: dict[str, Any] = {
    "overrides": {"hydra": [], "task": []},
    "runtime": RuntimeConf(),
    "job": {
        **{
            "name": "mtrain",
            "config_name": None,
            "override_dirname": None,
            "env_copy": [],
            "env_set": {},
        },
        "config": {"override_dirname": {"kv_sep": "=", "item_sep": ",", "exclude_keys": []}},
    },
}
"""What Hydra writes down of a composition, in place of its own configuration: no job runs by it,
and to make all that it would read for one takes longer than to compose.
"""


class NotComposed(Exception):
    """Hydra refuses to compose; the first line of what it says."""


@dataclass(frozen=True)
class Part:
    """What Hydra is given for the name of a configuration."""

    values: Mapping[str, Any]
    package: str | None = None
    """Where the file says that its values go; None: where its group does."""


class Library(Protocol):
    """What there is to compose."""

    def part(self, name: str) -> Part | None:
        """Return the configuration of this name, such as `model/llama3_8b`; None where there is
        none.
        """

    def has(self, name: str) -> bool:
        """Return whether there is a configuration of this name."""

    def is_group(self, name: str) -> bool:
        """Return whether there is a group of this name."""

    def said(self) -> Hashable:
        """Return the texts of all that was read."""


MOST_MADE = 512
_made: dict[tuple[str, tuple[str, ...], Hashable], Any] = {}
"""What was composed in this process, by what it was made from: a sweep or a list of recipes asks
again and again.
"""
_composing: ContextVar[tuple[Library, str] | None] = ContextVar("composing", default=None)
"""The library that Hydra looks at, and the name of its primary configuration."""


class _Source(ConfigSource):
    """Hydra's view of the library of whoever composes."""

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
        library, primary = _now()
        part = library.part(config_path)
        assert part is not None, config_path
        values = dict(part.values)
        if config_path == primary:
            defaults = values.get("defaults", [])
            itself = [] if "_self_" in defaults else ["_self_"]
            values["defaults"] = [*defaults, *itself]
        return ConfigResult(
            self.provider, self.path, OmegaConf.create(values), {"package": part.package}
        )

    def is_group(self, config_path: str) -> bool:
        return _now()[0].is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        return config_path == HYDRA or _now()[0].has(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _now() -> tuple[Library, str]:
    composing = _composing.get()
    assert composing is not None, "nobody composes"
    return composing


class _SearchPath(SearchPathPlugin):
    """Puts the library before all that Hydra looks at, while somebody composes."""

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
        with _hydra(library, primary):
            _made[key] = OmegaConf.to_container(compose(primary, list(arguments)), resolve=False)
    values = copy.deepcopy(_made[key])
    if settings:
        config = OmegaConf.create(values)
        for path, value in settings.items():
            OmegaConf.update(config, path, value, merge=True, force_add=True)
        values = OmegaConf.to_container(config, resolve=False)
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}


def quoted(sign: str, group: str, choice: str) -> str:
    """Return a choice in Hydra's grammar, in quotes: `1.10` and `null` are names as well."""
    return f"{sign}{group}='{choice}'"


def defaults_list(
    library: Library, primary: str, arguments: Sequence[str]
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Return the configurations that are composed, of rising precedence: their names, and the
    dotted keys that they fill.

    Beside it group -> choice.

    Raises:
        NotComposed: Hydra refuses.
    """
    with _hydra(library, primary):
        loader = GlobalHydra.instance().config_loader()
        found = loader.compute_defaults_list(primary, list(arguments), RunMode.RUN)
    entries = [
        (entry.config_path, entry.package or "") for entry in found.defaults if entry.config_path
    ]
    known = {
        str(group): str(choice) for group, choice in found.overrides.known_choices.items() if choice
    }
    return [(name, package) for name, package in entries if not name.startswith("hydra/")], known


@contextmanager
def _hydra(library: Library, primary: str) -> Iterator[None]:
    """Hydra, started over a library and put back as it was.

    What another application has put into Hydra's store would be laid under ours of the same name:
    it is kept away.
    """
    token = _composing.set((library, primary))
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    store = ConfigStore.instance()
    everything = store.repo
    store.repo = {}
    try:
        with initialize_config_module("hydra.conf", job_name="mtrain", version_base=VERSION_BASE):
            yield
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
            raise NotComposed(f"in a defaults list, {missing} is named, and is not there") from None
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        lines = str(cause).strip().splitlines() or [type(error).__name__]
        raise NotComposed(lines[0]) from None
    finally:
        store.repo = everything
        GlobalHydra.instance().hydra = outer
        _composing.reset(token)


def not_composed(error: Exception, before: Sequence[Problem]) -> ConfigError:
    """Return the error of group files that do not compose, after the problems that were found
    `before`.
    """
    rule = f"the group files do not compose: {error}"
    fix = (
        "write entries of defaults as `- NAME` of a file of the same group, as `-"
        " FOLDER/NAME@_here_` of one in a folder of it, and `_self_` where its own keys come"
    )
    return ConfigError([*before, Problem("MT011", "", None, rule, fix, "conf")])
