"""Profiles of a run folder: requests, traces of all ranks on one clock, a step's time by part."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.errors import CorruptData

REQUEST = "profile.request"
FOLDER = "profiles"
FACTS = "profile.json"
MERGED = "trace.json.gz"
PREFIX = "mtrain:"
"""The beginning of the labels of a step, as `world.labels` writes them."""
CLOCK = f"{PREFIX}clock"
STEP = f"{PREFIX}step"
MOST_STEPS = 100
CONTENT = ("torch", "memory", "stacks", "shapes", "flops", "nsys")
MATMUL = re.compile(r"(^|_)(add|b|badd|scaled_)?mm|matmul|linear|gemm|einsum")
ATTENTION = ("attention", "flash", "fmha")
PHASES = {f"{PREFIX}data": "data", f"{PREFIX}optimizer": "update"}
COMMUNICATION = ("tp", "cp", "pp", "ep", "dp")
COMPUTATION = ("gemm", "attention", "memory")
PARTS = (*COMPUTATION, *COMMUNICATION, "bubble", "update", "data", "waiting", "sync", "host")
"""Parts of a step, in the terms of the plan. waiting: for a rank that comes later to a collective;
sync: the device has no work because the host waits for it; host: Python and the launch of
operations, on a GPU only where the device has no work.
"""
ORDER = (*COMPUTATION, *COMMUNICATION, "waiting", "sync")
"""Parts of a device's step, of which the first that is going on counts."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
PRODUCT = re.compile(r"gemm|cutlass|nvjet|xmma|matmul|(^|_)mm")
BACKWARD = "autograd::engine::evaluate_function"
BETWEEN = tuple(PREFIX + label for label in ("forward ", "pp ", "optimizer"))
"""The beginnings of labels that end a backward."""

Trace = list[dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """A profile to be made: its steps, ranks and content; `id` of the command that asks for it."""

    id: str
    first: int
    last: int
    ranks: tuple[int, ...]
    content: tuple[str, ...]

    @classmethod
    def read(cls, text: str, step: int, size: int) -> Request:
        """Return the request of a file that was found after a step by a run of `size` ranks.

        Raises:
            ValueError, TypeError, KeyError: it is damaged.
        """
        body = json.loads(text)
        steps = int(body["steps"])
        ranks = body["ranks"]
        ranks = tuple(range(size)) if ranks is None else tuple(sorted({int(r) for r in ranks}))
        content = tuple(map(str, body["content"]))
        if not 1 <= steps <= MOST_STEPS or not ranks or ranks[0] < 0 or ranks[-1] >= size:
            raise ValueError(f"{steps} steps of ranks {list(ranks)}, of {size}")
        if not content or set(content) - set(CONTENT):
            raise ValueError(f"content {list(content)}")
        return cls(str(body["id"]), step + 1, step + steps, ranks, content)


def folder_of(home: Path, step: int) -> Path:
    """Return the folder of the profile that begins with a step."""
    return home / FOLDER / f"step_{step:08d}"


def trace_file(folder: Path, rank: int) -> Path:
    """Return the trace of a rank; it is there once it is whole."""
    return folder / f"trace_rank{rank}.json.gz"


def snapshot_file(folder: Path, rank: int) -> Path:
    """Return the allocator's snapshot of a rank, which torch's memory viewer shows."""
    return folder / f"memory_rank{rank}.pickle"


def facts_file(folder: Path, rank: int) -> Path:
    """Return the file with a rank's clock and the time of its last step."""
    return folder / f"rank{rank}.json"


@dataclass
class Profiled:
    """The trace of one rank, in microseconds of rank 0's clock since the earliest mark."""

    rank: int
    coords: Mapping[str, int]
    events: Trace
    step_s: float
    """The time of the last step, as the metrics have it."""
    error_us: float | None
    """The bound of the clock's error; None: the clock could not be compared."""
    parts: dict[str, float] = field(default_factory=dict)
    """Microseconds of the last step by part."""
    operations: dict[str, float] = field(default_factory=dict)
    """Microseconds of the last step by operation, without those that it calls."""
    part_of: dict[str, str] = field(default_factory=dict)
    """The part that an operation belongs to."""


def traces(folder: Path) -> list[Profiled]:
    """Return the traces of a profile, all on the clock of rank 0.

    Raises:
        CorruptData: a file is damaged.
    """
    found = []
    files = sorted(folder.glob("rank*.json"), key=lambda file: int(file.stem.strip("rank") or 0))
    marks = {}
    for file in files:
        facts = _json(file.read_bytes(), file)
        path = trace_file(folder, facts["rank"])
        if not path.is_file():
            continue
        events = _json(gzip.decompress(path.read_bytes()), path)["traceEvents"]
        mark = f"{CLOCK} {facts['mark']}"
        clock = [event for event in events if event.get("name") == mark]
        if not clock:
            raise CorruptData(f"{path}: cannot be read because its clock has no mark")
        offset = facts["offset_ns"]
        at_us = (facts["clock_ns"] + (offset or 0)) / 1e3
        marks[facts["rank"]] = (at_us, clock[0]["ts"] + clock[0]["dur"] / 2)
        error = None if offset is None else facts["error_ns"] / 1e3
        found.append(Profiled(facts["rank"], facts["coords"], events, facts["step_s"], error))
    origin = min((at for at, _ in marks.values()), default=0.0)
    for one in found:
        at, there = marks[one.rank]
        for event in one.events:
            if "ts" in event:
                event["ts"] += at - origin - there
    return found


def _json(text: bytes, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: cannot be read: {str(error)[:200]}") from None


def merge(folder: Path, ranks: Sequence[Profiled]) -> Path:
    """Write the traces of all ranks as one, a process for each rank and device."""
    merged: Trace = []
    numbers: dict[tuple[int, Any], int] = {}
    for one in ranks:
        where = ", ".join(f"{axis} {at}" for axis, at in one.coords.items())
        for event in (*one.events, *_backwards(one.events)):
            key = (one.rank, event.get("pid"))
            if key not in numbers:
                numbers[key] = len(numbers)
                name = f"rank {one.rank} ({where}), {event.get('pid')}"
                facts = {"name": "process_name", "ph": "M", "pid": numbers[key]}
                merged.append(facts | {"args": {"name": name}})
            if event.get("name") == "process_name":
                continue
            event = event | {"pid": numbers[key]}
            if "id" in event:
                event["id"] = f"{one.rank}.{event['id']}"
            merged.append(event)
    path = folder / MERGED
    draft = path.with_name(f".{path.name}")
    with gzip.open(draft, "wt", compresslevel=3) as file:
        file.write(strict_json.dumps({"traceEvents": merged}))
    draft.replace(path)
    return path


def _backwards(events: Trace) -> Iterator[dict[str, Any]]:
    """Yield labels of micro-batches' backwards: autograd's operations between two forwards."""
    main = _main_thread(events)
    open_: dict[str, Any] | None = None
    number = 0
    for event in main:
        name = str(event["name"])
        if name.startswith(BACKWARD):
            end = event["ts"] + event["dur"]
            if open_ is None:
                number += 1
                facts = {"ph": "X", "cat": "user_annotation", "name": f"{PREFIX}backward {number}"}
                open_ = facts | {key: event[key] for key in ("pid", "tid", "ts", "dur")}
            open_["dur"] = max(open_["dur"], end - open_["ts"])
        elif open_ is not None and name.startswith(BETWEEN):
            yield open_
            open_ = None
    if open_ is not None:
        yield open_


@dataclass(frozen=True)
class Piece:
    """A forward or backward of a micro-batch, in seconds since the earliest mark of the clocks."""

    forward: bool
    begin: float
    end: float


def pieces(events: Trace) -> list[Piece]:
    """Return the forwards and backwards of the last step of a trace, in order."""
    main = _main_thread(events)
    step = [event for event in main if event["name"] == STEP][-1:]
    forward = f"{PREFIX}forward "
    named = [event for event in main if str(event["name"]).startswith(forward)]
    found = [
        Piece(str(event["name"]).startswith(forward), begin / 1e6, (begin + event["dur"]) / 1e6)
        for event in (*named, *_backwards(events))
        for begin in [event["ts"]]
        if step and step[0]["ts"] <= begin <= step[0]["ts"] + step[0]["dur"]
    ]
    return sorted(found, key=lambda piece: piece.begin)


def _main_thread(events: Trace) -> Trace:
    """Return the ranges of the thread that makes the step, outer ones first."""
    steps = [event for event in events if event.get("name") == STEP and event.get("ph") == "X"]
    if not steps:
        return []
    tid = steps[-1]["tid"]
    found = [e for e in events if e.get("ph") == "X" and e.get("tid") == tid and "dur" in e]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def measure(ranks: Sequence[Profiled]) -> None:
    """Set the parts of the last step of each rank: they add up to the step.

    Of a wait for a collective, the part up to the call of the last rank is `waiting`, as far as the
    profile has the ranks of its group.
    """
    calls: dict[str, float] = {}
    for one in ranks:
        for event in _main_thread(one.events):
            call = _call(str(event["name"]))
            if call and call[2] != "wait":
                calls[call[1]] = max(calls.get(call[1], 0.0), event["ts"])
    starts = _starts(ranks)
    for one in ranks:
        if any(event.get("cat") in DEVICE for event in one.events):
            _measure_device(one, starts)
        else:
            _measure(one, calls)


def deviations(one: Profiled, planned: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of operations beyond the plan of their part, by their shares of the part's
    time; only for parts that the plan has.
    """
    found = {}
    for name, spent in one.operations.items():
        part = one.part_of.get(name, "")
        plan = planned.get(part)
        if plan is not None and one.parts.get(part):
            found[name] = spent / 1e6 * (1 - 1e6 * plan / one.parts[part])
    return found


def _call(name: str) -> tuple[str, str, str] | None:
    """Return the axis of a collective, its group and number, and its operation or `wait`."""
    words = name.removeprefix(PREFIX).split(" ")
    if not name.startswith(PREFIX) or len(words) != 4:
        return None
    return words[0], f"{words[1]} {words[2]}", words[3]


def _measure(one: Profiled, calls: Mapping[str, float]) -> None:
    main = _main_thread(one.events)
    steps = [event for event in main if event["name"] == STEP]
    if not steps:
        raise CorruptData(f"rank {one.rank}: cannot be read because its trace has no step")
    step = steps[-1]
    begin = step["ts"]
    end = begin + step["dur"]
    parts: dict[str, float] = defaultdict(float)
    operations: dict[str, float] = defaultdict(float)
    # Ranges that are open: their end, part, and the time of their own from here on.
    stack: list[tuple[float, str, str]] = [(end, "host", "")]
    at = begin

    def spend(until: float) -> None:
        nonlocal at
        _, part, name = stack[-1]
        spent = max(0.0, until - at)
        parts[part] += spent
        if name:
            operations[name] += spent
            one.part_of[name] = part
        at = max(at, until)

    for event in main:
        if event is step or not begin <= event["ts"] < end:
            continue
        while len(stack) > 1 and stack[-1][0] <= event["ts"]:
            spend(stack[-1][0])
            stack.pop()
        spend(event["ts"])
        name = str(event["name"])
        until = min(event["ts"] + event["dur"], stack[-1][0])
        call = _call(name)
        if call is not None and call[2] == "wait":
            # A transfer between stages has no other call to compare with: all of it is a bubble.
            last = until if call[0] == "pp" else calls.get(call[1], 0.0)
            late = min(max(last, event["ts"]), until)
            parts["bubble" if call[0] == "pp" else "waiting"] += late - at
            at = late
        part = _part(name, stack[-1][1])
        is_operation = not name.startswith(PREFIX) and event.get("cat") != "python_function"
        stack.append((until, part, name if is_operation else stack[-1][2]))
    while stack:
        spend(stack[-1][0])
        stack.pop()
    one.parts = {part: parts.get(part, 0.0) for part in PARTS}
    one.operations = dict(operations)


def _part(name: str, around: str) -> str:
    """Return the part of a range within a range of another part."""
    if name in PHASES:
        return PHASES[name]
    call = _call(name)
    if call is not None:
        return call[0] if call[0] in PARTS else "waiting"
    if around not in ("host", "memory") or name.startswith((PREFIX, BACKWARD)):
        return around
    word = name.rpartition("::")[2].lower()
    if any(one in word for one in ATTENTION):
        return "attention"
    if MATMUL.search(word):
        return "gemm"
    return "memory" if "::" in name else around


def _measure_device(one: Profiled, starts: Mapping[str, float]) -> None:
    """Set the parts of the last step from the work of the device: products, attention and other
    kernels first, then communication that none of them hides, then gaps.
    """
    kernels = [event for event in one.events if event.get("cat") in DEVICE]
    step = [event for event in one.events if event.get("name") == STEP and "dur" in event][-1]
    begin = step["ts"]
    # The device is behind the host: its step ends with the last kernel.
    end = max([begin + step["dur"], *(event["ts"] + event["dur"] for event in kernels)])
    edges: list[tuple[float, int, str]] = []
    for event in kernels:
        first = max(begin, event["ts"])
        last = event["ts"] + event["dur"]
        part = _kernel(event)
        late = min(max(starts.get(str(event.get("call")), 0.0), first), last)
        # Until the last rank begins a collective, the others wait.
        spans = [("waiting", first, late), (part, late, last)] if late > first else []
        for name, left, right in spans or [(part, first, last)]:
            edges += [(left, 1, name), (right, -1, name)]
        one.operations[event["name"]] = one.operations.get(event["name"], 0.0) + event["dur"]
        one.part_of[event["name"]] = part
    for event in one.events:
        if event.get("cat") == "cuda_runtime" and "Synchronize" in str(event["name"]):
            edges += [(event["ts"], 1, "sync"), (event["ts"] + event["dur"], -1, "sync")]
    parts = dict.fromkeys(PARTS, 0.0)
    active = dict.fromkeys(PARTS, 0)
    at = begin
    for moment, change, name in [*sorted(edges), (end, 0, "host")]:
        until = min(max(moment, at), end)
        parts[next((part for part in ORDER if active[part]), "host")] += until - at
        at = until
        active[name] += change
    one.parts = parts


def _kernel(event: Mapping[str, Any]) -> str:
    """Return the part of a kernel, by its name and the group of its collective."""
    name = str(event["name"]).lower()
    if "nccl" in name:
        axis = axis_of(str(event.get("args", {}).get("Process Group Description", "")))
        return axis if axis in PARTS else "waiting"
    if any(word in name for word in ATTENTION):
        return "attention"
    return "gemm" if PRODUCT.search(name) else "memory"


def _starts(ranks: Sequence[Profiled]) -> dict[str, float]:
    """Number the collectives alike on all ranks of a group, and return each one's last begin."""
    starts: dict[str, float] = {}
    for one in ranks:
        counts: dict[str, int] = defaultdict(int)
        kernels = [
            e for e in one.events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()
        ]
        for event in sorted(kernels, key=lambda event: event["ts"]):
            group = str(event.get("args", {}).get("Process Group Name", ""))
            counts[group] += 1
            # Transfers between two ranks are not numbered alike.
            if group and "sendrecv" not in event["name"].lower():
                event["call"] = f"{group} {counts[group]}"
                starts[event["call"]] = max(starts.get(event["call"], 0.0), event["ts"])
    return starts


def axis_of(description: str) -> str:
    """Return the axis of the layout whose ranks a group of megatron-core connects."""
    words = description.upper()
    if "PIPELINE" in words or "EMBEDDING" in words:
        return "pp"
    if "DATA" in words or "OPTIMIZER" in words:
        return "dp"
    if "EXPERT_MODEL" in words or "EXPERT_TENSOR_AND_MODEL" in words:
        return "ep"
    if "TENSOR" in words:
        return "tp"
    return "cp" if "CONTEXT" in words or "HIERARCHICAL" in words else "world"
