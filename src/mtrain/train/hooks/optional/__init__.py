"""Hooks that `log.hooks` enables by name: every module of this package, as its class `HOOK`, and
those that other packages publish under the entry point group `mtrain.hooks`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from mtrain.config.machine import installed
from mtrain.config.schema.run import RunConfig
from mtrain.train.hooks.base import Hook


def enabled(run: RunConfig, folder: Path) -> list[Hook]:
    """Return the hooks that `log.hooks` names, in that order.

    Raises:
        BadEnvironment: a plug-in does not load, or is no subclass of `Hook`.
    """
    return [_hook(name, run, folder) for name in run.log.hooks]


def _hook(name: str, run: RunConfig, folder: Path) -> Hook:
    if name in installed.shipped(__name__):
        kind: type[Hook] = import_module(f"{__name__}.{name}").HOOK
    else:
        entry = installed.found(installed.HOOKS)[name]
        kind = installed.load_class(entry, f"hook {name!r}", Hook)
    hook = kind.of(run, folder)
    # The key of its state: two packages may call their classes the same.
    hook.name = name
    return hook
