"""Shortages of this machine's GPUs for a run, as their driver reports them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtrain import units
from mtrain.config.machine import hardware
from mtrain.config.machine.devices import facts_of
from mtrain.config.machine.nvml import Gpu
from mtrain.config.machine.visible import Seen, known
from mtrain.config.resolve.resolution import LOCAL, Machine
from mtrain.config.schema.run import RunConfig
from mtrain.plan.count import state_bytes
from mtrain.plan.fits import over


@dataclass(frozen=True)
class Shortage:
    """A resource that a run needs and this machine lacks, or a warning about one."""

    text: str
    fix: str = ""
    code: str = ""
    warning: bool = False

    def lines(self) -> list[str]:
        """Return the shortage as an item of a list, with its fix on the next line."""
        head = f"[{self.code}] {self.text}" if self.code else self.text
        return [f"  - {head}", *([f"      fix: {self.fix}"] if self.fix else [])]


def shortages(run: RunConfig, machine: Machine, here: int, siblings: bool) -> Iterator[Shortage]:
    """Yield every problem of the GPUs for a run that starts `here` ranks on this machine.

    `siblings`: a launcher has started other ranks next to this process, which may already use their
    GPUs.
    """
    if not facts_of(run.cluster.device).counted:
        return
    seen = machine.nvidia
    missing = machine.gpus < here
    if missing:
        needs = (
            f"needs {here} GPU{'' if here == 1 else 's'} on this machine; here: {number(machine)}"
        )
        yield Shortage(needs, _fewer(run, machine), "MT051")
    if seen.fault:
        yield Shortage(seen.fault, seen.fix, "MT052", warning=seen.on_purpose and not missing)
    yield from _of_software(seen)
    yield from _of_memory(run, seen, here, siblings)
    yield from _of_another_kind(run, seen)


def number(machine: Machine) -> str:
    """Return the number of GPUs in words."""
    if not machine.unusable_gpus:
        return str(machine.gpus)
    return (
        f"{machine.gpus} (and {machine.unusable_gpus} of AMD, which the installed torch is not"
        " built for)"
    )


def described(run: RunConfig, machine: Machine) -> str:
    """Return a line about the GPUs that `cluster=local` found; empty if it found none."""
    seen = machine.nvidia
    if run.cluster.name != LOCAL or not facts_of(run.cluster.device).counted or not seen.count:
        return ""
    if not seen.gpus:
        return (
            f"this machine: {seen.count} NVIDIA GPUs by their device files; libnvidia-ml.so.1, the"
            " driver's library, does not answer, so their kind is not known: no MFU and no planned"
            " time; name it with cluster=NAME"
        )
    if seen.kind is None:
        names = sorted({gpu.name for gpu in seen.gpus})
        return (
            f"this machine: GPUs of several kinds ({', '.join(names)}): no MFU and no planned time;"
            " show those of one kind with CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES"
        )
    sheet = known(seen.kind.name)
    head = (
        f"this machine: {seen.count} x {seen.kind.name},"
        f" {units.bytes_(seen.kind.memory_bytes)}{_driver(seen)}"
    )
    if sheet is not None:
        return f"{head}; peaks and rates of {sheet.source}"
    return (
        f"{head}; no file of conf/cluster has this name, so there is no MFU and no planned time:"
        " write mine/cluster/box.yaml as conf/cluster/h100.yaml is, with the figures of its data"
        f" sheet and `driver_names: [{seen.kind.name}]`, and start with --config-dir mine"
    )


def _driver(seen: Seen) -> str:
    if seen.driver is None:
        return ""
    cuda = seen.driver.cuda
    return f", driver {seen.driver.version}" + (f" for CUDA {cuda[0]}.{cuda[1]}" if cuda else "")


def _fewer(run: RunConfig, machine: Machine) -> str:
    ranks = f"{machine.gpus} rank{'' if machine.gpus == 1 else 's'}"
    fits = f"a layout of {ranks}, more machines" if machine.gpus else "a machine with GPUs"
    # each spelling works where the user wrote its key
    cpu = "cluster.device=cpu" if run.cluster.name == LOCAL else "cluster=cpu"
    return f"{fits}, or {cpu} for the cores of this one"


def _of_software(seen: Seen) -> Iterator[Shortage]:
    """Yield a shortage where torch does not fit the driver."""
    built = hardware.cuda_of_torch()
    if seen.driver is None or not seen.driver.gpus or built is None:
        return
    if not built:
        text = (
            f"the installed torch is built without CUDA, and {_named(seen.driver.gpus[0])} needs it"
        )
        yield Shortage(
            text, "install a torch for CUDA (pytorch.org has the command), or cluster=cpu", "MT055"
        )
        return
    served = seen.driver.cuda
    major = built.partition(".")[0]
    # within a major version an older driver serves newer releases of CUDA
    if served is not None and major.isdigit() and served[0] < int(major):
        text = (
            f"driver {seen.driver.version} serves CUDA up to {served[0]}.{served[1]}, and the"
            f" installed torch is built for CUDA {built}"
        )
        yield Shortage(text, f"a driver for CUDA {major}, or a torch for CUDA {served[0]}", "MT054")


def _of_memory(run: RunConfig, seen: Seen, here: int, siblings: bool) -> Iterator[Shortage]:
    """Yield a shortage for each GPU whose memory others hold, or a warning if a rank still fits."""
    # A rank has at least its share of the state; offloading moves some of it to the host.
    ranks = run.parallel.ranks
    least = 0 if run.optim.cpu_offload else state_bytes(run) // ranks
    step = over(run, 0)
    planned = 0 if step is None else step.needed
    for index, gpu in enumerate(seen.gpus[:here]):
        if not gpu.memory_bytes:
            continue
        others = [pid for pid in gpu.processes if not (siblings and _is_sibling(pid))]
        free = units.bytes_(gpu.free_bytes)
        whole = units.bytes_(gpu.memory_bytes)
        text = f"GPU {index} ({_named(gpu)}) has {free} of {whole} free{_held(others)}"
        fix = "end the processes that hold it, or hide this GPU by CUDA_VISIBLE_DEVICES"
        if least > gpu.free_bytes:
            needs = (
                "; weights, gradients and optimizer state of a rank need at least"
                f" {units.bytes_(least)}"
            )
            larger = least > gpu.memory_bytes
            yield Shortage(
                text + needs, "more ranks, or a larger tp, pp or ep" if larger else fix, "MT053"
            )
        elif gpu.free_bytes < planned < gpu.memory_bytes:
            yield Shortage(
                f"{text}; a step is planned to need {units.bytes_(planned)}",
                fix,
                "MT053",
                warning=True,
            )
        elif others:
            yield Shortage(f"{text}: the run will share it", fix, "MT053", warning=True)


def _held(processes: Sequence[int]) -> str:
    """Return in words which process computes on a GPU, and how many more do; empty: no process."""
    if not processes:
        return ""
    first = f", and process {processes[0]}{_command(processes[0])}"
    if len(processes) > 1:
        return f"{first} and {len(processes) - 1} more compute on it"
    return f"{first} computes on it"


def _of_another_kind(run: RunConfig, seen: Seen) -> Iterator[Shortage]:
    """Yield a warning where the GPUs are of another kind than those of the named cluster."""
    names = run.cluster.driver_names
    others = sorted({gpu.name for gpu in seen.gpus} - {*names})
    if names and others:
        text = (
            f"cluster {run.cluster.name} has {', '.join(names)}, and the GPUs here are"
            f" {', '.join(others)}"
        )
        yield Shortage(
            f"{text}: plan and MFU are for other GPUs", "cluster=local", "MT056", warning=True
        )


def _named(gpu: Gpu) -> str:
    return gpu.name or "a GPU without a name"


def _is_sibling(pid: int) -> bool:
    """Return whether a process has the same parent as this one, as ranks of one launcher have."""
    return _field(pid, "PPid") in (str(os.getppid()), str(os.getpid())) or pid == os.getpid()


def _command(pid: int) -> str:
    name = _field(pid, "Name")
    return f" ({name})" if name else ""


def _field(pid: int, name: str) -> str:
    """Return a field of /proc/PID/status; empty if it is missing."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return value.strip()
    return ""
