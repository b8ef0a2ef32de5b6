"""A measurement of the devices of this machine: a large product, a copy, and with two devices or
more an all-reduce among them.

`python -m mtrain.doctor.probes.device NAME COUNT` measures them; `NAME COUNT RANK FILE` is one
process of the all-reduce, which meets the others through a file.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from mtrain import strict_json
from mtrain.devices import registry
from mtrain.devices.base import Device
from mtrain.errors import say_page

LIMIT_S = 60.0
"""Time of the all-reduce, with the start of its processes."""
WARM = 3
TRIES = 10


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured work."""

    side: int = 8192
    copied: int = 1 << 30
    reduced: int = 256 << 20
    """Bytes of the all-reduce."""


LARGE = Sizes()
SMALL = Sizes(256, 1 << 20, 1 << 20)
"""Sizes for ranks that share the host's cores, where only tests measure."""


def main(words: list[str]) -> None:
    """Print the rates as JSON, or be one process of the all-reduce."""
    device = registry.get(words[0])
    count = int(words[1])
    sizes = LARGE if device.is_indexed else SMALL
    if len(words) > 2:
        reduced(device, sizes, int(words[2]), count, words[3])
        return
    reason = device.available()
    found = {"error": reason} if reason else rates(device, sizes, count)
    say_page(strict_json.dumps(found))


def rates(device: Device, sizes: Sizes, count: int) -> dict[str, Any]:
    """Return the rates of each of `count` devices, and of an all-reduce of two or more."""
    found: dict[str, Any] = {"gemm_flop_per_s": [], "copy_bytes_per_s": []}
    for index in range(count):
        device.set_index(index)
        place = device.device(index)
        a = torch.randn(sizes.side, sizes.side, device=place).to(torch.bfloat16)
        source = torch.zeros(sizes.copied, dtype=torch.uint8, device=place)
        target = torch.zeros_like(source)
        product = seconds(device, partial(torch.matmul, a, a))
        copy = seconds(device, partial(target.copy_, source))
        found["gemm_flop_per_s"].append(2 * sizes.side**3 / product)
        found["copy_bytes_per_s"].append(2 * sizes.copied / copy)
    if count > 1:
        found |= among(device, count)
    return found


def seconds(device: Device, work: Callable[[], object]) -> float:
    """Return the mean seconds of several calls, after some to warm up."""
    for _ in range(WARM):
        work()
    device.synchronize()
    begun = time.perf_counter()
    for _ in range(TRIES):
        work()
    device.synchronize()
    return (time.perf_counter() - begun) / TRIES


def among(device: Device, count: int) -> dict[str, Any]:
    """Return the bus bandwidth of an all-reduce among `count` processes, or its error."""
    with TemporaryDirectory(prefix="mtrain-doctor-") as folder:
        own = [sys.executable, "-P", "-m", "mtrain.doctor.probes.device", device.name, str(count)]
        meeting = str(Path(folder) / "store")
        ranks = [
            subprocess.Popen(
                [*own, str(rank), meeting],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        until = time.monotonic() + LIMIT_S
        try:
            said = [rank.communicate(timeout=max(1.0, until - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            return {"all_reduce_error": f"no all-reduce within {LIMIT_S:.0f} s"}
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, err) in zip(ranks, said, strict=True):
        if rank.returncode:
            last = err.strip().splitlines()[-1:] or [f"ended with {rank.returncode}"]
            return {"all_reduce_error": last[0][:200]}
    return {"all_reduce_bytes_per_s": float(said[0][0])}


def reduced(device: Device, sizes: Sizes, rank: int, world: int, meeting: str) -> None:
    """Be one process of the all-reduce; rank 0 prints the bus bandwidth in bytes/s."""
    device.set_index(rank)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        device.backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=limit,
    )
    data = torch.ones(sizes.reduced // 4, device=device.device(rank))
    taken = seconds(device, lambda: dist.all_reduce(data))
    if rank == 0:
        # A ring moves this share of the bytes over each link, so links compare among any number.
        say_page(str(2 * (world - 1) / world * sizes.reduced / taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
