"""No operation's forward or backward waits for the device: on tensors without values there is
nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mtrain_kernels.attention.flash import partial_attention
from mtrain_kernels.attention.seen import Seen, table
from mtrain_kernels.causal_conv1d.op import causal_conv1d
from mtrain_kernels.fp8_linear.op import AddProduct, Recipe, Shares, fp8_linear, weights_stay
from mtrain_kernels.gated_delta_rule.op import gated_delta_rule
from mtrain_kernels.grouped_gemm import op as grouped
from mtrain_kernels.grouped_gemm import reference
from mtrain_kernels.linear_cross_entropy.op import linear_cross_entropy, token_cross_entropy
from mtrain_kernels.moe_permute.op import permute, plan, row_weights, unpermute
from mtrain_kernels.moe_router.op import moe_router
from mtrain_kernels.norm.operand import norm_quantized
from mtrain_kernels.optimizer.fused_adam import FusedAdam
from mtrain_kernels.optimizer.muon import Muon
from mtrain_kernels.optimizer.op import clip_grad_norm_
from mtrain_kernels.optimizer.soap import Soap, new_factors
from mtrain_kernels.quantize import op as quantize
from mtrain_kernels.registry import MODELS, Op, ops
from mtrain_kernels.rope.op import rope
from mtrain_kernels.ssd.op import ssd
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAIT = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
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
        to_host = (
            func.overloadpacket is aten._to_copy
            and torch.device(kwargs.get("device") or META).type == "cpu"
        )
        to_host |= func.overloadpacket is aten.copy_ and not args[0].is_meta
        counted = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            # then the mask is filled
            one = func.overloadpacket is not aten.index and args[2].numel() == 1
            counted = not one and any(
                i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
            )
        if from_device and (func.overloadpacket in WAIT or to_host or counted):
            raise HostSync(f"{func} waits for the device")
        return func(*args, **kwargs)


@contextmanager
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise if host code would wait; kernels do not run, but the code that launches them does."""
    from triton.runtime import interpreter

    with monkeypatch.context() as patch, _Raises():
        patch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
        yield


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches on a GPU are not those of the interpreter"
)
@pytest.mark.parametrize("op", ops().values(), ids=lambda op: op.name)
def test_host_sync_no_operation_waits(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    impl = "triton" if "triton" in op.implementations else "auto"
    with nothing_waits(monkeypatch):
        op.launch(MODELS["tiny"])
        for case in op.cases:
            if not case.applies(MODELS["tiny"]) or case.name in ALLOWED:
                continue
            inputs = case.make(MODELS["tiny"], META, torch.bfloat16)
            outputs = [
                t
                for t in tree_leaves(case.call(inputs, impl))
                if isinstance(t, Tensor) and t.requires_grad
            ]
            assert outputs or case.backward is None, case.name
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META, requires_grad=True)


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def losses() -> Iterator[Any]:
    given = leaf(40, 16), leaf(128, 16), numbers(40)
    classes = torch.empty(120, device=META)
    more: dict[str, Any] = {
        "class_weights": classes,
        "vocab_size": 120,
        "z_loss": 1e-4,
        "label_smoothing": 0.1,
    }
    for gradient in (None, lambda weight, made, factor: made * factor):
        weights = torch.empty(40, device=META)
        yield linear_cross_entropy(
            *given, weights, ranked=True, chunk=8, gradient=gradient, **more, impl="triton"
        ).total
    yield token_cross_entropy(*given, soft_cap=30.0, **more, impl="triton")


def operands() -> Iterator[Any]:
    x = leaf(40, 256)
    weight = leaf(256)
    bias = leaf(256)
    one = torch.empty(1, device=META)
    for layout, multiplier in (("mx", None), (None, None), (None, one)):
        given = {"layout": layout, "multiplier": multiplier, "share": lambda most: most}
        y, total, operand = norm_quantized(
            x, x, weight, bias, 1e-5, subtract_mean=True, impl="triton", **given
        )
        operand.transposed(*operand.kept)
        yield y, total
    for layout in quantize.LAYOUTS:
        data, scale, *_ = quantize.quantize_blocks(x, layout=layout, transpose=True, impl="triton")
        quantize.dequantize_blocks(data, scale, layout=layout, impl="triton")
    quantize.dequantize_nvfp4(*quantize.quantize_nvfp4(x, impl="triton"), impl="triton")
    delayed = quantize.quantize_tensorwise(
        x, multiplier=quantize.reference.delayed_multiplier(one, "e4m3"), impl="triton"
    )
    quantize.reference.push_amax_(torch.empty(4, device=META), delayed.amax)


def linear_layers() -> Iterator[Any]:
    x = leaf(40, 128)
    weight = leaf(64, 128)
    norm = leaf(128)
    shares = Shares(*[lambda most: most] * 3)
    with weights_stay():
        for kind in ("tensorwise", "blockwise"):
            recipe = Recipe(kind)
            y, _, operand = norm_quantized(
                x, None, norm, None, 1e-5, subtract_mean=False, layout=recipe.layout, impl="triton"
            )
            yield fp8_linear(
                y, weight, recipe, operand=operand, shares=shares, gradient=_kept, impl="triton"
            )


def _kept(weight: Tensor, add: AddProduct) -> Tensor:
    add(torch.empty(weight.shape, device=META))
    return torch.empty_like(weight)


def experts() -> Iterator[Any]:
    counts = numbers(8, dtype=torch.int32)
    bias = torch.empty(8, device=META)
    heads = [leaf(32, 16) for _ in range(8)]
    buffers = [torch.empty(32, 16, device=META) for _ in heads]
    routes = {"score": "sigmoid", "expert_bias": bias, "groups": 4, "group_topk": 2}
    for how, added in (
        ({"capacity": 4, "pad_to": 16}, None),
        ({"blocks": 2, "rows": 96}, lambda: buffers),
    ):
        weights, chosen, _ = moe_router(
            leaf(40, 8, dtype=torch.float32), 2, **routes, impl="triton"
        )
        # Experts that were chosen before, as in routing replay.
        weights, chosen, _ = moe_router(
            leaf(40, 8, dtype=torch.float32), 2, **routes, experts=chosen, impl="triton"
        )
        made = plan(chosen, 8, **how)
        rows = permute(leaf(40, 16), made, impl="triton")
        shares = row_weights(weights, made)
        gated = grouped.grouped_gated(
            rows, heads, counts, "swiglu", shares, impl="triton", main_grads=added
        )
        back = grouped.grouped_gemm(gated, leaf(8, 16, 16), counts, leaf(8, 16), impl="triton")
        yield (
            unpermute(back, made, impl="triton"),
            grouped.rows_of(leaf(8, 16), counts, 96, impl="triton"),
        )


def sequences() -> Iterator[Any]:
    marks = numbers(1, 40)
    edges = numbers(3, dtype=torch.int32)
    q = leaf(1, 40, 2, 16)
    k = leaf(1, 40, 2, 16)
    v = leaf(1, 40, 4, 16)
    gate = leaf(1, 40, 4, dtype=torch.float32)
    yield gated_delta_rule(q, k, v, gate, gate, l2norm=True, segments=marks, edges=edges, chunk=16)
    yield ssd(v, gate, leaf(4), k, q, d=leaf(4), segments=marks, chunk=16)
    yield causal_conv1d(leaf(1, 8, 40), leaf(8, 4), leaf(8), segments=marks, impl="triton")
    cos = torch.empty(40, 8, device=META)
    yield rope(q, k, cos, cos, positions=marks, q_weight=leaf(16), k_weight=leaf(16), impl="triton")
    seen = Seen(table=table(numbers(40), numbers(40), (8, 0), edges))
    yield partial_attention(
        *(x.transpose(1, 2) for x in (q, k, k)), seen=seen, sink=leaf(2), softcap=5.0
    )


def optimizers() -> Iterator[Any]:
    params = [torch.nn.Parameter(leaf(32, 16)), torch.nn.Parameter(leaf(16))]
    for p in params:
        p.grad = torch.empty_like(p)
    eight: dict[str, Any] = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
    for how in (
        {"capturable": True},
        eight | {"stochastic_rounding": True},
        eight | {"master_weights": True},
    ):
        adam = FusedAdam(params, impl="triton", **how)
        adam.step()
        clip_grad_norm_([p.grad for p in params if p.grad is not None], 1.0, impl="triton")
        adam.step(grad_scale=torch.empty((), device=META))
    matrix = torch.nn.Parameter(leaf(32, 16, dtype=torch.float32))
    matrix.grad = torch.empty_like(matrix)
    Muon([{"params": [matrix], "matrix": "whole"}], impl="triton").step()
    soap = Soap([{"params": [matrix], "matrix": "whole", "step": 1}], impl="triton")
    soap.factors[id(matrix)] = new_factors(matrix.shape, 64, META)
    soap.step()
    yield ()


PATHS = (losses, operands, linear_layers, experts, sequences, optimizers)
"""Calls of training other than the measured cases: other arguments, gradients added to buffers,
optimizers.
"""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches on a GPU are not those of the interpreter"
)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
def test_host_sync_no_training_path_waits(
    path: Callable[[], Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    with nothing_waits(monkeypatch):
        for found in path():
            outputs = [t for t in tree_leaves(found) if isinstance(t, Tensor) and t.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


def test_host_sync_soap_bases_wait_when_made_and_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect the host to wait: a decomposition raises there on non-finite input, and the host needs
    the number of vectors.
    """
    matrix = torch.nn.Parameter(leaf(8, 4, dtype=torch.float32))
    for done, frequency in ((0, 10), (10, 10)):
        matrix.grad = torch.empty_like(matrix)
        soap = Soap(
            [{"params": [matrix], "matrix": "whole", "step": done}],
            precondition_frequency=frequency,
        )
        soap.factors[id(matrix)] = new_factors(matrix.shape, 64, META)
        with pytest.raises(HostSync), nothing_waits(monkeypatch):
            soap.step()


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
        lambda x: reference.grouped_gemm(
            x[:, None], torch.empty(2, 3, 1, device=META), x[:2].long()
        ),
    ],
)
def test_host_sync_wait_is_found(wait: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostSync), nothing_waits(monkeypatch):
        wait(torch.empty(4, device=META))
