"""The environment of a rank: every variable that a run needs or profits from, with its value and
the reason.

Libraries read many variables only once, when they are imported or create their first context. The
launcher therefore sets them before the interpreter of a rank starts, and the rank verifies them. A
value that the user set wins and is reported; `verify` names each value that would make the run
wrong.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from mtrain.config.machine.devices import facts_of
from mtrain.config.machine.hardware import cpu_cores
from mtrain.config.schema.run import RunConfig
from mtrain.units import number_of

# Filesystems on which a cache of many small files is slow, and which different machines share
NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "cifs",
    "smb3",
    "afs",
    "panfs",
    "fuse.juicefs",
)
# The compute capability from which the device itself orders the kernels of several queues
DATA_CENTER_BLACKWELL = 100
# The number of collectives that the flight recorder holds, at some hundred bytes each
RECORDED = 2000
# Seconds beyond trainer.timeout_s: process groups time out one minute later, and torch may then
# write its records for another minute.
MONITOR_SLACK_S = 120
# torch's default timeout of its heartbeat
LEAST_MONITOR_S = 480
# Values of NCCL_ALGO whose sums always have the same order
ORDERED_ALGORITHMS = ("Ring", "Tree", "^NVLS", "CollnetDirect", "CollnetChain")


@dataclass(frozen=True)
class Setting:
    """One variable of a rank's environment."""

    value: str
    reason: str
    by_user: bool = False
    """True if the variable was already set; `value` is then its value."""
    allowed: tuple[str, ...] = ()
    """The values that the run accepts; empty: any."""

    @property
    def is_right(self) -> bool:
        """Return whether the run accepts this value."""
        return not self.allowed or self.value in self.allowed

    @property
    def needs(self) -> str:
        """Return the accepted values in words."""
        return " or ".join(self.allowed)


@dataclass(frozen=True)
class Place:
    """The facts, other than its run, that the environment of a rank depends on."""

    ranks_here: int = 1
    """Ranks on this machine."""
    cores: int = field(default_factory=cpu_cores)
    """Cores that these ranks share."""
    on_one_machine: bool = True
    """True if all ranks of the run are on this machine."""
    home_filesystem: str = ""
    """The type of the home folder's filesystem, as /proc/mounts names it; empty if unknown."""
    scratch: Path = field(
        default_factory=lambda: Path(tempfile.gettempdir()) / f"mtrain-{os.getuid()}"
    )
    """A folder of this user on a local disk."""
    errors: Path | None = None
    """The folder in which failed ranks leave their records."""

    @classmethod
    def here(
        cls, ranks_here: int, *, on_one_machine: bool = True, errors: Path | None = None
    ) -> Place:
        """Return the place of ranks on this machine."""
        home = Path(os.path.expanduser("~"))  # Path.home raises for a user without a home
        return cls(
            ranks_here,
            on_one_machine=on_one_machine,
            home_filesystem=filesystem_of(home),
            errors=errors,
        )


def environment(run: RunConfig, place: Place, given: Mapping[str, str]) -> dict[str, Setting]:
    """Return every variable that mtrain sets for a rank of a resolved `run`, by name.

    `given` is the environment of the user. Variables of CUDA are set only for a device that has
    CUDA.
    """
    wanted = {
        name: (value, reason, allowed) for name, value, reason, allowed in _wanted(run, place)
    }
    settings = {}
    for name, (value, reason, allowed) in wanted.items():
        spelling = next((a for a in (name, *_ALIASES.get(name, ())) if a in given), None)
        if spelling is None:
            settings[name] = Setting(value, reason, allowed=allowed)
        else:
            settings[spelling] = Setting(given[spelling], reason, by_user=True, allowed=allowed)
    return settings


def apply(settings: Mapping[str, Setting], environ: MutableMapping[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, setting in settings.items():
        environ.setdefault(name, setting.value)


def conflicts(settings: Mapping[str, Setting]) -> list[str]:
    """Return a problem, with its fix, for each variable whose value would change the run."""
    wrong = ((name, setting) for name, setting in settings.items() if not setting.is_right)
    return [
        f"{name}={s.value!r} in the environment must be {s.needs}: {s.reason}; unset it"
        for name, s in wrong
    ]


def verify(run: RunConfig, place: Place, environ: Mapping[str, str]) -> list[str]:
    """Return the problems of a started rank's environment: conflicts, and missing variables."""
    settings = environment(run, place, environ)
    missing = (
        (name, setting)
        for name, setting in settings.items()
        if setting.allowed and not setting.by_user
    )
    return [
        *conflicts(settings),
        *(
            f"{name} is not in the environment of this rank and must be {s.needs}: {s.reason}"
            for name, s in missing
        ),
    ]


def lines(settings: Mapping[str, Setting]) -> Iterator[str]:
    """Yield the environment as lines: `NAME=value  reason`."""
    width = min(
        60,
        max((len(name) + len(setting.value) + 1 for name, setting in settings.items()), default=0),
    )
    for name, setting in settings.items():
        who = "set by you; " if setting.by_user else ""
        wrong = "" if setting.is_right else f"must be {setting.needs}: "
        yield f"{f'{name}={setting.value}':<{width}}  {who}{wrong}{setting.reason}"


def filesystem_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the type of the filesystem that holds `path`; empty if unknown."""
    try:
        rows = [line.split(" ") for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return ""
    inside = [row for row in rows if len(row) > 2 and path.is_relative_to(_unescaped(row[1]))]
    # max() keeps the first of equal lengths
    return max(inside, key=lambda row: len(row[1]), default=["", "", ""])[2]


# Other names of a variable. Setting one of them sets the variable.
_ALIASES = {
    "PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
}
Wanted = Iterator[tuple[str, str, str, tuple[str, ...]]]


def _wanted(run: RunConfig, place: Place) -> Wanted:
    """Yield name, value, reason and accepted values (empty: any) of each variable."""
    device = facts_of(run.cluster.device)
    threads = str(max(1, place.cores // max(1, place.ranks_here)))
    share = f"{place.cores} cores for {number_of(place.ranks_here, 'rank')} of this machine"
    yield "OMP_NUM_THREADS", threads, share, ()
    yield "MKL_NUM_THREADS", threads, share, ()
    yield (
        "TORCH_CPP_LOG_LEVEL",
        "ERROR",
        "torch would print a C++ stack whenever another rank ends",
        (),
    )
    if device.on_host and place.on_one_machine:
        yield "GLOO_SOCKET_IFNAME", "lo", "all ranks are on this machine", ()
    if device.triton and place.home_filesystem in NETWORK:
        reason = (
            f"the home folder is on {place.home_filesystem}, and each machine compiles for itself"
        )
        yield "TRITON_CACHE_DIR", str(place.scratch / "triton"), reason, ()
    if device.cuda_kernels:
        yield from _of_cuda(run)
        yield from _of_transformer_engine(run)
        if run.parallel.ranks > 1:
            yield from _of_nccl(run, place)


def _of_cuda(run: RunConfig) -> Wanted:
    sm = run.cluster.sm
    p = run.parallel
    if (p.tp > 1 or p.cp > 1) and p.fsdp == "none" and (sm is None or sm < DATA_CENTER_BLACKWELL):
        reason = (
            "tensor and context parallelism overlap their exchanges only if kernels start in the"
            " order of their calls"
        )
        yield "CUDA_DEVICE_MAX_CONNECTIONS", "1", reason, ()
    if run.trainer.cuda_graph_impl == "none":  # with graphs, NCCL's registered buffers may move
        yield (
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "memory fragments less when sizes change",
            (),
        )
    if run.trainer.deterministic:
        reason = (
            "trainer.deterministic: cuBLAS sums in one order only with workspaces of a fixed size"
        )
        yield "CUBLAS_WORKSPACE_CONFIG", ":4096:8", reason, (":4096:8", ":16:8")


def _of_transformer_engine(run: RunConfig) -> Wanted:
    kernels = run.kernels
    if kernels.attention == "te":
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"):
            yield (
                name,
                "1",
                (
                    "kernels.attention=te: TransformerEngine chooses; megatron-core accepts nothing"
                    " else"
                ),
                (),
            )
    if run.trainer.deterministic and "te" in (
        kernels.norm,
        kernels.attention,
        kernels.linear,
        kernels.experts,
    ):
        reason = (
            "trainer.deterministic: else TransformerEngine takes algorithms whose bits depend on"
            " timing"
        )
        yield "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", reason, ("0",)
    if run.parallel.activation_offload.modules:
        reason = (
            "parallel.activation_offload: the newer offload of TransformerEngine copies weights too"
        )
        yield "NVTE_CPU_OFFLOAD_V1", "1", reason, ("1",)


def _of_nccl(run: RunConfig, place: Place) -> Wanted:
    if run.trainer.deterministic:
        reason = (
            "trainer.deterministic: NCCL chooses an algorithm by size, and some change the order of"
            " sums"
        )
        yield "NCCL_ALGO", "Ring", reason, ORDERED_ALGORITHMS
    reason = "the number of collectives that the flight recorder holds, for the report of a stall"
    yield "TORCH_FR_BUFFER_SIZE", str(RECORDED), reason, ()
    reason = "the flight recorder is written to disk when a collective times out"
    yield "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason, ()
    folder = place.errors or place.scratch
    reason = "the files of the flight recorder, up to the rank; torchfrtrace reads them"
    yield "TORCH_FR_DUMP_TEMP_FILE", str(folder / "flight_rank_"), reason, ()
    # a separate name for each run, as runs of one user share the scratch folder
    token = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    pipe = str(place.scratch.parent / f"{place.scratch.name}-{token}-")
    reason = (
        "the pipes, up to the rank, on which mtrain requests torch's flight recorder in a stall"
    )
    yield "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", pipe, reason, ()
    seconds = max(LEAST_MONITOR_S, math.ceil(run.trainer.timeout_s) + MONITOR_SLACK_S)
    reason = (
        "torch ends a process whose NCCL thread is stuck; trainer.timeout_s comes first and names"
        " the rank"
    )
    yield "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(seconds), reason, ()


def _unescaped(text: str) -> str:
    """Return a path of /proc/mounts with its blanks, which that file writes as octal numbers."""
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text
