"""Results of operations on tensors without memory, found once for each kind of arguments.

`FakeTensorMode` runs the operation each time; the same operation on the same shapes gives the same
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_Made = Callable[[Sequence[Any], Any], Any]
"""Makes a result from arguments of a kind that was seen before."""
_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_RESIZE = {"resize_", "resize_as_", "set_", "_resize_output_", "lift", "lift_fresh"}


class Shapes:
    """Operations on the tensors of a `FakeTensorMode`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, _Made | None] = {}
        self._how: dict[Any, Callable[[Any, Any, Any], Any] | None] = {}

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of `func`, whose tensor arguments have shapes but no memory."""
        if func not in self._how:
            self._how[func] = self._chosen(func)
        how = self._how[func]
        return func(*args, **kwargs) if how is None else how(func, args, kwargs)

    def _chosen(self, func: Any) -> Callable[[Any, Any, Any], Any] | None:
        by_values = any(tag in func.tags for tag in _BY_VALUES)
        # Results that depend on values, and operations that resize, are never remembered.
        if by_values or func.namespace != "aten" or func._opname in _RESIZE:
            return None
        if func.is_view or func is torch.ops.aten._unsafe_view.default:
            return self._view
        return self._remembered

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        device = args[0].fake_device
        with in_kernel_invocation_manager(self._mode):
            out = func(*args, **kwargs)
        if isinstance(out, FakeTensor):  # the argument itself, which already had this shape
            return out
        if isinstance(out, Tensor):
            return FakeTensor(self._mode, out, device)
        return type(out)(FakeTensor(self._mode, one, device) for one in out)

    def _remembered(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = func, tuple(_kind(args)), tuple(kwargs), tuple(_kind(kwargs.values()))
        try:
            seen = key in self._known
            made = self._known.get(key)
        except TypeError:  # an argument that is no key
            return func(*args, **kwargs)
        if made is not None:
            return made(args, kwargs)
        out = func(*args, **kwargs)
        if not seen:
            again = tuple(_kind(args)), tuple(_kind(kwargs.values()))
            known = again == (key[1], key[3])  # and none was resized
            self._known[key] = (
                self._learned(func, out, _storages((*args, *kwargs.values()))) if known else None
            )
        return out

    def _learned(self, func: Any, out: Any, read: set[int]) -> _Made | None:
        """Return a function that makes the results of an operation, which read some storages, from
        shapes; None if shapes do not determine them.
        """
        returns = func._schema.returns
        written = [one.alias_info is not None for one in func._schema.arguments]
        if any(one.alias_info is not None for one in returns) or (not returns and any(written)):
            return self._written(func)
        if any(written):
            return None
        outs = [out] if isinstance(out, Tensor) else out
        if (
            not isinstance(outs, list | tuple)
            or not all(_plain(one) for one in outs)
            or read & _storages(outs)
        ):
            return None
        facts = [(one.shape, one.stride(), one.dtype, one.device) for one in outs]
        make = self._new
        if isinstance(out, Tensor):
            return lambda args, kwargs: make(*facts[0])
        kind = type(out)
        return lambda args, kwargs: kind(make(*fact) for fact in facts)

    def _written(self, func: Any) -> _Made | None:
        """Return the function of an operation that writes into an argument it may return."""
        schema = func._schema
        if not schema.returns:
            return lambda args, kwargs: None
        if len(schema.returns) > 1 or schema.returns[0].alias_info is None:
            return None
        shared = schema.returns[0].alias_info.before_set
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.before_set == shared:
                name = argument.name
                return lambda args, kwargs: args[place] if place < len(args) else kwargs[name]
        return None

    def _new(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> FakeTensor:
        with in_kernel_invocation_manager(self._mode):
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self._mode, meta, device)


def _plain(out: Any) -> bool:
    """Return whether a tensor has storage of its own that shape and strides determine."""
    if (
        not isinstance(out, FakeTensor)
        or out.storage_offset()
        or out.layout is not torch.strided
        or out.is_complex()
    ):
        return False
    last = sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True))
    return out.untyped_storage().nbytes() == (
        0 if not out.numel() else (last + 1) * out.element_size()
    )


def _storages(values: Any) -> set[int]:
    every: set[int] = set()
    for one in values:
        if isinstance(one, Tensor):
            every.add(one.untyped_storage()._cdata)
        elif isinstance(one, list | tuple):
            every |= _storages(one)
    return every


def _kind(values: Any) -> Iterator[Any]:
    """Yield the arguments that determine the result's shapes; numbers with their types."""
    for one in values:
        if isinstance(one, Tensor):
            yield one.shape, one.stride(), one.dtype, one.storage_offset(), one.device
        elif isinstance(one, list | tuple):
            yield tuple(_kind(one))
        else:
            yield type(one), one
