"""Faults of the environment that would end a rank deep inside C++, found before any rank starts."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mtrain import units

INTERFACES = Path("/sys/class/net")
# Descriptors that a rank needs for data, log, store and checkpoints, without its peers
FILES_PER_RANK = 100
# The least number of threads of a rank: torch, process groups, watchdog and data
THREADS_PER_RANK = 32
# Bytes of address space that importing torch and megatron-core reserves
ADDRESSES_PER_RANK = 2 << 30
TRUE = ("1", "y", "yes", "t", "true")
FALSE = ("0", "n", "no", "f", "false")


@dataclass(frozen=True)
class Limits:
    """Limits that the shell sets for this process; None: no limit."""

    files: int | None = None
    """Descriptors to which a rank may raise its own limit; see `raise_files`."""
    processes: int | None = None
    addresses: int | None = None
    """Bytes."""

    @classmethod
    def here(cls) -> Limits:
        """Return the limits of this process."""
        files = _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        soft = (
            _limit(resource.getrlimit(kind)[0])
            for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_AS)
        )
        return cls(files, *soft)


def raise_files(world: int) -> None:
    """Raise this process's limit of open files for a rank of a `world`, as far as the hard limit
    allows.

    The usual soft limit of 1,024 is too low for a rank that has connections to a thousand others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_PER_RANK + world
    too_low = soft != resource.RLIM_INFINITY and soft < needed
    if too_low and (hard == resource.RLIM_INFINITY or needed <= hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def faults(
    environ: Mapping[str, str],
    limits: Limits,
    ranks: int,
    *,
    world: int | None = None,
    on_host: bool = True,
    interfaces: Path = INTERFACES,
) -> list[str]:
    """Return each fault of the environment of `ranks` ranks on this machine, of `world` in all,
    with its fix.

    Ranks `on_host` use gloo, others NCCL. Only faults that would end a run are named.
    """
    problems = list(_variables(environ, _CHECKS if on_host else _CHECKS | _CHECKS_OF_NCCL))
    # without the folder (not Linux, or a container that hides it), interfaces are not known
    names = sorted(entry.name for entry in interfaces.iterdir()) if interfaces.is_dir() else []
    if names:
        problems += _interfaces(environ, names, on_host)
    return [*problems, *_limits(limits, ranks, world or ranks)]


def _variables(
    environ: Mapping[str, str], checks: Mapping[str, Callable[[str], str]]
) -> Iterator[str]:
    for name, check in checks.items():
        wrong = check(environ[name]) if environ.get(name) else ""
        if wrong:
            yield f"{name}={environ[name]!r} in the environment: {wrong}"


def _interfaces(environ: Mapping[str, str], here: list[str], on_host: bool) -> Iterator[str]:
    present = f"this machine has {', '.join(here)}"
    if on_host:
        for name in filter(None, environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
            if name not in here:
                yield (
                    f"GLOO_SOCKET_IFNAME names the interface {name!r}; {present}: set it to one of"
                    " them, or unset it"
                )
        return
    text = environ.get("NCCL_SOCKET_IFNAME", "")
    if text and not any(_nccl_takes(text, name) for name in here):
        yield (
            f"NCCL_SOCKET_IFNAME={text!r} leaves no interface; {present}: name prefixes of theirs,"
            " =NAME for exactly one, ^PREFIX for all but those, or unset it"
        )


def _nccl_takes(text: str, interface: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME admits an interface.

    It lists prefixes separated by commas; `=` makes them whole names, and `^` excludes the listed
    ones.
    """
    inverted = text.startswith("^")
    exact = text.lstrip("^").startswith("=")
    words = [word for word in text.lstrip("^").lstrip("=").split(",") if word]
    named = any(
        interface == word.split(":")[0] if exact else interface.startswith(word) for word in words
    )
    return named != inverted


def _limits(limits: Limits, ranks: int, world: int) -> Iterator[str]:
    files = FILES_PER_RANK + world
    if limits.files is not None and limits.files < files:
        yield (
            f"a process may have {limits.files} files open (ulimit -n), and a rank of {world} needs"
            f" {files}: ulimit -n {max(1024, files)}"
        )
    processes = ranks * THREADS_PER_RANK
    # the kernel does not apply this limit to root
    if limits.processes is not None and limits.processes < processes and os.geteuid() != 0:
        yield (
            f"this user may have {limits.processes} processes and threads (ulimit -u), and {ranks}"
            f" ranks need {processes}: ulimit -u {max(4096, processes)}"
        )
    if limits.addresses is not None and limits.addresses < ADDRESSES_PER_RANK:
        yield (
            f"a process may have {units.bytes_(limits.addresses)} of address space (ulimit -v), and"
            f" torch needs {units.bytes_(ADDRESSES_PER_RANK)} to be imported: ulimit -v unlimited"
        )


def _one_of(*words: str, ignore_case: bool = False) -> Callable[[str], str]:
    def check(text: str) -> str:
        word = text.upper() if ignore_case else text
        return "" if word in words else f"it is one of {', '.join(words)}; unset it or correct it"

    return check


def _number(at_least: int) -> Callable[[str], str]:
    def check(text: str) -> str:
        if re.fullmatch(r"[+-]?\d+", text.strip()) and int(text) >= at_least:
            return ""
        return f"it is a whole number, at least {at_least}; unset it or correct it"

    return check


def _truth(text: str) -> str:
    return "" if text.lower() in (*TRUE, *FALSE) else "it is 1 or 0; unset it or correct it"


def _must_be_one(text: str) -> str:
    if text == "1":
        return ""
    return "megatron-core refuses anything but 1; unset it, and choose with kernels.attention"


# Variable -> a function that returns the problem of a value with which torch, gloo or megatron-core
# would end a run.
_CHECKS: dict[str, Callable[[str], str]] = {
    "TORCH_DISTRIBUTED_DEBUG": _one_of("OFF", "INFO", "DETAIL", ignore_case=True),
    "GLOO_DEVICE_TRANSPORT": _one_of("TCP", "TCP_TLS", "IBVERBS"),
    "TORCH_GLOO_LAZY_INIT": _truth,
    "TORCH_FR_BUFFER_SIZE": _number(0),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": _number(0),
    "TORCH_FR_CPP_STACK": _truth,
    "TORCH_NCCL_TRACE_CPP_STACK": _truth,
    "NVTE_FLASH_ATTN": _must_be_one,
    "NVTE_FUSED_ATTN": _must_be_one,
}
_TRUTHS_OF_NCCL = (
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_PROPAGATE_ERROR",
    "TORCH_NCCL_CUDA_EVENT_CACHE",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_NAN_CHECK",
)
# The same for variables that only torch's NCCL process groups read
_CHECKS_OF_NCCL: dict[str, Callable[[str], str]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _number(0),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": _number(1),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": _number(0),
    "TORCH_NCCL_COORD_CHECK_MILSEC": _number(1),
    **dict.fromkeys(_TRUTHS_OF_NCCL, _truth),
}


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value
