"""Installed packages: their versions and plug-ins, and the folder for reproducible results."""

from __future__ import annotations

import os
from importlib import metadata
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeVar

import mtrain
from mtrain.errors import BadEnvironment

CACHE = "MTRAIN_CACHE"


def version_of(package: str) -> str | None:
    """Return a package's version, by its metadata; None: it has none.

    mtrain knows its own, also in a source tree.
    """
    if package == "mtrain":
        return mtrain.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path | None:
    """Return MTRAIN_CACHE, else ~/.cache/mtrain; None if this user has no home.

    The folder may be missing, or read-only.
    """
    named = os.environ.get(CACHE, "")
    try:
        return Path(named or "~/.cache/mtrain").expanduser()
    except RuntimeError:  # a user without an entry in the table of users, and without HOME
        return None


Kind = TypeVar("Kind")

# Entry points of hooks (`mtrain.train.hooks.base.Hook`), which `log.hooks` enables by name.
HOOKS = "mtrain.hooks"
SHIPPED_HOOKS = "mtrain.train.hooks.optional"
# Entry points of sinks (`mtrain.events.sink.Sink`), which `log.sinks` enables by name.
SINKS = "mtrain.sinks"
SHIPPED_SINKS = "mtrain.train.sinks"
# A shipped sink -> the modules that its extra, of the same name, installs
SINK_MODULES = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy"),
    "prometheus": ("prometheus_client",),
    "swanlab": ("swanlab",),
    "trackio": ("trackio",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
# Entry points of losses (`mtrain.train.objectives.Objective`), which `objective.name` names.
OBJECTIVES = "mtrain.objectives"
SHIPPED_OBJECTIVES = "mtrain.train.objectives"
# Entry points of rewards (functions of `mtrain.train.rewards.Sampled`), which `rollout.rewards`
# names.
REWARDS = "mtrain.rewards"
SHIPPED_REWARDS = "mtrain.train.rewards"
# Entry points of environments (`mtrain.train.environments`), which `rollout.environment` names.
ENVIRONMENTS = "mtrain.environments"
SHIPPED_ENVIRONMENTS = "mtrain.train.environments"


def shipped(package: str) -> list[str]:
    """Return the names of the modules of one of mtrain's packages; none of them is imported."""
    spec = find_spec(package)
    assert spec is not None
    return sorted(module.name for module in iter_modules(spec.submodule_search_locations))


def names(package: str, group: str) -> list[str]:
    """Return the names of all parts of a kind: the shipped ones, then those of plug-ins."""
    own = shipped(package)
    return [*own, *sorted(found(group).keys() - set(own))]


def has_sink(name: str) -> bool:
    """Return whether the modules of a sink are there, without importing them."""
    for module in SINK_MODULES.get(name, ()):
        try:
            if find_spec(module) is None:
                return False
        except ModuleNotFoundError:
            return False
    return True


def found(group: str) -> dict[str, EntryPoint]:
    """Return the plug-ins of a group by their names; none is loaded."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load(entry: EntryPoint, what: str, kind: type[Kind]) -> Kind:
    """Return the object that an entry point names.

    Args:
        entry: the entry point.
        what: what it provides, for messages: `device 'tpu'`.
        kind: the class that it must be of.

    Raises:
        BadEnvironment: it does not load, or is something else.
    """
    try:
        part = entry.load()
    # Code of somebody else: whatever it raises, the user needs to know which plug-in it was.
    except Exception as error:
        raise BadEnvironment(f"{what}: its plug-in {entry.value} does not load: {error}") from error
    if not isinstance(part, kind):
        raise BadEnvironment(
            f"{what}: its plug-in {entry.value} is no {kind.__module__}.{kind.__qualname__}"
        )
    return part


def load_class(entry: EntryPoint, what: str, base: type[Kind]) -> type[Kind]:
    """Return the class that an entry point names, a subclass of `base`.

    Raises:
        BadEnvironment: it does not load, or is something else.
    """
    kind = load(entry, what, type)
    if not issubclass(kind, base):
        raise BadEnvironment(
            f"{what}: its plug-in {entry.value} is no subclass of"
            f" {base.__module__}.{base.__qualname__}"
        )
    return kind
