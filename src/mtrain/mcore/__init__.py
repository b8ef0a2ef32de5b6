"""The adapter to megatron.core: install it once per process, then import `mtrain.mcore.api`.

Nothing else in mtrain imports megatron. Installing adapts megatron-core to the device while it
loads (not on CUDA), imports it and applies the patches of `mtrain.mcore.patches.apply`.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterable

from mtrain.config.engine import release as engine
from mtrain.devices.base import Device
from mtrain.errors import BadEnvironment
from mtrain.mcore.adapter.installed import NotInstalled, installed
from mtrain.mcore.adapter.installed import require_installed as require_installed

_EXPECTED_WARNINGS = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r".*pynvml package is deprecated",
    r"absl\.logging is not installed",
)


_OF_THE_ENGINE = r"(.*[/\\])?megatron[./\\]core\b"
"""Its modules, as warnings name them: by a dotted name, or by the path of compiled code."""
_KNOWN_WARNINGS = (
    # A module of this config is loaded with every optimizer of 0.19.2.
    (r"MimoModelConfig is experimental", UserWarning),
    # megatron-core 0.16.1 calls functions that torch 2.13 deprecates, and advises on the order of
    # streams on devices without any.
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    (
        (
            r"When using (async grad allreduce|sequence parallelism) it is recommended to set the"
            r" environment"
        ),
        UserWarning,
    ),
    (r"The \.grad attribute of a Tensor that is not a leaf", UserWarning),
    # FSDP2 warns of an embedding, which nobody changes in place; megatron-core's FSDP warns of a
    # gather that the forward did not need.
    (r"FSDP2-wrapped module .* returned a view tensor", UserWarning),
    (r"There are still pending all-gather tasks", UserWarning),
)


def install(device: Device, *, without: Iterable[str] = ()) -> None:
    """Import megatron.core for `device` with every patch but those named in `without` (which is for
    tests).

    A second call with the same arguments does nothing. Raises `BadEnvironment` where the installed
    megatron-core is not supported, `NotInstalled` where megatron.core was already imported without
    the adapter, `RuntimeError` where the adapter is installed for another device or with other
    patches.
    """
    left_out = frozenset(without)
    if installed.without is not None:
        if device is not installed.device or left_out != installed.without:
            raise RuntimeError(
                "the megatron adapter is already installed, for another device or with other"
                " patches"
            )
        return
    # Python warns when it compiles a module for the first time, here or at a later import. 0.19.2
    # has such a module, and a user cannot change it.
    warnings.filterwarnings("ignore", message="invalid escape sequence", module=_OF_THE_ENGINE)
    with warnings.catch_warnings():
        for message in _EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        warnings.filterwarnings("ignore", category=UserWarning, module=_OF_THE_ENGINE)
        import_core(device)
        importlib.import_module("mtrain.mcore.patches.apply").apply_patches(device, left_out)
        installed.without = left_out
        importlib.import_module("mtrain.mcore.api")
    # Since 0.19 every rank of every run would log this; no key of mtrain selects the successor yet.
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
        lambda record: not record.getMessage().startswith("GPTModel IS DEPRECATED")
    )
    for known, kind in _KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=known, category=kind)


def import_core(device: Device) -> None:
    """Import megatron.core adapted to `device`, with no patch applied: the first half of `install`.

    A process that forks ranks with different patches calls this once. Raises as `install` does.
    """
    if installed.imported:
        if device is not installed.device:
            raise RuntimeError("megatron.core is already imported for another device")
        return
    if device.adapts_megatron:
        _require_unloaded(device)
    _require_version()
    if device.adapts_megatron:
        _adapt(device)
    # `megatron.core` gives the decorator its name; modules that are imported later use that.
    fusers = importlib.import_module("mtrain.mcore.adapter.fusers")
    with fusers.compiled_when_called(ever=not device.adapts_megatron):
        importlib.import_module("megatron.core")
    installed.device = device
    installed.imported = True


def rewrites() -> dict[str, dict[str, int]]:
    """Count the rewrites of each kind in each module imported so far; empty on CUDA."""
    return importlib.import_module("mtrain.mcore.adapter.hook").rewrites()


def _require_version() -> None:
    found = engine.release()
    wants = f"mtrain adapts, patches and was checked against {engine.supported_words()}"
    if engine.folder() is None:
        raise BadEnvironment(f"megatron-core is not installed; {wants}")
    if found is None or not engine.is_supported(found):
        said = "of no known release" if found is None else engine.words(found)
        raise BadEnvironment(
            f"the megatron-core that Python finds, in {engine.folder()}, is {said}; {wants} only"
        )


def _require_unloaded(device: Device) -> None:
    loaded = sorted(
        m for m in list(sys.modules) if m == "megatron.core" or m.startswith("megatron.core.")
    )
    if loaded:
        raise NotInstalled(
            f"{loaded[0]} was imported before mtrain.mcore.install({device.name}) and is bound to"
            " CUDA now; import megatron.core only through mtrain.mcore.api"
        )


def _adapt(device: Device) -> None:
    importlib.import_module("mtrain.mcore.adapter.hook").install(device)
    import torch

    # jit_fuser compiles some thirty small functions at their first call, which takes five seconds
    # and gains nothing on a CPU.
    torch.compiler.set_stance("force_eager")
