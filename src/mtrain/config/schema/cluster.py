"""`cluster`: the machines of a run, as facts."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.engine.formats import Format
from mtrain.config.schema.base import Degree, Effect, Key, PositiveFloat, PositiveInt, Section

DEVICE_NAME = r"^[A-Za-z0-9][A-Za-z0-9 _./()+-]*$"
Reached = Literal["products", "memory", "attention", "speed", "host"]


class ClusterConfig(Section):
    """`cluster`: the machines, as facts, without choices of layout."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]*$", max_length=100)] = "local"
    """Name used in reports."""
    device: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$"), Key(effect=Effect.PARALLELISM)] = (
        "auto"
    )
    """cpu, cuda, or a device of an installed plug-in; auto: cuda if there are enough GPUs for the
    layout, else cpu.
    """
    nodes: Annotated[Degree, Key(aka="num_nodes nnodes")] = 1
    """The number of machines."""
    devices_per_node: Annotated[Degree | None, Key(aka="gpus_per_node nproc_per_node")] = None
    """Accelerators per machine; null: those of this machine, and on a CPU as many processes as the
    layout needs.
    """
    driver_names: Annotated[
        tuple[Annotated[str, Field(pattern=DEVICE_NAME, max_length=100)], ...],
        Key(aka="device_name gpu_name gpu_type"),
    ] = Field(default=(), strict=False)
    """Names of this device, as `nvidia-smi -L` prints them. `cluster=local` takes the facts of the
    file that lists the name of the local GPU. Empty: this file describes no GPU by name.
    """
    sm: Annotated[Annotated[int, Field(ge=10, le=199)] | None, Key(aka="compute_capability")] = None
    """The generation of an NVIDIA device: its compute capability without the dot, 80 for A100, 90
    for H100, 100 for B200; null: what the driver reports with `cluster=local`, else unknown.
    """
    device_memory_gib: Annotated[PositiveFloat | None, Key(unit="GiB")] = None
    """The memory of one device; null: what the driver reports with `cluster=local`, else
    unknown.
    """
    memory_gbps: Annotated[PositiveFloat | None, Key(unit="GB/s")] = None
    """Bandwidth of that memory in GB/s; null: unknown."""
    power_watts: Annotated[PositiveFloat | None, Key(unit="W")] = None
    """The power limit of one device in W, which keeps large GEMMs below the peak; null: unknown."""
    peak_tflops: Annotated[dict[Format, PositiveFloat], Key(unit="TFLOP/s")] = {}
    """The dense peak of one device in TFLOP/s by format; empty: mtrain shows no MFU."""
    fast_link_gbps: Annotated[PositiveFloat | None, Key(unit="GB/s")] = None
    """The one-way bandwidth between devices of a fast domain (NVLink, else PCIe) in GB/s; null:
    unknown.
    """
    fast_link_devices: PositiveInt | None = None
    """The number of devices of a fast domain: those of a machine, or of a rack; null: unknown."""
    network_gbitps: Annotated[PositiveFloat | None, Key(unit="Gbit/s")] = None
    """The one-way bandwidth of one device's share of the network between fast domains in Gbit/s;
    null: unknown.
    """
    storage_gbps: Annotated[PositiveFloat | None, Key(unit="GB/s")] = None
    """The rate at which all ranks together write a checkpoint in GB/s; null: unknown."""
    price_per_device_hour: PositiveFloat | None = None
    """The price of an hour of one device, in any currency; null: unknown."""
    host_link_gbps: Annotated[PositiveFloat | None, Key(unit="GB/s")] = None
    """The one-way bandwidth between one device and host memory in GB/s; null: unknown."""
    operation_us: Annotated[PositiveFloat | None, Key(unit="us")] = None
    """The host's overhead per operation in microseconds, on a GPU per launch of a kernel, in
    addition to arithmetic and memory traffic; null: as in mtrain's own runs.
    """
    link_latency_us: Annotated[PositiveFloat | None, Key(unit="us")] = None
    """The latency of a collective in microseconds for each doubling of its group; null: as in
    published runs.
    """
    reached: dict[Reached, Annotated[float, Field(gt=0, le=10)]] = {}
    """Measured shares of the rates above: `products`, of the peak that a large 16-bit GEMM reaches;
    `memory`, of the bandwidth; `attention`, of the peak that attention's GEMMs reach; `speed`, of
    the device in a step against what these predict; `host`, of the host that launches kernels
    against the one that mtrain was measured on. Empty: as in published runs and mtrain's own.
    """
    software: Annotated[str | None, Field(max_length=200)] = None
    """Releases of the software that rates were measured with; null: the rates come from data
    sheets.
    """
