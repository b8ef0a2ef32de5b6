"""Tiles measured to be fastest on a device: a file for each device, which the tuner writes and all
read.

A kernel that has a table of variants asks `recorded` for the one to take. Nothing is measured while
a model trains: `python -m mtrain_kernels.tune` measures, and writes the file. So a run takes the
same variants in every step, and all its ranks do if they `use` what one of them read.
`torch.use_deterministic_algorithms` turns the record off.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

Record = Mapping[str, Mapping[str, str]]
"""Kernel -> class of shapes -> the name of its variant."""

FOLDER = "MTRAIN_KERNELS_CACHE"
_used: Record = {}


def use(record: Record) -> None:
    """Take the variants of a record from now on; of kernels and shapes that it does not have, the
    first ones.
    """
    global _used
    _used = {kernel: dict(shapes) for kernel, shapes in record.items()}


def recorded(kernel: str, shapes: str) -> str | None:
    """Return the variant to take for a class of shapes; None: nothing was measured, or everything
    has to be repeatable.
    """
    if torch.are_deterministic_algorithms_enabled():
        return None
    return _used.get(kernel, {}).get(shapes)


def file_of(device: torch.device) -> Path:
    """Return the file of measurements of a device with the installed Triton; `MTRAIN_KERNELS_CACHE`
    names another folder.
    """
    name = (
        torch.get_device_module(device).get_device_name(device) if device.type != "cpu" else "cpu"
    )
    return file_named(name)


def file_named(name: str) -> Path:
    """Return the file of measurements of devices that the driver calls `name`."""
    import triton

    folder = Path(os.environ.get(FOLDER) or Path.home() / ".cache" / "mtrain" / "kernels")
    plain = "".join(c if c.isalnum() else "-" for c in name)
    return folder / f"{plain}-triton-{triton.__version__}.json"


def read(path: Path) -> Record:
    """Read a file of measurements; empty if the file does not exist.

    Raises `ValueError` where it is no such file.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    inner = list(found.values()) if isinstance(found, dict) else [None]
    if not all(
        isinstance(shapes, dict) and all(isinstance(v, str) for v in shapes.values())
        for shapes in inner
    ):
        raise ValueError(f"{path} does not map kernels to shapes to variants")
    return found  # type: ignore[no-any-return]


def add(path: Path, kernel: str, shapes: str, variant: str) -> None:
    """Note a measurement in a file; readers see the file before or after, never half of it."""
    known = {name: dict(found) for name, found in read(path).items()}
    known.setdefault(kernel, {})[shapes] = variant
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic only within one file system.
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
        json.dump(known, file, indent=1, sort_keys=True)
    # only its maker can read a temporary file, and a folder may be for all
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def fastest(times: Mapping[str, float], margin: float = 0.03) -> str:
    """Return the variant that takes the least time, or one before it that is less than `margin`
    slower.
    """
    least = min(times.values())
    return next(name for name, time in times.items() if time <= least * (1 + margin))
