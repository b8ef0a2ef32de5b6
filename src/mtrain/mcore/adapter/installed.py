"""The state of the adapter in this process: its device and its patches."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.devices.base import Device


class NotInstalled(RuntimeError):
    """megatron.core was imported before `install`, or in a form that cannot be adapted."""


@dataclass(slots=True)
class Installed:
    """The device that megatron.core was adapted to, its import, and the omitted patches."""

    device: Device | None = None
    imported: bool = False
    # None until every patch is applied: `import_core` may have run by itself.
    without: frozenset[str] | None = None


installed = Installed()


def require_installed() -> Device:
    """Return the device that the adapter was installed for; raises `NotInstalled` without one."""
    if installed.device is None or installed.without is None:
        raise NotInstalled(
            "megatron.core cannot be used yet: call mtrain.mcore.install(device) first, before"
            " anything imports megatron.core or mtrain.mcore.api"
        )
    return installed.device
