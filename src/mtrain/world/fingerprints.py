"""Fingerprints of the last collectives of each rank, in memory that outlives the rank's process.

The launcher of a machine creates the memory, without a name in any file system, and each rank maps
it. So the launcher and the other ranks of the machine can read the fingerprints of a rank that is
stopped or dead. Importing this module does not import torch.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple

from mtrain.world.heartbeat import heartbeat
from mtrain.world.labels import Labels
from mtrain.world.own_time import OwnTime

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

# The variable with the descriptor of the memory that ranks of a machine share
DESCRIPTOR = "MTRAIN_FINGERPRINTS_FD"
KEPT = 64
"""Fingerprints that each rank keeps."""
# Number, sequence, shape, peer, state, group, operation, name of the group, type
RECORD = struct.Struct("=QQ5qhBI20s16s12s")
STATE = struct.calcsize("=QQ5qh")
RING = KEPT * RECORD.size
UNDER_WAY, WAITED_FOR, DONE, GIVEN = range(4)
"""States of a collective. GIVEN: the host has handed it to the device, which may not have ended."""
OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""Methods of a process group, by which every function of torch.distributed communicates; versions
of torch differ in which exist.
"""
BETWEEN_TWO = ("send", "recv")
UNLIKE = ("all_to_all", "gather", "scatter")
"""Operations whose tensors may differ between ranks."""
GROUPS = {
    "default_pg": "world",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "tp-pp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp-ep",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
}
"""megatron-core's descriptions of groups -> the names of their axes."""
MAX_PLACES = 4


class Fingerprint(NamedTuple):
    """A collective, or a transfer between two ranks, as one rank recorded it."""

    number: int
    """Its number among all of the rank, from 1."""
    sequence: int
    """Its number in the group, from 1; of a transfer, among those to or from the same rank."""
    shape: tuple[int, ...]
    """The first five dimensions of its first tensor."""
    peer: int
    """The other rank of a transfer; -1: all of the group take part."""
    state: int
    group: int
    """A number that only this process group has."""
    operation: str
    name: str
    """The name of the group, such as tp."""
    dtype: str
    """The type of its first tensor; empty: it has none."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> Fingerprint:
        """Return the fingerprint whose values JSON has turned into lists."""
        number, sequence, shape, *rest = values
        return cls(number, sequence, tuple(shape), *rest)

    @property
    def words(self) -> str:
        """Return it as `all_reduce #812 of tp (float32 [4, 64])`."""
        way = {"send": f" to rank {self.peer}", "recv": f" from rank {self.peer}"}
        tensor = f" ({self.dtype} {list(self.shape)})" if self.dtype else ""
        peer = way.get(self.operation, "")
        return f"{self.operation} #{self.sequence} of {self.name}{peer}{tensor}"

    @property
    def kind(self) -> str:
        """Return everything of it that every rank of the group must have in common."""
        if self.operation in UNLIKE:
            return f"{self.operation} {self.dtype}"
        return f"{self.operation} {self.dtype} {self.shape}"


@contextmanager
def shared(ranks: int) -> Iterator[int]:
    """Yield the descriptor of memory for the fingerprints of so many ranks of this machine."""
    make = getattr(os, "memfd_create", None)  # only Linux has it
    with os.fdopen(make("mtrain"), "r+b", 0) if make else TemporaryFile(buffering=0) as file:
        file.truncate(ranks * RING)
        yield file.fileno()


class Memory:
    """The fingerprints of the ranks of a machine; only of this rank where no launcher made them."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.shared = descriptor is not None
        self.bytes = mmap.mmap(-1, RING) if descriptor is None else mmap.mmap(descriptor, 0)

    @classmethod
    def here(cls) -> Memory:
        """Return the memory that the launcher of this rank has made."""
        text = os.environ.get(DESCRIPTOR, "")
        try:
            return cls(int(text)) if text else cls()
        except (ValueError, OSError):  # the variable was inherited, and the descriptor was not
            return cls()

    def close(self) -> None:
        """Give the memory back, and the descriptor that keeps it."""
        self.bytes.close()

    def read(self, place: int) -> list[Fingerprint]:
        """Return the fingerprints of the rank at `place` on this machine, the oldest first."""
        found = []
        for offset in range(place * RING, (place + 1) * RING, RECORD.size):
            number, sequence, *rest = RECORD.unpack_from(self.bytes, offset)
            shape = tuple(size for size in rest[:5] if size >= 0)
            texts = (text.rstrip(b"\0").decode(errors="replace") for text in rest[8:])
            if number:
                found.append(Fingerprint(number, sequence, shape, *rest[5:8], *texts))
        return sorted(found)


class _Group:
    """A process group, as fingerprints name it."""

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed as dist

        name = group.group_desc or group.group_name
        # Ranks make their groups in the same order, so all of them have the same name for one.
        self.number = zlib.crc32(group.group_name.encode())
        self.name = GROUPS.get(name, name.lower().removesuffix("_group")).encode()
        self.ranks = dist.get_process_group_ranks(group)
        self.counts: defaultdict[tuple[bytes, int], Iterator[int]] = defaultdict(
            lambda: itertools.count(1)
        )


class Ring:
    """The fingerprints of this rank, of which a new one takes the place of the oldest."""

    def __init__(self, memory: Memory, place: int, *, ahead: bool) -> None:
        """Clear the fingerprints at `place`; `ahead`: the device works while the host goes on."""
        self.memory = memory
        self.place = place if memory.shared else 0
        self.base = self.place * RING
        self.memory.bytes[self.base : self.base + RING] = bytes(RING)
        self.launched = GIVEN if ahead else UNDER_WAY
        self.numbers = itertools.count(1)
        self.groups: dict[ProcessGroup, _Group] = {}
        self.works: dict[int, int] = {}
        """The place in memory by the identity of the Work that ends the collective there."""
        self.types: dict[Any, bytes] = {}

    def begin(self, operation: bytes, group: ProcessGroup, args: Sequence[Any]) -> int:
        """Record a collective; return its place in memory."""
        known = self.groups.get(group)
        if known is None:
            known = _Group(group)
            self.groups[group] = known
        first = args[0] if args else None
        while isinstance(first, (list, tuple)):
            first = first[0] if first else None
        shape = (-1, -1, -1, -1, -1)
        dtype = b""
        if first is not None:
            shape = (*first.shape, *shape)[:5]
            dtype = self.types.get(first.dtype) or self._named(first.dtype)
        peer = known.ranks[args[1]] if operation in (b"send", b"recv") else -1
        way = operation if peer >= 0 else b""
        number = next(self.numbers)
        offset = self.base + number % KEPT * RECORD.size
        RECORD.pack_into(
            self.memory.bytes,
            offset,
            number,
            next(known.counts[way, peer]),
            *shape,
            peer,
            UNDER_WAY,
            known.number,
            operation,
            known.name,
            dtype,
        )
        return offset

    def returned(self, work: Work | None, offset: int) -> None:
        """Note that the call has returned `work`, for which somebody will wait."""
        self.memory.bytes[offset + STATE] = self.launched
        if self.launched == UNDER_WAY and work is not None:
            if len(self.works) > 4 * KEPT:
                # Nobody waits for some, and a new Work may have the identity of one that is gone.
                self.works.clear()
            self.works[id(work)] = offset

    def _named(self, dtype: Any) -> bytes:
        return self.types.setdefault(dtype, str(dtype).removeprefix("torch.").encode())


@contextmanager
def recording(ring: Ring) -> Iterator[None]:
    """Record every collective and transfer of this process in the block."""
    from torch.distributed import ProcessGroup, Work

    # As the class holds them: an attribute of a class of C++ is a function that binds to no object.
    # As the class holds them: read from the class, a method of C++ would bind to no object again.
    before = {name: vars(ProcessGroup)[name] for name in OPERATIONS if hasattr(ProcessGroup, name)}
    wait = vars(Work)["wait"]
    for name in before:
        real = getattr(ProcessGroup, name)
        setattr(ProcessGroup, name, _recorded(ring, real, OPERATIONS[name].encode()))
    Work.wait = _awaited(ring, Work.wait)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]
        for name, method in before.items():
            setattr(ProcessGroup, name, method)


def _recorded(ring: Ring, real: Callable[..., Any], operation: bytes) -> Callable[..., Any]:
    main = threading.main_thread()

    def recorded(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        labels = Labels.now
        if labels is not None and threading.current_thread() is main:
            return labelled(labels, ring, group, args, kwargs)
        return call(ring, group, args, kwargs)

    def labelled(labels: Labels, ring: Ring, group: ProcessGroup, args: Any, kwargs: Any) -> Any:
        with labels.collective(operation.decode(), group) as name:
            work = call(ring, group, args, kwargs)
        labels.calls[id(work)] = name
        return work

    def call(ring: Ring, group: ProcessGroup, args: Any, kwargs: Any) -> Any:
        offset = ring.begin(operation, group, args)
        # A first collective connects its ranks, and so may wait for them here.
        waits = threading.current_thread() is main
        heartbeat.waits += waits
        begun = OwnTime.pause()
        try:
            work = real(group, *args, **kwargs)
        finally:
            OwnTime.resume(begun)
            heartbeat.waits -= waits
        ring.returned(work, offset)
        return work

    return recorded


def _awaited(ring: Ring, real: Callable[..., Any]) -> Callable[..., Any]:
    states = ring.memory.bytes

    def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
        offset = ring.works.pop(id(work), None)
        if offset is not None:
            states[offset + STATE] = WAITED_FOR
        begun = OwnTime.pause()
        labels = Labels.now
        if labels is None or threading.current_thread() is not threading.main_thread():
            done = real(work, *args, **kwargs)
        else:
            with labels.wait(work):
                done = real(work, *args, **kwargs)
        OwnTime.resume(begun)
        if offset is not None:
            states[offset + STATE] = DONE
        return done

    return wait


def write(folder: Path, rank: int, calls: Sequence[Fingerprint]) -> None:
    """Write the fingerprints of a rank to a file of `folder`, a line for each, the oldest first."""
    states = ("under way", "waited for", "done", "launched")
    text = "".join(f"{call.words}, {states[call.state]}\n" for call in calls)
    (folder / f"collectives_rank_{rank:05d}.txt").write_text(text)


def current(calls: Sequence[Fingerprint]) -> Fingerprint | None:
    """Return the collective that a rank is in, or was in last; None: it has recorded none."""
    waited = [call for call in calls if call.state == WAITED_FOR]
    return next(reversed(waited or calls), None)


def position(calls: Sequence[Fingerprint]) -> str:
    """Return in words which collective a rank is in or after."""
    call = current(calls)
    if call is None:
        return "before its first collective"
    words = {DONE: "after", GIVEN: "after the launch of"}
    return f"{words.get(call.state, 'in')} {call.words}"


def places(calls: Mapping[int, Sequence[Fingerprint]]) -> str:
    """Return in words where each rank is, those of the fewest ranks first."""
    by_place: dict[str, list[int]] = {}
    for rank, own in sorted(calls.items()):
        by_place.setdefault(position(own), []).append(rank)
    found = sorted(by_place.items(), key=lambda item: len(item[1]))
    texts = [
        f"{_ranks(ranks, calls)} {'is' if len(ranks) == 1 else 'are'} {place}"
        for place, ranks in found[:MAX_PLACES]
    ]
    more = [f"and {len(found) - MAX_PLACES} more places"] if len(found) > MAX_PLACES else []
    return ", ".join(texts + more)


def disagreement(calls: Mapping[int, Sequence[Fingerprint]]) -> tuple[str, int | None]:
    """Return in words which ranks made another collective of a group than the others, under the
    same number, and the only rank that differs from a majority; ("", None) if all agree.
    """
    found: dict[tuple[int, int], dict[int, Fingerprint]] = {}
    for rank, own in calls.items():
        for call in own:
            if call.operation not in BETWEEN_TWO:
                found.setdefault((call.group, call.sequence), {})[rank] = call
    wrong = [by for by in found.values() if len({call.kind for call in by.values()}) > 1]
    if not wrong:
        return "", None
    # Of all numbers in which ranks differ, the first one that any of them reached began it.
    by = min(wrong, key=lambda by: min(call.number for call in by.values()))
    (usual, most), *_ = Counter(call.kind for call in by.values()).most_common(1)
    kinds: dict[str, list[int]] = {}
    for rank, call in sorted(by.items()):
        kinds.setdefault(call.kind, []).append(rank)
    others = kinds.pop(usual)
    odd = [f"{_ranks(ranks)} made {by[ranks[0]].words}" for ranks in kinds.values()]
    majority = 2 * most > len(by)
    rest = "the others" if majority else _ranks(others)
    alone = next(rank for ranks in kinds.values() for rank in ranks)
    culprit = alone if majority and most == len(by) - 1 else None
    return f"{', '.join(odd)}, {rest} {by[others[0]].words}", culprit


def _ranks(ranks: Sequence[int], everyone: Mapping[int, Any] | None = None) -> str:
    """Return ranks in words; `the others` where they are most of `everyone`."""
    if everyone is not None and len(ranks) > 1 and len(everyone) > len(ranks) > len(everyone) / 2:
        return "the others"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
