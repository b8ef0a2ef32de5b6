"""`cluster`: the machines a run is for, as facts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mtrain.config.base import Degree, PositiveFloat, PositiveInt, Section
from mtrain.config.formats import Format


class ClusterConfig(Section):
    """`cluster`: the machines. Facts, not choices of layout."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.-]*$", max_length=100)] = "local"
    """Name used in reports."""
    device: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] = "auto"
    """cpu, cuda, or a device that an installed plug-in provides; auto: cuda where there are GPUs enough for the
    layout, else cpu."""
    nodes: Degree = 1
    """Machines."""
    devices_per_node: Degree | None = None
    """Accelerators per machine; null: those of this machine, and on a CPU as many processes as the layout needs."""
    sm: Annotated[int, Field(ge=10, le=199)] | None = None
    """Generation of an NVIDIA device: its compute capability without the dot, 80 for A100, 90 for H100, 100 for B200;
    null: unknown."""
    device_memory_gib: PositiveFloat | None = None
    """Memory of one device; null: unknown."""
    memory_gbps: PositiveFloat | None = None
    """Bandwidth of that memory in GB/s; null: unknown."""
    peak_tflops: dict[Format, PositiveFloat] = {}
    """Dense peak of one device in TFLOP/s by format; empty: no MFU is shown."""
    fast_link_gbps: PositiveFloat | None = None
    """Bandwidth of a device to those of its fast domain (NVLink, or PCIe where there is none) in GB/s and one
    direction; null: unknown."""
    fast_link_devices: PositiveInt | None = None
    """Devices that the fast links join: a machine, or a rack of them; null: unknown."""
    network_gbitps: PositiveFloat | None = None
    """Bandwidth of one device's share of the network between fast domains in Gbit/s and one direction; null:
    unknown."""
    host_link_gbps: PositiveFloat | None = None
    """Bandwidth of one device to host memory in GB/s and one direction; null: unknown."""
