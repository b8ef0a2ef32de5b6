"""Attention of short sequences on a CPU against the definition in fp64, and as near to it as
torch's fused kernel.
"""

from __future__ import annotations

import pytest
import torch
from mtrain_kernels.attention import cpu, reference
from torch import Tensor


def _run(attend, inputs: list[Tensor], d_out: Tensor, **options) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(out.dtype))]


@pytest.mark.parametrize("sizes", [(2, 4, 2, 33, 16, 16), (1, 3, 3, 64, 24, 8), (2, 6, 1, 7, 8, 8)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_short_is_as_near_as_fused_kernels(
    sizes: tuple[int, ...], scale: float | None, dtype: torch.dtype
) -> None:
    b, n, g, s, d, e = sizes
    torch.manual_seed(0)
    shapes = ((s, b, n, d), (s, b, g, d), (s, b, g, e))  # heads lie as they do in a model
    inputs = [torch.randn(shape).to(dtype).permute(1, 2, 0, 3) for shape in shapes]
    assert cpu.fits(*inputs)
    d_out = torch.randn(b, n, s, e)
    exact = _run(
        reference.attention,
        [x.double() for x in inputs],
        d_out.to(dtype).double(),
        causal=True,
        scale=scale,
    )
    fused = _run(reference.attention, inputs, d_out, causal=True, scale=scale)
    ours = _run(cpu.attention, inputs, d_out, scale=scale)
    for mine, theirs, right in zip(ours, fused, exact, strict=True):
        assert mine.dtype == theirs.dtype
        allowed = max(
            2 * float((theirs.double() - right).norm()),
            4 * torch.finfo(dtype).eps * float(right.norm()),
        )
        assert float((mine.double() - right).norm()) <= allowed


def test_attention_short_takes_only_short_half_on_cpu() -> None:
    q = torch.zeros(1, 2, 64, 8, dtype=torch.bfloat16)
    assert cpu.fits(q, q, q)
    assert not cpu.fits(q.float(), q.float(), q.float())
    assert not cpu.fits(q, q[:, :, :32], q[:, :, :32])
    assert not cpu.fits(*(torch.zeros(1, 2, 4096, 8, dtype=torch.bfloat16) for _ in range(3)))
    assert not cpu.fits(*(q.to("meta") for _ in range(3)))


def test_attention_short_without_second_derivative_says_so() -> None:
    q = torch.randn(1, 1, 5, 8).bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(cpu.attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
