"""Sinks that `log.sinks` enables by name: every module of this package, as its class `SINK`, and
those that other packages publish under the entry point group `mtrain.sinks`.

A module imports its library only in `open`, so mtrain needs none of them.
"""

from __future__ import annotations

from importlib import import_module

from mtrain.config.machine import installed
from mtrain.events.sink import Sink


def sink_class(name: str) -> type[Sink]:
    """Return the class of a sink.

    Raises:
        BadEnvironment: a plug-in does not load, or is no subclass of `Sink`.
    """
    if name in installed.shipped(__name__):
        kind: type[Sink] = import_module(f"{__name__}.{name}").SINK
        return kind
    return installed.load_class(installed.found(installed.SINKS)[name], f"sink {name!r}", Sink)
