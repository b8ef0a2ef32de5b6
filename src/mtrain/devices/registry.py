"""The registry of devices by name: the two that ship, then the plug-ins that are installed."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import cast

from mtrain.config.machine import installed
from mtrain.config.machine.devices import AUTO, CPU, CUDA, GROUP, names
from mtrain.devices.base import Device
from mtrain.errors import BadEnvironment, ConfigError, Problem

# Names rather than devices: a device's module imports torch, and does so when it is chosen.
_SHIPPED = {CPU.name: ("mtrain.devices.cpu", "CPU"), CUDA.name: ("mtrain.devices.cuda", "CUDA")}


def get(name: str) -> Device:
    """Return the device called `name`; `auto` is cuda where a GPU can be used and cpu elsewhere.

    Raises:
        ConfigError: there is no device of this name.
        BadEnvironment: the device cannot be used here, or a plug-in does not load.
    """
    if name == AUTO:
        # Plug-ins are chosen by name only: `auto` does not depend on other packages.
        cuda = _load(CUDA.name)
        return cuda if cuda.available() is None else _load(CPU.name)
    device = _load(name)
    reason = device.available()
    if reason is not None:
        raise BadEnvironment(
            f"cluster.device={name}: cannot be used on this machine because {reason}"
        )
    return device


def _load(name: str) -> Device:
    if name in _SHIPPED:
        module, attribute = _SHIPPED[name]
        return cast(Device, getattr(import_module(module), attribute))
    entry = installed.found(GROUP).get(name)
    if entry is None:
        raise ConfigError([_unknown(name)])
    return installed.load(entry, f"device {name!r}", Device)


def _unknown(name: str) -> Problem:
    known = names()
    similar = difflib.get_close_matches(name, known, n=3)
    hint = f"near: {', '.join(similar)}; " if similar else ""
    return Problem(
        code="MT040",
        path="cluster.device",
        value=name,
        detail=f"no such device; {hint}all: auto, {', '.join(known)}",
        fix=f"cluster.device={similar[0] if similar else 'auto'}",
    )
