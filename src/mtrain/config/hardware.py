"""What this process may use of its machine: cores and memory within the limits of its control group, and GPUs.

Everything is read from files under `/dev`, `/proc` and `/sys`, so no driver is asked; `root` stands for `/`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

ROOT = Path("/")
GROUPS = "sys/fs/cgroup"
UNLIMITED_BYTES = 1 << 60
"""Version 1 of control groups says a number near 2^63 where there is no limit."""
AMD_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def cpu_cores(root: Path = ROOT) -> int:
    """Cores that this process may run on, by its affinity and by the cpuset and the quota of its control group.

    A quota of part of a core counts as one more: 2.5 cores are 3.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    quotas = [math.ceil(quota) for folder in _groups("cpu", root) if (quota := _quota(folder)) is not None]
    sets = [_listed(_text(folder / name)) for folder in _groups("cpuset", root) for name in _CPUSET]
    return max(1, min([cores, *quotas, *(count for count in sets if count)]))


def memory_bytes(root: Path = ROOT) -> int:
    """Bytes of main memory, or of what the control group leaves of it; 0 where neither is known."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory = 0
    limits = [_number(folder / name) for folder in _groups("memory", root) for name in _MEMORY]
    known = [limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES]
    return int(min([*([memory] if memory > 0 else []), *known], default=0))


_MEMORY = ("memory.max", "memory.limit_in_bytes")
_CPUSET = ("cpuset.cpus.effective", "cpuset.cpus")


def nvidia_gpus(environment: Mapping[str, str], root: Path = ROOT) -> int:
    """NVIDIA's GPUs that this process sees: device files, and what CUDA_VISIBLE_DEVICES leaves of them."""
    gpus = len(list((root / "dev").glob("nvidia[0-9]*")))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else min(gpus, visible_devices(visible))


def amd_gpus(environment: Mapping[str, str], root: Path = ROOT) -> int:
    """AMD's GPUs that this process sees: nodes of the driver's topology with vector units, and what HIP's and CUDA's
    variables leave of them. torch presents them as devices of type cuda.
    """
    if not (root / "dev/kfd").exists():
        return 0
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    gpus = sum(bool(re.search(r"^simd_count [1-9]", _text(node), re.MULTILINE)) for node in nodes)
    for name in (*AMD_VISIBLE, "CUDA_VISIBLE_DEVICES"):
        if name in environment:
            gpus = min(gpus, visible_devices(environment[name]))
    return gpus


def visible_devices(text: str) -> int:
    """How many devices CUDA_VISIBLE_DEVICES or its like names: the list ends at the first that is no device."""
    count = 0
    for entry in text.split(","):
        word = entry.strip()
        if not (word.isdigit() or word.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def torch_is_for_amd() -> bool:
    """Whether the torch that is installed was built for ROCm; it is not imported."""
    spec = find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        return re.search(r"^hip\b[^=\n]*=\s*['\"]", _text(Path(place) / "version.py"), re.MULTILINE) is not None
    return False


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of the control groups that this process is in, from its own to the root of all that it sees."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            top = root / GROUPS
        elif controller in names.split(","):
            top = next(
                (root / GROUPS / n for n in (names, controller) if (root / GROUPS / n).is_dir()), root / GROUPS
            )
        else:
            continue
        here = Path(path.lstrip("/"))
        # in a container the path may be that of the host, and its group is mounted at the top
        for folder in (here, *here.parents):
            if ".." not in folder.parts:
                yield top / folder


def _quota(folder: Path) -> float | None:
    """Cores that a control group may use up in the mean; None: no limit."""
    words = _text(folder / "cpu.max").split()  # version 2: "quota period" or "max period"
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _listed(text: str) -> int:
    """How many numbers a list such as `0-3,8` has."""
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
