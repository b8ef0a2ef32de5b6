"""Results of operations on `torch.device("meta")` that depend on values or leave it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mtrain.config.machine.devices import CPU

aten = torch.ops.aten
WAITS = "the host reads a tensor"
DEPENDS = "a shape depends on values"
COPIES = "the host's memory is copied"
READS = frozenset({aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.item})
SIZES = frozenset(
    {
        aten.nonzero,
        aten.masked_select,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
        aten.bincount,
    }
)
_MASKS = (torch.bool, torch.uint8)


def stand_in(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    """Return an operation's problem in a CUDA graph, and a made-up result, if any."""
    packet = func.overloadpacket
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    on_device = any(tensor.is_meta for tensor in given)
    if on_device and packet in READS:
        return WAITS, packet in (aten.equal, aten.is_nonzero) or _number(given[0])
    if on_device and (packet in SIZES or _counts(func, args, kwargs)):
        return DEPENDS, _some(func, args, kwargs)
    target = _target(packet, args, kwargs)
    if target is None or not given or target == given[-1].device.type:
        return None, NotImplemented
    if target == CPU.name:
        return WAITS, _on_host(func, args, kwargs)
    return (COPIES if target == "meta" else None), NotImplemented


def _counts(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a selection has as many elements as a mask or as counts say."""
    packet = func.overloadpacket
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if packet not in (aten.index, aten.index_put, aten.index_put_):
        return False
    # A mask that selects where one number goes is filled, without a count.
    filled = packet is not aten.index and args[2].numel() == 1
    return not filled and any(i is not None and i.dtype in _MASKS for i in args[1])


def _number(tensor: Tensor) -> Any:
    if tensor.dtype.is_floating_point:
        return 1.0
    return True if tensor.dtype is torch.bool else 1


def _some(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a result as if half of the elements were selected."""
    packet = func.overloadpacket
    x = args[0]
    half = max(1, x.numel() // 2)
    if packet is aten.nonzero:
        return x.new_empty((half, x.ndim), dtype=torch.int64)
    if packet in (aten._unique2, aten.unique_consecutive, aten.unique_dim):
        return x.new_empty(half), torch.empty_like(x), x.new_empty(half, dtype=torch.int64)
    if packet is aten.index:
        mask = next(i for i in args[1] if i is not None)
        return x.new_empty((max(1, mask.numel() // 2), *x.shape[mask.ndim :]))
    if packet in (aten.index_put, aten.index_put_):
        return x
    if packet is aten.bincount:
        return x.new_empty(max(1, kwargs.get("minlength", 1)), dtype=torch.int64)
    if packet is aten.repeat_interleave:
        return x.new_empty(x.numel(), dtype=torch.int64)
    return x.new_empty(half)


def _target(packet: Any, args: Any, kwargs: Any) -> str | None:
    """Return the kind of device that an operation copies to, if it copies."""
    if packet is aten._to_copy and kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type
    if packet is aten.copy_:
        return args[0].device.type
    return None


def _on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """Return zeros on the host, as if they had been copied."""
    if func.overloadpacket is aten.copy_:
        return args[0].zero_()
    dtype = kwargs.get("dtype") or args[0].dtype
    return torch.zeros(args[0].shape, dtype=dtype, device=CPU.name)
