"""A recorder of what a CUDA graph would keep: kernels, memory and numbers of a call, on tensors of
`torch.device("meta")`.

A graph replays the launches of its capture, with the same shapes, numbers and addresses. So
`Capture` runs the host's side of a call twice or more and compares. It reports, with file and line,
what a capture cannot take (the host reads a tensor, waits, or copies pageable memory), what a
replay would not repeat (another launch, shape or number), and memory that is not the graph's own:
read and freed since, read elsewhere the next time, or made inside and kept by Python.
"""

from __future__ import annotations

import gc
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtrain.devices import cpu_namespace
from mtrain.train.trace.stand_ins import COPIES, stand_in

aten = torch.ops.aten
OWN = "mtrain"
"""Namespace of the operators of `mtrain_kernels`, whose host code is run and not only their
shapes.
"""
SYNCHRONISES = "the host waits for the device"
CHANGES = "a replay would not repeat it"
FREED = "it is freed after the capture"
MOVED = "it lies elsewhere the next time"
KEPT = "the graph's memory is read outside"
_HERE = (__file__, str(Path(__file__).with_name("captured_steps.py")))
_TORCH = str(Path(torch.__file__).parent)
_PYTHON = str(Path(weakref.__file__).parent)


@dataclass(frozen=True)
class Finding:
    """Something that a CUDA graph cannot take or would not repeat."""

    kind: str
    what: str
    where: str
    """File and line, `path:line`, as far below the package's folder as it is unique."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.kind}"


@dataclass(frozen=True)
class _Event:
    """One operation or launch, as a graph keeps it."""

    name: str
    given: tuple[Any, ...]
    where: str


@dataclass
class _Storage:
    """The memory of a tensor, for as long as it lives."""

    alive: weakref.ref[Any]
    label: tuple[Any, ...]
    where: str = ""
    event: int = 0
    """Number of operations before the first that used it."""


@dataclass
class _Recording:
    """Everything that one run of the call did."""

    events: list[_Event] = field(default_factory=list)
    outside: list[_Storage] = field(default_factory=list)
    """Memory that the run read or wrote and did not allocate, in order."""
    made: list[_Storage] = field(default_factory=list)
    known: dict[int, _Storage] = field(default_factory=dict)
    """All memory that is alive, by the identity of its storage."""
    returned: set[int] = field(default_factory=set)
    """Memory of results, which others may read until the next run, by the identity of its
    storage.
    """


class Capture:
    """Runs of one call, of which the first is the capture, and what was found in them."""

    def __init__(self, findings: list[Finding] | None = None) -> None:
        self.findings: list[Finding] = [] if findings is None else findings
        self._first: _Recording | None = None

    def begun(self) -> _Recording:
        """Return a new run, without any part."""
        return _Recording()

    @contextmanager
    def part(self, run: _Recording, *inputs: Any) -> Iterator[None]:
        """Record a part of a run: its forward, or its backward.

        The memory of the tensors in `inputs` may be other memory each time, as their values are
        copied to where the graph reads them.
        """
        recorder = _Recorder(run, self.findings)
        recorder.declare(inputs)
        with recorder, recorder.watching():
            _ACTIVE.append(recorder)
            try:
                yield
            finally:
                _ACTIVE.pop()

    def returns(self, run: _Recording, *outputs: Any) -> None:
        """Learn results of a run, which others may read until the next one."""
        run.returned |= {id(tensor.untyped_storage()) for tensor in _tensors(outputs)}

    def ended(self, run: _Recording) -> None:
        """Compare a run with the first.

        Call it where nothing of the run is needed any more, after a collection of garbage: what it
        made and Python still holds must not be read.
        """
        for storage in run.made:
            alive = storage.alive()
            if alive is not None and id(alive) not in run.returned:
                _keep(alive, storage)
        if self._first is None:
            self._first = run
        else:
            self._compare(self._first, run)

    def _compare(self, first: _Recording, run: _Recording) -> None:
        same = self._first_difference(first, run)
        for old, new in zip(first.outside, run.outside, strict=False):
            was = old.alive()
            # Past the first other operation, these are other operands.
            if max(old.event, new.event) > same:
                return
            if was is None:
                self._found(FREED, "memory that the graph reads", old.where)
            elif was is not new.alive():
                self._found(MOVED, "memory that the graph reads", new.where)

    def _first_difference(self, first: _Recording, run: _Recording) -> int:
        """Report the first operation that is another one; return how many are alike."""
        pairs = zip(first.events, run.events, strict=False)
        for number, (old, new) in enumerate(pairs):
            if (old.name, old.given) != (new.name, new.given):
                self._found(CHANGES, _difference(old, new), new.where)
                return number
        both = min(len(first.events), len(run.events))
        if len(first.events) != len(run.events):
            extra = max(first.events, run.events, key=len)[both]
            what = f"{len(first.events)} operations, then {len(run.events)} with {extra.name}"
            self._found(CHANGES, what, extra.where)
        return both

    def _found(self, kind: str, what: str, where: str) -> None:
        finding = Finding(kind, what, where)
        if finding not in self.findings:
            self.findings.append(finding)


def replayed(
    call: Callable[[int], Any],
    *inputs: Any,
    runs: int = 2,
    between: Callable[[], Any] = lambda: None,
) -> list[Finding]:
    """Return the findings about a call with the number of the run, whose result is dropped;
    `between` runs after each, outside of the graph.
    """
    capture = Capture()
    for number in range(runs):
        run = capture.begun()
        with capture.part(run, *inputs):
            call(number)
        gc.collect()
        capture.ended(run)
        with Outside(capture.findings):
            between()
    return capture.findings


class Outside(TorchDispatchMode):
    """The work between graphs: it may read the host, but not what a graph made and did not
    return.

    Numbers and shapes that depend on values are made up, as tensors have none.
    """

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__()
        self.findings = findings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)) if _KEPT else ():
            if id(tensor.untyped_storage()) in _KEPT:
                self._found(KEPT, str(func), _where())
        _, out = stand_in(func, args, kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out

    def _found(self, kind: str, what: str, where: str) -> None:
        finding = Finding(kind, what, where)
        if finding not in self.findings:
            self.findings.append(finding)


class _Recorder(Outside):
    def __init__(self, run: _Recording, findings: list[Finding]) -> None:
        super().__init__(findings)
        self.run = run
        self.known = run.known
        self.forward: tuple[list[int], list[str]] = ([], [])
        """Numbers of autograd's nodes, and the lines whose operations made them."""

    def declare(self, inputs: Any) -> None:
        """Learn the tensors that a graph has a place of its own for."""
        for number, tensor in enumerate(_tensors(inputs)):
            storage = tensor.untyped_storage()
            if id(storage) not in self.known:
                self._learn(storage, ("input", number), "")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record launches of Triton and waits for the device, which are no operations of torch."""
        with ExitStack() as stack:
            for owner, name in _WAITING:
                stack.enter_context(mock.patch.object(owner, name, self._waiting(owner, name)))
            for name in ("tensor", "as_tensor"):
                stack.enter_context(mock.patch.object(torch, name, self._made_on_host(name)))
            interpreter = sys.modules.get("triton.runtime.interpreter")
            if interpreter is not None:
                executor = interpreter.GridExecutor
                stack.enter_context(mock.patch.object(executor, "__call__", self._launcher()))
            yield

    def _waiting(self, owner: Any, name: str) -> Callable[..., Any]:
        real = getattr(owner, name)

        def wait(*args: Any, **kwargs: Any) -> Any:
            self._found(SYNCHRONISES, name, _where())
            return real(*args, **kwargs)

        return wait

    def _made_on_host(self, name: str) -> Callable[..., Tensor]:
        """Return `torch.tensor`, which makes memory on the host and copies it to the device."""
        real = getattr(torch, name)

        def make(*args: Any, **kwargs: Any) -> Tensor:
            made: Tensor = real(*args, **kwargs)
            storage = made.untyped_storage()
            # A tensor that is given comes back, or is copied by an operation.
            given = isinstance(args[0], Tensor)
            if made.is_meta and not given:
                self._found(COPIES, f"torch.{name}", _where())
                self.run.made.append(self._learn(storage, ("host", name), _where()))
            return made

        return make

    def _launcher(self) -> Callable[..., None]:
        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            grid = kernel.grid(given) if callable(kernel.grid) else kernel.grid
            self._event(f"kernel {kernel.fn.__name__}", (tuple(grid), given), ())

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = OPDEFS.get(func._schema.name) if func.namespace == OWN else None
        if own is not None:
            with self:
                return own._init_fn(*args, **kwargs)
        # Inside of an operator of ours, operations come whole that autograd takes apart elsewhere.
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = self._run(func, args, kwargs)
        if not func.is_view and func.overloadpacket is not aten.detach:
            self._event(str(func), (args, kwargs), out)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind, out = stand_in(func, args, kwargs)
        if kind is not None:
            self._found(kind, str(func), _where())
        return func(*args, **kwargs) if out is NotImplemented else out

    def _event(self, name: str, given: Any, out: Any) -> None:
        where = self._place()
        signature = tuple(self._signature(value, where) for value in _leaves(given))
        self.run.events.append(_Event(name, signature, where))
        at = len(self.run.events)
        for number, tensor in enumerate(_tensors(out)):
            storage = tensor.untyped_storage()
            if tensor.is_meta and id(storage) not in self.known:
                self.run.made.append(self._learn(storage, ("made", at, number), where))

    def _signature(self, value: Any, where: str) -> Any:
        if not isinstance(value, Tensor):
            # By its text: a NaN is a NaN again.
            return repr(value) if isinstance(value, _PLAIN) else type(value).__name__
        shape = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset()
        if not value.is_meta:
            # Kernels take numbers of the host by value.
            return (*shape, repr(value.item())) if value.numel() == 1 else shape
        storage = value.untyped_storage()
        found = self.known.get(id(storage))
        if found is None and id(storage) in _KEPT:
            self._found(KEPT, f"what {_KEPT[id(storage)].where} made", where)
        if found is None:
            label = ("outside", len(self.run.outside))
            found = self._learn(storage, label, where)
            self.run.outside.append(found)
        return (*shape, found.label)

    def _learn(self, storage: Any, label: tuple[Any, ...], where: str) -> _Storage:
        key = id(storage)
        known = self.known
        alive = weakref.ref(storage, lambda _: known.pop(key, None))
        found = _Storage(alive, label, where, len(self.run.events))
        known[key] = found
        return found

    def _place(self) -> str:
        node = torch._C._current_autograd_node()
        where = _where()
        numbers, places = self.forward
        if torch._C._current_graph_task_id() == -1 or node is None:
            number = torch._C._autograd._get_sequence_nr() - 1
            if not numbers or numbers[-1] < number:
                numbers.append(number)
                places.append(where)
            return where
        own = any(part in where for part in ("mtrain", "megatron", "tests"))
        at = bisect_right(numbers, node._sequence_nr()) - 1
        return where if own or at < 0 else f"{places[at]} (its backward, {node.name()})"


_ACTIVE: list[_Recorder] = []
_KEPT: dict[int, _Storage] = {}
"""Memory that a run made and Python holds, by the identity of its storage."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
_WAITING: Sequence[tuple[Any, str]] = (
    (cpu_namespace, "synchronize"),
    (cpu_namespace.Stream, "synchronize"),
    (cpu_namespace.Event, "synchronize"),
    (cpu_namespace.Event, "elapsed_time"),
)


def _keep(alive: Any, storage: _Storage) -> None:
    key = id(alive)
    again = weakref.ref(alive, lambda _: _KEPT.pop(key, None))
    _KEPT[key] = _Storage(again, storage.label, storage.where)


def _leaves(values: Any) -> Iterator[Any]:
    for leaf in tree_leaves(values):
        base = getattr(leaf, "base", None)
        if type(leaf).__name__ == "TensorDescriptor":
            yield base
            yield tuple(leaf.block_shape)
        else:
            yield leaf


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _where() -> str:
    """Return the line that called torch: the innermost one outside of torch and of Python."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if (
            name not in _HERE
            and not name.startswith((_TORCH, _PYTHON, "<"))
            and "/triton/" not in name
        ):
            return f"{_below(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def recording() -> bool:
    """Return whether a recorder watches."""
    return bool(_ACTIVE)


def caller() -> str:
    """Return the line that called torch or megatron-core's bookkeeping."""
    return _where()


def _below(name: str) -> str:
    for root in ("/site-packages/", "/src/", "/kernels/"):
        if root in name:
            return name.rsplit(root, 1)[1]
    return "/".join(Path(name).parts[-3:])


def _difference(old: _Event, new: _Event) -> str:
    if old.name != new.name:
        return f"{old.name} and then {new.name}"
    pairs = zip(old.given, new.given, strict=False)
    changed = next(((a, b) for a, b in pairs if a != b), (len(old.given), len(new.given)))
    return f"{old.name} with {changed[0]} and then {changed[1]}"
