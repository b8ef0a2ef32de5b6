"""Checks of the host: limits of processes, memory, shared memory and the container."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.machine.devices import facts_of
from mtrain.doctor.facts import Facts
from mtrain.doctor.rows import Row, ok, wrong
from mtrain.launching.limits import ADDRESSES_PER_RANK, FILES_PER_RANK, THREADS_PER_RANK
from mtrain.plan.memory import activation_bytes, bytes_here
from mtrain.units import bytes_, number_of

# NCCL's buffers of one rank for its peers of a machine, with room to spare.
SHARED_PER_RANK = 64 << 20
# What network adapters pin for a rank; the usual limit of a shell is 8 MiB or less.
LOCKED_PER_RANK = 1 << 30


def check(facts: Facts) -> Iterator[Row]:
    """Yield the rows of the host."""
    yield from _limits(facts)
    yield from _locked(facts)
    yield from _shared(facts)
    yield _memory(facts)
    yield ok("container", facts.container or "none")


def _limits(facts: Facts) -> Iterator[Row]:
    """Yield the limits of files, processes and addresses; a null limit has no bound."""
    ranks = facts.ranks_here
    files = FILES_PER_RANK + facts.run.parallel.ranks
    threads = ranks * THREADS_PER_RANK
    for flag, name, limit, needed, fix in (
        ("n", "open files", facts.limits.files, files, max(1024, files)),
        ("u", "processes", facts.limits.processes, threads, max(4096, threads)),
        ("v", "addresses", facts.limits.addresses, ADDRESSES_PER_RANK, "unlimited"),
    ):
        row = f"ulimit -{flag}"
        text = "unlimited" if limit is None else f"{limit} {name}"
        if limit is not None and limit < needed:
            need = f"{text}; {number_of(ranks, 'rank')} need {needed}"
            remedy = f"ulimit -{flag} {fix}; docker: --ulimit; SLURM: PropagateResourceLimits"
            yield wrong(row, need, remedy, limit)
        else:
            yield ok(row, text, limit)


def _locked(facts: Facts) -> Iterator[Row]:
    """Yield the limit of locked memory, which adapters of RDMA register their buffers in."""
    limit = facts.locked_bytes
    text = "unlimited" if limit is None else bytes_(limit)
    networked = bool(facts.adapters) or facts.run.cluster.nodes > 1
    on_host = facts_of(facts.run.cluster.device).on_host
    needed = facts.ranks_here * LOCKED_PER_RANK
    if networked and not on_host and limit is not None and limit < needed:
        fix = "ulimit -l unlimited; docker: --ulimit memlock=-1"
        need = f"{text} of locked memory; InfiniBand registers its buffers there"
        yield wrong("ulimit -l", need, fix, limit, "bytes")
    else:
        yield ok("ulimit -l", f"{text} of locked memory", limit, "bytes")


def _shared(facts: Facts) -> Iterator[Row]:
    free = facts.shared_free_bytes
    # gloo's ranks of a CPU talk by sockets.
    uses = not facts_of(facts.run.cluster.device).on_host and facts.ranks_here > 1
    needed = facts.ranks_here * SHARED_PER_RANK
    fix = "mount a larger one: mount -o remount,size=16G /dev/shm"
    if facts.container:
        fix = "a larger one: docker --shm-size=16g or --ipc=host; Kubernetes: emptyDir in memory"
    if free is None:
        if uses:
            yield wrong("/dev/shm", "missing; NCCL needs it within a machine", fix)
        return
    text = f"{bytes_(free)} of {bytes_(facts.shared_bytes or free)} free"
    if uses and free < needed:
        text = f"{text}; {number_of(facts.ranks_here, 'rank')} need {bytes_(needed)}"
        yield wrong("/dev/shm", text, fix, free, "bytes")
    else:
        yield ok("/dev/shm", text, free, "bytes")


def _memory(facts: Facts) -> Row:
    """Return the memory of the host, which holds the whole run on a CPU."""
    has = facts.machine.memory_bytes
    text = f"{bytes_(has)}, {number_of(facts.machine.cpu_cores, 'core')}"
    if not facts_of(facts.run.cluster.device).on_host or not has:
        return ok("host memory", text, has, "bytes")
    needed = bytes_here(facts.run) + facts.run.parallel.ranks * activation_bytes(facts.run)
    if needed > has:
        text = f"{text}; this run needs at least {bytes_(needed)}"
        return wrong("host memory", text, "a smaller model, or a larger machine", has, "bytes")
    return ok("host memory", text, has, "bytes")
