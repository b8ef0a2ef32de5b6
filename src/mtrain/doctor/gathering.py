"""The facts of this machine, measured within time limits."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import user_path
from mtrain.config.engine import release
from mtrain.config.machine import hardware
from mtrain.config.machine.devices import facts_of
from mtrain.config.machine.installed import version_of
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.doctor.facts import Clock, Disk, Facts, Rates, Software
from mtrain.doctor.probes.gpu_state import parsed
from mtrain.doctor.probing import probe
from mtrain.launching.environment import filesystem_of
from mtrain.launching.limits import Limits
from mtrain.launching.matmul import processor

DISK_LIMIT_S = 20.0
HOST_LIMIT_S = 20.0
STATE_LIMIT_S = 20.0
DEVICE_LIMIT_S = 180.0
SHARED = "dev/shm"
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
FOLDERS = (("log", "runs_dir"), ("checkpoint", "local_dir"))
"""Sections and keys of folders that a run writes to; a key that is null or missing is skipped."""
# Of `struct timex` on 64-bit Linux: its size with room to spare, and the places of two fields.
TIMEX_BYTES = 512
MOST_ERROR_AT = 24
STATUS_AT = 40
UNSYNCHRONISED = 0x40


def gather(run: RunConfig, environment: Mapping[str, str], machine: Machine) -> Facts:
    """Measure this machine for a resolved `run`; takes about two seconds without a GPU."""
    disks = tuple(_disk(f"{s}.{k}", folder) for s, k, folder in _folders(run))
    rates = _rates(run, machine)
    # after the rates, when the devices have just worked
    health = parsed(probe("gpu_state", limit_s=STATE_LIMIT_S)) if machine.nvidia.driver else None
    size, free = shared_memory()
    return Facts(
        run=run,
        machine=machine,
        environment=environment,
        software=_software(machine),
        limits=_limits(),
        disks=disks,
        rates=rates,
        clock=clock(),
        locked_bytes=_locked(),
        shared_bytes=size,
        shared_free_bytes=free,
        health=health,
        container=container(environment),
        adapters=adapters(),
    )


def _folders(run: RunConfig) -> list[tuple[str, str, Path]]:
    found = []
    for section, key in FOLDERS:
        value = getattr(getattr(run, section), key, None)
        if value is not None:
            found.append((section, key, user_path(value).absolute()))
    return found


def _disk(key: str, folder: Path) -> Disk:
    found = probe("disk", str(folder), limit_s=DISK_LIMIT_S)
    place = Path(found.pop("place", folder))
    return replace(Disk(key, str(place), filesystem_of(place)), **found)


def _rates(run: RunConfig, machine: Machine) -> Rates:
    facts = facts_of(run.cluster.device)
    if facts.on_host:
        return _of(processor(), probe("host", limit_s=HOST_LIMIT_S))
    name = machine.nvidia.kind.name if machine.nvidia.kind else run.cluster.device
    if facts.counted and not machine.gpus:
        return Rates(name)
    count = str(machine.gpus or 1)
    return _of(name, probe("device", facts.name, count, limit_s=DEVICE_LIMIT_S))


def _of(device: str, found: dict[str, Any]) -> Rates:
    return Rates(
        device,
        tuple(found.get("gemm_flop_per_s", ())),
        tuple(found.get("copy_bytes_per_s", ())),
        found.get("all_reduce_bytes_per_s"),
        found.get("error") or found.get("all_reduce_error", ""),
    )


def _software(machine: Machine) -> Software:
    nccl = {name: version for name in NCCL if (version := _version(name)) is not None}
    return Software(
        python=sys.version_info[:3],
        torch=_version("torch"),
        megatron_core=release.release(),
        triton=_version("triton"),
        transformer_engine=_version("transformer_engine"),
        cuda=hardware.cuda_of_torch(),
        nccl=nccl,
        cuda_library=not machine.nvidia.count or _loads("libcuda.so.1"),
        nvml=not machine.nvidia.count or machine.nvidia.driver is not None,
    )


def _version(package: str) -> str | None:
    try:
        return version_of(package)
    except (metadata.PackageNotFoundError, ValueError):  # metadata that is damaged
        return None


def _loads(library: str) -> bool:
    # Loading it calls no function of it, so no context is created.
    for name in (library, f"/usr/lib/wsl/lib/{library}"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def _limits() -> Limits:
    limits = Limits.here()
    # The kernel does not apply this limit to root.
    return limits if os.geteuid() else replace(limits, processes=None)


def _locked() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def shared_memory(root: Path = hardware.ROOT) -> tuple[int | None, int | None]:
    """Return the bytes of /dev/shm and those that are free; None: there is none."""
    try:
        room = os.statvfs(root / SHARED)
    except OSError:
        return None, None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def clock() -> Clock:
    """Return the state of this machine's clock, which the kernel may not tell."""
    state = ctypes.create_string_buffer(TIMEX_BYTES)
    try:
        status = ctypes.CDLL(None).adjtimex(state)  # with its mode 0 this only reads
    except (OSError, AttributeError):
        return Clock()
    if status < 0:
        return Clock()
    if ctypes.c_int.from_buffer(state, STATUS_AT).value & UNSYNCHRONISED:
        return Clock(False)
    return Clock(True, ctypes.c_long.from_buffer(state, MOST_ERROR_AT).value / 1e6)


def container(environment: Mapping[str, str], root: Path = hardware.ROOT) -> str:
    """Return the kind of container that this process is in; empty: none is seen."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if environment.get(name):
            return "apptainer"
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    try:
        groups = (root / "proc/1/cgroup").read_text(errors="replace")
    except OSError:
        return ""
    kinds = ("docker", "kubepods", "containerd", "lxc", "enroot")
    return next((kind for kind in kinds if kind in groups), "")


def adapters(root: Path = hardware.ROOT) -> tuple[str, ...]:
    """Return the names of InfiniBand and RoCE adapters."""
    folder = root / "sys/class/infiniband"
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()
