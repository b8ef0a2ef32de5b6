"""A recorder of every storage and every operation of a program on tensors without memory."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mtrain.train.trace.operations import Operations
from mtrain.train.trace.shapes import Shapes

aten = torch.ops.aten
OWN = "mtrain"
"""Operations that `mtrain_kernels` registers."""
WITHOUT_SCORES = ("mtrain::attention", "mtrain::attention_backward")
"""Operations of ours that are single kernels: they hold no memory but what they read and make."""
PARTS = ("weights", "gradients", "optimizer", "other", "activations", "recompute", "temporary")
"""Kinds of storages: `other` existed before the step, `temporary` is not saved by autograd."""
HOST = "host"
"""A part that is not in the memory of the device."""
MOST_REAL = 1 << 22
"""Elements up to which small tensors, such as counts, are computed, not only shaped."""


@dataclass(frozen=True)
class Place:
    """The module that runs, and for which micro-batch."""

    phase: str
    """forward, backward, optimizer, or empty between them."""
    module: str = ""
    microbatch: int = -1
    chunk: int = 0


@dataclass
class Segment:
    """A part of a step in one phase of one micro-batch."""

    place: Place
    before: int
    """Bytes at its begin."""
    peak: int = 0
    after: int = 0
    module: str = ""
    """Module of the peak."""


@dataclass
class _Life:
    """The lifetime of a storage."""

    storage: weakref.ref[Any]
    bytes: int
    part: str
    saved: int = 0
    """Number of saved tensors that hold it."""


@dataclass
class Peak:
    """The moment at which the most bytes were alive."""

    bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    place: Place = Place("")


class Recorder(TorchDispatchMode):
    """Counts bytes by part.

    Results of small numbers only are computed; everything else has just a shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._fake.cache_enabled = False  # it would hold every storage that a tensor was set to
        self._shapes = Shapes(self._fake)
        self.live: dict[int, _Life] = {}
        self.sizes = Counter(dict.fromkeys(PARTS, 0))
        self.now = 0
        self.peak = Peak()
        self.kept = 0
        """The most bytes that saved tensors held."""
        self.segments: list[Segment] = []
        self.operations = Operations()
        self.phase = ""
        self.at = (-1, 0)
        """Micro-batch and chunk of the forward."""
        self._names: dict[int, str] = {}
        self._stack: list[str] = [""]
        self._marks: tuple[list[int], list[tuple[str, int, int]]] = ([], [])
        self._quiet = False
        self.on_host = False
        """New storages are in host memory."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record everything inside, with shapes instead of memory."""
        with ExitStack() as stack:
            stack.enter_context(self._fake)
            stack.enter_context(self)
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave).remove)
            stack.enter_context(self._resizes())
            stack.enter_context(single_rank())
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count what autograd saves as activations, or as recomputed."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def name(self, chunks: list[Any]) -> None:
        """Learn the names of modules."""
        for chunk in chunks:
            for name, module in chunk.named_modules():
                self._names[id(module)] = ".".join(w for w in name.split(".") if w != "module")

    def declare(self, part: str, tensors: list[Tensor]) -> None:
        """Assign tensors to a part for the rest of their life."""
        for tensor in tensors:
            life = self._seen(getattr(tensor, "_local_tensor", tensor))
            if life is not None and life.part in ("temporary", "other"):
                self._move(life, part)

    def settle(self) -> None:
        """Count storages without a part as `other`, from before; reset peak and operations."""
        for life in self.live.values():
            if life.part == "temporary":
                self._move(life, "other")
        self.peak = Peak()
        self.kept = 0
        self.segments = []
        self.operations = Operations()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it computes on its local tensor, which is seen
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs.values())))
        faked = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default) and faked:
            return _answer(tensors[0])
        if self._quiet:
            return func(*args, **kwargs)
        own = OPDEFS.get(func._schema.name) if func.namespace == OWN else None
        if own is not None and func._schema.name in WITHOUT_SCORES:
            with self:
                out = own._abstract_fn(*args, **kwargs)  # type: ignore[misc]
            place = self._place()
            self.operations.add(func, place.phase, place.module, args, kwargs, tensors, out)
            return out
        if own is not None:  # what is inside of an operation of ours is seen as well
            with self:
                return own._init_fn(*args, **kwargs)
        if func.namespace == "c10d":
            out = collective(func, args)
        elif func is aten._unique2.default and faked:  # all of them differ
            out = (
                args[0].new_empty(args[0].numel()),
                torch.empty_like(args[0]),
                args[0].new_empty(0),
            )
        elif func is aten.nonzero.default and faked:
            out = args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        elif func is aten.masked_select.default and not isinstance(args[1], FakeTensor):
            with unset_fake_temporarily():
                count = int(args[1].sum())
            out = args[0].new_empty(count)
        elif tensors and not faked and sum(tensor.numel() for tensor in tensors) <= MOST_REAL:
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
        elif tensors and all(isinstance(tensor, FakeTensor) for tensor in tensors):
            out = self._shapes(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        # else no module can be moved
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        place = self._place()
        for tensor in _tensors((out,)):
            self._seen(tensor)
        self.operations.add(func, place.phase, place.module, args, kwargs, tensors, out)
        self._segment(place)
        if self.now > self.peak.bytes:
            self.peak = Peak(self.now, {part: self.sizes[part] for part in PARTS}, place)
        return out

    def _place(self) -> Place:
        if torch._C._current_graph_task_id() == -1:
            return Place(self.phase, self._stack[-1], *self.at)
        node = torch._C._current_autograd_node()
        if len(self._stack) > 1 or node is None:  # computed again
            return Place("backward", self._stack[-1], *self._backward_at(node)[1:])
        return Place("backward", *self._backward_at(node))

    def _backward_at(self, node: Any) -> tuple[str, int, int]:
        numbers, places = self._marks
        number = 0 if node is None else node._sequence_nr()
        if not places or node is None or number > numbers[-1] + (1 << 40):
            return ("", *self._last_backward[1:])
        self._last_backward = places[max(0, bisect_right(numbers, number) - 1)]
        return self._last_backward

    _last_backward: tuple[str, int, int] = ("", -1, 0)

    def _segment(self, place: Place) -> None:
        if not place.phase:
            return
        last = self.segments[-1] if self.segments else None
        key = place.phase, place.microbatch, place.chunk
        if last is None or (last.place.phase, last.place.microbatch, last.place.chunk) != key:
            last = Segment(place, last.after if last else self.now)
            self.segments.append(last)
        if self.now > last.peak:
            last.peak = self.now
            last.module = place.module
        last.after = self.now

    def _enter(self, module: Any, args: Any) -> None:
        self._stack.append(self._names.get(id(module)) or self._stack[-1])
        self._mark()

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        """Attribute the nodes that autograd makes from here on to this module."""
        again = torch._C._current_graph_task_id() != -1
        at = self._last_backward[1:] if again else self.at
        numbers, places = self._marks
        number = torch._C._autograd._get_sequence_nr()
        if numbers and numbers[-1] == number:
            places[-1] = (self._stack[-1], *at)
        else:
            numbers.append(number)
            places.append((self._stack[-1], *at))

    def _seen(self, tensor: Tensor) -> _Life | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        life = self.live.get(key)
        if life is None and size:
            life = _Life(
                weakref.ref(storage, partial(self._gone, key)),
                0,
                HOST if self.on_host else "temporary",
            )
            self.live[key] = life
            self._resize(life, size)
        elif life is not None and size != life.bytes:
            self._resize(life, size)
        return life

    def _resize(self, life: _Life, size: int) -> None:
        self.sizes[life.part] += size - life.bytes
        self.now += (size - life.bytes) * (life.part != HOST)
        life.bytes = size

    def _gone(self, key: int, _: Any) -> None:
        self._resize(self.live.pop(key), 0)

    def _move(self, life: _Life, part: str) -> None:
        size = life.bytes
        self._resize(life, 0)
        life.part = part
        self._resize(life, size)

    @contextmanager
    def _resizes(self) -> Iterator[None]:
        """Record that a storage is emptied and filled again, which no operation shows."""
        real = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            out = real(storage, size)
            life = self.live.get(storage._cdata)
            if life is not None:
                self._resize(life, size)
            return out

        with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
            yield

    def _pack(self, tensor: Tensor) -> _Saved:
        life = self._seen(tensor)
        if life is not None and life.part == "temporary":
            self._move(
                life, "activations" if torch._C._current_graph_task_id() == -1 else "recompute"
            )
        if life is not None:
            life.saved += 1
        self.kept = max(self.kept, self.sizes["activations"] + self.sizes["recompute"])
        if tensor.grad_fn is None:
            return _Saved(self, tensor, life)
        self._quiet = True
        try:
            return _Saved(self, tensor.detach(), life)
        finally:
            self._quiet = False


class _Saved:
    """A saved tensor for as long as autograd holds it."""

    def __init__(self, recorder: Recorder, tensor: Tensor, life: _Life | None) -> None:
        self.recorder = recorder
        self.tensor = tensor
        self.life = life

    def __del__(self) -> None:
        life = self.life
        if life is None:
            return
        life.saved -= 1
        if not life.saved and life.part in ("activations", "recompute"):
            self.recorder._move(life, "temporary")


def _tensors(values: Any) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def collective(func: Any, args: Any) -> Any:
    """Return a process group call's result: tensors it would have filled, and finished work."""
    outs = [
        FakeWork().boxed() if "Work" in str(one.type) else args[0] for one in func._schema.returns
    ]
    return outs[0] if len(outs) == 1 else tuple(outs)


def _answer(tensor: Tensor) -> Any:
    """Return a stand-in for an unknown number: norms are 0, so nothing is clipped or skipped."""
    return 0.0 if tensor.dtype.is_floating_point else tensor.dtype is torch.bool or 1


@contextmanager
def single_rank() -> Iterator[None]:
    """Replace generators and other ranks, which do not exist in a trace.

    States of generators are numbers, which megatron-core's trackers hand back and forth; objects of
    all ranks are alike. A parameter of another format keeps its attributes, as one with memory
    does.
    """
    get = torch.get_rng_state
    put = torch.set_rng_state
    apply = torch.nn.Module._apply

    def real_get() -> Tensor:
        with _disable_current_modes():
            return get()

    def real_put(state: Tensor) -> None:
        with _disable_current_modes():
            put(state)

    def gather(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    def with_attributes(self: Any, *args: Any, **more: Any) -> Any:
        before = {name: dict(vars(p)) for name, p in self._parameters.items() if p is not None}
        out = apply(self, *args, **more)
        for name, attributes in before.items():
            after = vars(self._parameters[name])
            after.update({key: value for key, value in attributes.items() if key not in after})
        return out

    with (
        mock.patch.object(torch, "get_rng_state", real_get),
        mock.patch.object(torch, "set_rng_state", real_put),
        mock.patch.object(dist, "all_gather_object", gather),
        mock.patch.object(torch.nn.Module, "_apply", with_attributes),
    ):
        yield
