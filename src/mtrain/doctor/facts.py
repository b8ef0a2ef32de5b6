"""The facts of a machine that the checks read. Tests make them up; `gather` measures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtrain.config.engine.release import Release
from mtrain.config.machine.nvml_health import Health
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.launching.limits import INTERFACES, Limits


@dataclass(frozen=True)
class Software:
    """Releases of the installed software; None: not installed."""

    python: Release
    torch: str | None
    megatron_core: Release | None
    triton: str | None = None
    transformer_engine: str | None = None
    cuda: str | None = None
    """The CUDA that torch was built for, such as 13.0; empty: none."""
    nccl: Mapping[str, str] = field(default_factory=dict)
    """Package -> version of NCCL; empty: that of torch itself."""
    cuda_library: bool = True
    """True if the loader finds the driver's library, libcuda."""
    nvml: bool = True
    """True if the driver's management library answers."""


@dataclass(frozen=True)
class Disk:
    """A folder that a run writes to, measured in the nearest folder above it that exists."""

    key: str
    """The key that names it."""
    folder: str
    filesystem: str = ""
    """The type, as /proc/mounts names it; empty: unknown."""
    free_bytes: int | None = None
    free_files: int | None = None
    """Inodes; None: this file system does not count them."""
    write_bytes_per_s: float | None = None
    """The rate of one stream of random bytes with an fsync at its end."""
    fsync_s: float | None = None
    """The median time of an fsync after 4 KiB."""
    skew_s: float | None = None
    """The clock of the file system less that of this machine."""
    error: str = ""
    """The fault of a write or of the probe; empty: none."""


@dataclass(frozen=True)
class Rates:
    """Rates that were measured here."""

    device: str
    """The name of the device: that of one GPU, or of the processor."""
    gemm_flop_per_s: tuple[float, ...] = ()
    """One rate per device: of a large bf16 product; on a CPU one rate of numpy's fp32 product."""
    copy_bytes_per_s: tuple[float, ...] = ()
    """One rate per device: bytes read and written."""
    all_reduce_bytes_per_s: float | None = None
    """The bus bandwidth among the devices of this machine; None: fewer than two."""
    error: str = ""
    """The reason for missing rates; empty: none is missing."""


@dataclass(frozen=True)
class Clock:
    """The clock of this machine, as its kernel describes it."""

    synchronised: bool | None = None
    """None: the kernel does not say."""
    most_error_s: float | None = None
    """The kernel's bound of the error, where the clock is synchronised."""


@dataclass(frozen=True)
class Facts:
    """Everything that the checks read."""

    run: RunConfig
    machine: Machine
    environment: Mapping[str, str]
    software: Software
    limits: Limits
    disks: tuple[Disk, ...]
    rates: Rates
    clock: Clock = Clock()
    locked_bytes: int | None = None
    """The bytes that a process may lock in memory (ulimit -l); None: no limit."""
    shared_bytes: int | None = None
    """The size of /dev/shm; None: there is none."""
    shared_free_bytes: int | None = None
    health: Health | None = None
    """The state of the GPUs; None: the driver's library does not answer."""
    container: str = ""
    """The kind of container; empty: none is seen."""
    adapters: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters, as /sys/class/infiniband names them."""
    interfaces: Path = INTERFACES

    @property
    def ranks_here(self) -> int:
        """Return the devices that the cluster states for one machine, or the ranks of a CPU run."""
        cluster = self.run.cluster
        return cluster.devices_per_node or self.machine.gpus or self.run.parallel.ranks
