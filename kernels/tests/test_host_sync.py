"""No operation's forward or backward waits for the device: on tensors without values there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mtrain_kernels.grouped_gemm import reference
from mtrain_kernels.registry import MODELS, Op, ops
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAIT = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.equal),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount),
}
ALLOWED: dict[str, str] = {}
"""Case -> why its operation has to wait."""
META = torch.device("meta")


class HostSync(AssertionError):
    """Something would wait for the device."""


class _Raises(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        from_device = any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves((args, kwargs)))
        to_host = func.overloadpacket is aten._to_copy and torch.device(kwargs.get("device") or META).type == "cpu"
        to_host |= func.overloadpacket is aten.copy_ and not args[0].is_meta
        counted = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            one = func.overloadpacket is not aten.index and args[2].numel() == 1  # then the mask is filled
            counted = not one and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if from_device and (func.overloadpacket in WAIT or to_host or counted):
            raise HostSync(f"{func} waits for the device")
        return func(*args, **kwargs)


@contextmanager
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raises where host code would wait; kernels are not run, what launches them is."""
    from triton.runtime import interpreter

    with monkeypatch.context() as patch, _Raises():
        patch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
        yield


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches on a GPU are not those of the interpreter")
@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_no_operation_waits_for_the_device(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    impl = "triton" if "triton" in op.implementations else "auto"
    with nothing_waits(monkeypatch):
        op.launch(MODELS["tiny"])
        for case in op.cases:
            if not case.applies(MODELS["tiny"]) or case.name in ALLOWED:
                continue
            inputs = case.make(MODELS["tiny"], META, torch.bfloat16)
            outputs = [t for t in tree_leaves(case.call(inputs, impl)) if isinstance(t, Tensor) and t.requires_grad]
            assert outputs or case.backward is None, case.name
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.long().tolist(),
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.long().bincount(),
        lambda x: reference.grouped_gemm(x[:, None], torch.empty(2, 3, 1, device=META), x[:2].long()),
    ],
)
def test_what_waits_is_seen(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostSync), nothing_waits(monkeypatch):
        wait(torch.empty(4, device=META))
