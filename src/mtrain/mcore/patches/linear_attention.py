"""Patches of gated delta nets, which megatron-core builds only with the library fla."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mtrain.config.engine import release
from mtrain.mcore.patches.patch import core, patch


@patch(
    "gated-delta-without-fla",
    "ssm/gated_delta_net.py:101",
    "A gated delta net is not built where fla is not installed, on a CPU for one: ImportError.",
    "everywhere",
)
def gated_delta_without_fla() -> None:
    """Give a gated delta net the portable rule, norm and convolution where fla is not installed."""
    if importlib.util.find_spec("fla") is not None:
        return
    # 0.19 has split the module into a package, whose parts import the names for themselves.
    parts = ("common", "gdn") if release.at_least(0, 19) else ()
    for module in [
        core("ssm.gated_delta_net"),
        *(core(f"ssm.gated_delta_net.{part}") for part in parts),
    ]:
        module.HAVE_FLA = True
        module.l2norm = _l2norm
        module.chunk_gated_delta_rule = _rule
        if parts:
            module.causal_conv1d = _convolution


def _l2norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def segments_of(cu_seqlens: Tensor | None, times: int) -> Tensor | None:
    """Return the sequence between `cu_seqlens` of each of `times` tokens, [1, times]."""
    if cu_seqlens is None:
        return None
    at = torch.arange(times, device=cu_seqlens.device)
    return torch.bucketize(at, cu_seqlens[1:].to(at.dtype), right=True)[None]


def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    from mtrain_kernels.gated_delta_rule.op import gated_delta_rule

    marks = segments_of(cu_seqlens, q.shape[1])
    options: dict[str, Any] = {
        "l2norm": use_qk_l2norm_in_kernel,
        "state": initial_state,
        "segments": marks,
    }
    y, state = gated_delta_rule(q, k, v, g, beta, **options)
    return y, state if output_final_state else None


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    from mtrain_kernels.causal_conv1d.op import causal_conv1d

    marks = segments_of(cu_seqlens, x.shape[1])
    kind = "silu" if activation == "swish" else activation
    return causal_conv1d(x.mT, weight, bias, activation=kind, segments=marks).mT, None


class _Renamed:
    """A chunk of a model with output norms named as norms of queries, split by heads."""

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self.ddp_config = chunk.ddp_config

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of the chunk."""
        for name, parameter in core("utils").get_attr_wrapped_model(
            self._chunk, "named_parameters"
        )():
            yield name.replace(".out_norm.", ".q_layernorm."), parameter


@patch(
    "gated-delta-norm",
    "distributed/finalize_model_grads.py:354",
    "Tensor-parallel ranks norm the outputs of their heads with the same weight. Without"
    " sequence parallelism the gradients of it are not summed: silently that of a rank's heads,"
    " and weights that drift apart.",
    "everywhere",
    upstream="#7452",
)
def gated_delta_norm() -> None:
    """Sum the gradients of output norms over tensor-parallel ranks, like the norms of queries."""
    module = core("distributed.finalize_model_grads")
    original = module._allreduce_non_tensor_model_parallel_grads

    @functools.wraps(original)
    def summed(model: Any, config: Any, tp_group: Any = None) -> None:
        if (
            config.experimental_attention_variant == "gated_delta_net"
            and not config.sequence_parallel
        ):
            model = [_Renamed(chunk) for chunk in model]
            # Names are looked at with `qk_layernorm` only. These are all the fields that the
            # original reads.
            config = SimpleNamespace(sequence_parallel=False, qk_layernorm=True)
        original(model, config, tp_group)

    module._allreduce_non_tensor_model_parallel_grads = summed
