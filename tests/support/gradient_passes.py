"""A recorder of operations that pass over the buffers of gradients, on tensors without memory.

A product that adds the gradient of a weight reads and writes the buffer as it computes. Any other
operation that writes to it in a micro-batch is a pass of its own over four bytes of each weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
OWN = "mtrain"
# An embedding writes to the rows of its tokens only.
PRODUCTS = frozenset(
    {aten.addmm.dtype_out, aten.addmm_.default, aten.addmm.out, aten.index_put_.default}
)
ONCE = frozenset({aten.zero_.default, aten.fill_.Scalar})
"""Operations that empty the buffers between steps."""


class GradientPasses(TorchDispatchMode):
    """Operations that write to the gradients of matrices, apart from products and our kernels.

    `found` holds the weight and the operation of each pass. A buffer as a whole is written by
    data parallelism once a step, which does not count.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        super().__init__()
        self.found: list[str] = []
        self.products = 0
        self.names: dict[tuple[int, int, int], str] = {}
        for name, weight in (named for chunk in chunks for named in chunk.named_parameters()):
            gradient = getattr(weight, "main_grad", None)
            if gradient is not None and gradient.ndim > 1:
                self.names[_place(gradient)] = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, list | tuple) else (given,):
                name = self.names.get(_place(tensor)) if isinstance(tensor, Tensor) else None
                if name is not None:
                    self._written(name, func)
        return func(*args, **kwargs)

    def _written(self, name: str, func: Any) -> None:
        if func in PRODUCTS or func.namespace == OWN:
            self.products += 1
        elif func not in ONCE:
            self.found.append(f"{name}: {func}")


def _place(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()
