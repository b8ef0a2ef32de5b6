"""The GPUs that CUDA shows a process: CUDA_VISIBLE_DEVICES as CUDA reads it, the mistakes that
CUDA ignores silently, and the cluster file that describes a GPU.

The list ends at the first entry that names no GPU, and a repeated entry hides every GPU. Of a
partitioned GPU (MIG), CUDA shows a process one instance, and then no other device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mtrain.config.compose import yaml_reader
from mtrain.config.compose.paths import display, find_config, folders
from mtrain.config.machine.nvml import Driver, Gpu
from mtrain.config.schema.cluster import ClusterConfig
from mtrain.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
# First entries by which users, schedulers and container runtimes hide every GPU on purpose.
NONE = ("", "-1", "none", "void", "NoDevFiles")


@dataclass(frozen=True)
class Seen:
    """The GPUs that CUDA shows a process."""

    count: int = 0
    gpus: tuple[Gpu, ...] = ()
    """GPUs as the driver describes them; empty if its library does not answer."""
    fault: str = ""
    """A sentence about the GPUs that the variable hides, and why; empty: it hides none."""
    fix: str = ""
    """The value to set instead, in words."""
    on_purpose: bool = True
    """True if the variable hides GPUs on purpose."""
    driver: Driver | None = None

    @property
    def kind(self) -> Gpu | None:
        """Return one of the GPUs if all have the same name, else None."""
        return self.gpus[0] if len({gpu.name for gpu in self.gpus}) == 1 else None


def shown(gpus: Sequence[Gpu], visible: str | None) -> Seen:
    """Return the GPUs of a driver that CUDA shows; `visible` is the variable, None if unset."""
    if visible is None:
        known = [gpu for gpu in map(_device, gpus) if gpu is not None]
        return _seen(known, "", "", True)
    places, fault, on_purpose = _listed(visible, _Named(gpus))
    found = [device for place in places if (device := _device_at(gpus, place)) is not None]
    return _seen(found, fault, _fix(range(len(gpus))) if fault else "", on_purpose)


def counted(gpus: int, visible: str | None) -> Seen:
    """Count the GPUs that CUDA shows of `gpus` with unknown UUIDs: every UUID counts as one."""
    if visible is None:
        return Seen(gpus)
    places, fault, on_purpose = _listed(visible, _Named([Gpu("")] * gpus, anonymous=True))
    return Seen(min(gpus, len(places)), (), fault, _fix(range(gpus)) if fault else "", on_purpose)


def _seen(found: Sequence[Gpu], fault: str, fix: str, on_purpose: bool) -> Seen:
    """Return the GPUs as `Seen`; of instances of partitioned GPUs CUDA shows only the first."""
    instance = next((gpu for gpu in found if gpu.uuid.startswith("MIG-")), None)
    gpus = tuple(found) if instance is None else (instance,)
    if len(gpus) < len(found) and not fault:
        others = (
            f"of {len(found)} GPUs and instances, CUDA shows a process one instance of a"
            " partitioned GPU (MIG)"
        )
        return Seen(len(gpus), gpus, others, "one rank, or GPUs that are not partitioned", True)
    return Seen(len(gpus), gpus, fault, fix, on_purpose)


def _device(gpu: Gpu) -> Gpu | None:
    """Return the device that CUDA shows for a GPU: itself, or the first instance of a partition."""
    if not gpu.partitioned:
        return gpu
    return gpu.instances[0] if gpu.instances else None


# A GPU, and one of its instances; -1: the GPU itself.
Place = tuple[int, int]


def _device_at(gpus: Sequence[Gpu], place: Place) -> Gpu | None:
    gpu, instance = place
    return _device(gpus[gpu]) if instance < 0 else gpus[gpu].instances[instance]


class _Named:
    """The places that entries of the variable name."""

    def __init__(self, gpus: Sequence[Gpu], *, anonymous: bool = False) -> None:
        self.gpus = gpus
        self.anonymous = anonymous
        self.unknown: list[str] = []

    def place(self, entry: str) -> Place | None:
        """Return the place that a number, a UUID or an unambiguous beginning names; else None."""
        # CUDA reads the digits at the start of an entry and ignores the rest.
        number = re.match(r"\+?\d+", entry)
        if number:
            index = int(number[0])
            return (index, -1) if index < len(self.gpus) else None
        if not entry.startswith(("GPU-", "MIG-")):
            return None
        # Without the driver UUIDs are not known; each new one counts as another GPU.
        if self.anonymous:
            self.unknown = [*self.unknown, entry] if entry not in self.unknown else self.unknown
            return (self.unknown.index(entry), 0)
        found = [(i, -1) for i, gpu in enumerate(self.gpus) if gpu.uuid.startswith(entry)]
        inner = [(i, j) for i, gpu in enumerate(self.gpus) for j, one in enumerate(gpu.instances)]
        found += [(i, j) for i, j in inner if self.gpus[i].instances[j].uuid.startswith(entry)]
        return found[0] if len(found) == 1 else None


def _listed(text: str, named: _Named) -> tuple[list[Place], str, bool]:
    """Return the listed places, the variable's mistake, and whether it hides GPUs on purpose."""
    places: list[Place] = []
    entries = [entry.strip() for entry in text.split(",")]
    written = f"{VARIABLE}={text}"
    if entries[0] in NONE:
        said = f"{VARIABLE} is empty" if not text.strip() else f"{written} begins with no GPU"
        return [], f"{said}: every GPU is hidden" if named.gpus else "", True
    for entry in entries:
        place = named.place(entry)
        if place in places:
            fault = f"{written} names {entry} twice, and CUDA then shows no GPU"
            return [], fault if named.gpus else "", False
        if place is None:
            which = (
                f"{entry or 'an empty entry'} is no GPU of this machine, which has"
                f" {_have(named.gpus)}"
            )
            fault = f"{written}: {which}: the list ends there"
            return places, fault if named.gpus else "", False
        places.append(place)
    return places, "", True


def _have(gpus: Sequence[Gpu]) -> str:
    if len(gpus) == 1:
        return "number 0"
    return f"numbers 0 to {len(gpus) - 1}"


def _fix(numbers: range) -> str:
    """Return the advice that makes the variable show every GPU."""
    return f"unset {VARIABLE}, or list each GPU once: {VARIABLE}={','.join(map(str, numbers))}"


GROUP = "cluster"
# The longest chain of files, each of which names the next in its `defaults`.
MOST_BASES = 8


@dataclass(frozen=True)
class Known:
    """A kind of GPU, and the file that describes it."""

    cluster: ClusterConfig
    source: str
    """The file, as problems name it."""


def known(name: str) -> Known | None:
    """Return the description of a GPU by name from the first folder with one, or None."""
    return _known(name, tuple(folders()))


@cache
def _known(name: str, places: tuple[Path, ...]) -> Known | None:
    for file in _files(places):
        with suppress(
            ConfigError, OSError, ValueError
        ):  # a faulty file is reported to whoever chooses it
            # Reading is faster than parsing, and most files are of other GPUs.
            if name not in file.read_text(encoding="utf-8"):
                continue
            values = yaml_reader.load(file).values
            if name in values.get("driver_names", ()):
                whole = _with_bases(values, MOST_BASES)
                return Known(ClusterConfig.model_validate(whole), display(file))
    return None


def _files(places: tuple[Path, ...]) -> Iterator[Path]:
    for folder in places:
        yield from sorted((folder / GROUP).rglob("*.yaml"))


def _with_bases(values: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the values of a file, over those of the files that its `defaults` name."""
    whole: dict[str, Any] = {}
    for base in values.get("defaults", ()):
        file = (
            find_config(f"{GROUP}/{base}") if isinstance(base, str) and base != "_self_" else None
        )
        if file is not None and most:
            whole |= _with_bases(yaml_reader.load(file).values, most - 1)
    return whole | {key: value for key, value in values.items() if key != "defaults"}
