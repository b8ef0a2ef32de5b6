"""The machine as this process may use it: cores and memory within its control group, and GPUs.

Everything is read from files under `/dev`, `/proc` and `/sys`, with `root` in place of `/`; of
NVIDIA's GPUs the driver's own library knows more (`config/machine/nvml.py`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from mtrain.config.machine.nvml import Driver
from mtrain.config.machine.visible import Seen, counted, shown

ROOT = Path("/")
GROUPS = "sys/fs/cgroup"
# Nodes that are taken from one entry of a list of SLURM's.
MOST_NODES = 1 << 20
# Version 1 of control groups reports a number near 2^63 if there is no limit.
UNLIMITED_BYTES = 1 << 60
AMD_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def cpu_cores(root: Path = ROOT) -> int:
    """Return the cores that this process may use, by its affinity, cpuset and quota.

    A quota of 2.5 cores counts as 3.
    """
    try:
        # os.cpu_count() counts the machine's cores, also in a container that may use two of them.
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    quotas = [
        math.ceil(quota) for folder in _groups("cpu", root) if (quota := _quota(folder)) is not None
    ]
    sets = [_listed(_text(folder / name)) for folder in _groups("cpuset", root) for name in _CPUSET]
    return max(1, min([cores, *quotas, *(count for count in sets if count)]))


def memory_bytes(root: Path = ROOT) -> int:
    """Return the bytes of main memory, at most the control group's limit; 0 if unknown."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory = 0
    limits = [_number(folder / name) for folder in _groups("memory", root) for name in _MEMORY]
    known = [limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES]
    return int(min([*([memory] if memory > 0 else []), *known], default=0))


def free_memory_bytes(root: Path = ROOT) -> int:
    """Return the bytes of main memory that new data may take without swapping, at most what the
    control groups of this process leave; 0 if unknown.

    Pages that only hold files count as free: the kernel drops them.
    """
    line = re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    free = [1024 * int(line[1])] if line else []
    for folder in _groups("memory", root):
        for limit_name, used_name in zip(_MEMORY, _MEMORY_USED, strict=True):
            limit = _number(folder / limit_name)
            used = _number(folder / used_name)
            if limit is None or used is None or limit >= UNLIMITED_BYTES:
                continue
            files = re.search(r"^inactive_file (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            free.append(limit - used + (int(files[1]) if files else 0))
    return max(0, min(free, default=0))


_MEMORY = ("memory.max", "memory.limit_in_bytes")
_MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
_CPUSET = ("cpuset.cpus.effective", "cpuset.cpus")


def nvidia_gpus(
    environment: Mapping[str, str], root: Path = ROOT, driver: Driver | None = None
) -> Seen:
    """Return NVIDIA's GPUs that CUDA shows this process: those that CUDA_VISIBLE_DEVICES leaves of
    the driver's.

    Without the driver's library they are counted by device files: `/dev/nvidia0` and on, or
    `/dev/dxg` of WSL2, which may be one GPU or several.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if driver is not None:
        return replace(shown(driver.gpus, visible), driver=driver)
    # A container may have the devices but not the driver's library.
    files = len(list((root / "dev").glob("nvidia[0-9]*")))
    in_wsl = (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    gpus = files or int(in_wsl)
    return counted(gpus, visible)


def tasks_here(environment: Mapping[str, str]) -> int:
    """Return the tasks of this SLURM step on this machine if each sees its own GPU, else 0.

    `--gpus-per-task=1` and `--ntasks-per-gpu=1` do so; the machine then has a GPU for each task.
    """
    alone = "1" in (environment.get("SLURM_GPUS_PER_TASK"), environment.get("SLURM_NTASKS_PER_GPU"))
    if not alone or "SLURM_LOCALID" not in environment:
        return 0
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environment.get("SLURM_NODEID", "0")
    return tasks[int(node)] if node.isdigit() and int(node) < len(tasks) else 1


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node in SLURM's notation, such as `4(x3),2`; empty if malformed."""
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if match is None:
            return []
        counts += [int(match[1])] * min(int(match[2] or 1), MOST_NODES)
    return counts


def amd_gpus(environment: Mapping[str, str], root: Path = ROOT) -> int:
    """Return the number of AMD's GPUs that this process sees; torch presents them as type cuda.

    They are the nodes of the driver's topology with vector units, less those that variables hide.
    """
    if not (root / "dev/kfd").exists():
        return 0
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    gpus = sum(bool(re.search(r"^simd_count [1-9]", _text(node), re.MULTILINE)) for node in nodes)
    # ROCm applies every variable that is set, one after the other.
    for name in (*AMD_VISIBLE, "CUDA_VISIBLE_DEVICES"):
        if name in environment:
            gpus = counted(gpus, environment[name]).count
    return gpus


def torch_is_for_amd() -> bool:
    """Return whether the torch that is installed was built for ROCm; it is not imported."""
    return bool(_built_for("hip"))


def cuda_of_torch() -> str | None:
    """Return the CUDA that the installed torch was built for, such as 13.0; empty: for none; None:
    there is no torch.

    torch is not imported.
    """
    return _built_for("cuda")


def _built_for(platform: str) -> str | None:
    """Return the platform's release in the installed torch's `version.py`; else empty."""
    spec = find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        text = _text(Path(place) / "version.py")
        found = re.search(rf"^{platform}\b[^=\n]*=\s*['\"]([^'\"]*)", text, re.MULTILINE)
        return found[1] if found else ""
    return None


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, from its own up to the visible root."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        # Version 2 has one line, `0::/path`; version 1 one for each controller.
        if number == "0" and not names:
            top = root / GROUPS
        elif controller in names.split(","):
            top = next(
                (root / GROUPS / n for n in (names, controller) if (root / GROUPS / n).is_dir()),
                root / GROUPS,
            )
        else:
            continue
        here = Path(path.lstrip("/"))
        # in a container the path may be that of the host, and its group is mounted at the top
        for folder in (here, *here.parents):
            if ".." not in folder.parts:
                yield top / folder


def _quota(folder: Path) -> float | None:
    """Return the cores that a control group may use on average; None without a limit."""
    words = _text(folder / "cpu.max").split()  # version 2: "quota period" or "max period"
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    quota = _number(folder / "cpu.cfs_quota_us")
    period = _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _listed(text: str) -> int:
    """Return how many numbers a list such as `0-3,8` has."""
    runs = [run.partition("-") for run in text.strip().split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in runs if first.isdigit())


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
