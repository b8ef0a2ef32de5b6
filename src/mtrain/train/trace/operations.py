"""A step's operations: by module, their shapes, counts and FLOPs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NOTHING = {
    "detach",
    "alias",
    "lift_fresh",
    "empty",
    "empty_strided",
    "new_empty",
    "empty_like",
    "new_empty_strided",
}
"""Operations that compute nothing."""

_IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}

Key = tuple[str, str, str, tuple[tuple[int, ...], ...], str]


class Operations:
    """Counts equal operations."""

    def __init__(self) -> None:
        self._counts: dict[Key, int] = {}
        self._flops: dict[Key, int] = {}
        self._modules: dict[str, str] = {}
        self._skipped: dict[Any, bool] = {}

    def add(
        self,
        func: Any,
        phase: str,
        module: str,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        out: Any,
    ) -> None:
        """Count an operation, unless it is a view."""
        skipped = self._skipped.get(func)
        if skipped is None:
            skipped = func.is_view or func.namespace == "prim" or func._opname in _NOTHING
            self._skipped[func] = skipped
        if skipped:
            return
        place = self._modules.get(module)
        if place is None:
            # Layers of a model are alike: their operations are one row of the table.
            place = _INDEX.sub("*", module)
            self._modules[module] = place
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        key = phase, place, func._overloadpacket._qualified_op_name, shapes, _dtype(tensors, out)
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        # The formula of an operation runs once for each kind of arguments.
        if not count:
            self._flops[key] = _flops(func, args, kwargs, out)

    def table(self) -> list[dict[str, Any]]:
        """Return all of them, those with the most FLOPs first."""
        rows = [
            {
                "phase": key[0],
                "module": key[1],
                "op": key[2].replace("::", "."),
                "shapes": [list(shape) for shape in key[3]],
                "dtype": key[4],
                "times": count,
                "flops": self._flops[key],
            }
            for key, count in self._counts.items()
        ]
        return sorted(rows, key=lambda row: -row["flops"] * row["times"])

    def flops(self) -> int:
        """Return the FLOPs of all operations."""
        return sum(self._flops[key] * count for key, count in self._counts.items())


def _dtype(tensors: list[Tensor], out: Any) -> str:
    first = tensors[0] if tensors else out
    return str(first.dtype).removeprefix("torch.") if isinstance(first, Tensor) else ""


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    # torch has no formula for the attention of a CPU, nor for ours.
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return _attention(args[0], args[1], args[2])
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        # backward: five GEMMs in place of two, as scores are computed again
        return _attention(args[1], args[2], args[3]) * 5 // 2
    if packet._qualified_op_name == "mtrain::attention":
        return _attention(args[0], args[1], args[2])
    if packet._qualified_op_name == "mtrain::attention_backward":
        return _attention(args[2], args[3], args[4]) * 5 // 2
    formula = flop_registry.get(_IN_PLACE.get(packet, packet))
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the FLOPs of attention to every key: two for each pair in both GEMMs."""
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
