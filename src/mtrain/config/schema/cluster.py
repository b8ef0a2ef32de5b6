"""`cluster`: the machines a run is for, as facts."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.engine.formats import Format
from mtrain.config.schema.base import Degree, Effect, Key, PositiveFloat, PositiveInt, Section

DEVICE_NAME = r"^[A-Za-z0-9][A-Za-z0-9 _./()+-]*$"
Reached = Literal["products", "memory", "attention", "speed"]


class ClusterConfig(Section):
    """`cluster`: the machines. Facts, not choices of layout."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]*$", max_length=100)] = "local"
    """Name used in reports."""
    device: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$"), Key(effect=Effect.PARALLELISM)] = (
        "auto"
    )
    """cpu, cuda, or a device that an installed plug-in provides; auto: cuda where there are GPUs
    enough for the layout, else cpu.
    """
    nodes: Annotated[Degree, Key(aka="num_nodes nnodes")] = 1
    """Machines."""
    devices_per_node: Annotated[Degree | None, Key(aka="gpus_per_node nproc_per_node")] = None
    """Accelerators per machine; null: those of this machine, and on a CPU as many processes as the
    layout needs.
    """
    driver_names: Annotated[
        tuple[Annotated[str, Field(pattern=DEVICE_NAME, max_length=100)], ...],
        Key(aka="device_name gpu_name gpu_type"),
    ] = Field(default=(), strict=False)
    """Names that the driver gives this device, as `nvidia-smi -L` prints them.

    `cluster=local` takes the figures of the file that lists the name of the GPU here. Empty: no GPU
    is recognised by this file.
    """
    sm: Annotated[Annotated[int, Field(ge=10, le=199)] | None, Key(aka="compute_capability")] = None
    """Generation of an NVIDIA device: its compute capability without the dot, 80 for A100, 90 for
    H100, 100 for B200; null: with `cluster=local` what the driver says, else unknown.
    """
    device_memory_gib: Annotated[PositiveFloat | None, Key(unit="GiB")] = None
    """Memory of one device; null: with `cluster=local` what the driver says, else unknown."""
    memory_gbps: Annotated[PositiveFloat | None, Key(unit="GB/s")] = None
    """Bandwidth of that memory in GB/s; null: unknown."""
    power_watts: Annotated[PositiveFloat | None, Key(unit="W")] = None
    """Power that one device may draw in W: what keeps it from its peak in large products; null:
    unknown.
    """
    peak_tflops: Annotated[dict[Format, PositiveFloat], Key(unit="TFLOP/s")] = {}
    """Dense peak of one device in TFLOP/s by format; empty: no MFU is shown."""
    fast_link_gbps: Annotated[PositiveFloat | None, Key(unit="GB/s")] = None
    """Bandwidth of a device to those of its fast domain (NVLink, or PCIe where there is none) in
    GB/s and one direction; null: unknown.
    """
    fast_link_devices: PositiveInt | None = None
    """Devices that the fast links join: a machine, or a rack of them; null: unknown."""
    network_gbitps: Annotated[PositiveFloat | None, Key(unit="Gbit/s")] = None
    """Bandwidth of one device's share of the network between fast domains in Gbit/s and one
    direction; null: unknown.
    """
    storage_gbps: Annotated[PositiveFloat | None, Key(unit="GB/s")] = None
    """Rate at which all ranks together write a checkpoint in GB/s; null: unknown."""
    price_per_device_hour: PositiveFloat | None = None
    """What an hour of one device costs, in any currency; null: unknown."""
    host_link_gbps: Annotated[PositiveFloat | None, Key(unit="GB/s")] = None
    """Bandwidth of one device to host memory in GB/s and one direction; null: unknown."""
    operation_us: Annotated[PositiveFloat | None, Key(unit="us")] = None
    """What the host takes for an operation in microseconds, beside the arithmetic and the traffic
    of it; null: as in published runs.
    """
    link_latency_us: Annotated[PositiveFloat | None, Key(unit="us")] = None
    """What a collective takes in microseconds, however little is sent, for each time that a group
    is doubled; null: as in published runs.
    """
    reached: dict[Reached, Annotated[float, Field(gt=0, le=10)]] = {}
    """What was measured of the rates above: `products`, the share of the peak that a large product
    in 16 bits has; `memory`, that of the bandwidth; `attention`, that of the peak by the products
    of attention; `speed`, how fast a step is against what these say. Empty: as in published runs.
    """
    software: Annotated[str | None, Field(max_length=200)] = None
    """Releases that measured rates belong to; null: the rates are those of data sheets."""
