"""megatron-core's gated delta net with portable operations, packing, a cache, and any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as _GatedDeltaNet
from mtrain_kernels.causal_conv1d.op import causal_conv1d
from mtrain_kernels.gated_delta_rule.op import gated_delta_rule
from torch import Tensor
from torch.nn import functional as F

from mtrain.mcore.layers.cache import State
from mtrain.mcore.layers.portable import Norm
from mtrain.mcore.patches.linear_attention import segments_of

DECAYS = (1.0, 16.0)
"""Range of the decays at the start, of which each head draws its own."""


class OutputNorm(Norm):
    """RMSNorm of each head that multiplies with its weight, even if others use 1 + weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> None:
        super().__init__(config, hidden_size, eps, **more)
        self.zero_centered = False
        self.reset_parameters()


class GatedDeltaNet(_GatedDeltaNet):
    """Linear attention by the gated delta rule, of this tensor-parallel rank's heads.

    `impl` is that of the convolution and of the rule: `reference`, or `auto` for the fastest that
    takes a call.
    Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464.
    """

    impl = "reference"

    def reset_parameters(self) -> None:
        """Set constants, and mark other weights' distributions; see `mtrain.assembly.weights`."""
        weight = self.conv1d.weight
        weight.mtrain_init_bound = weight.shape[-1] ** -0.5
        self.A_log.mtrain_init_of_share = _decay_at_the_start
        with torch.no_grad():
            self.dt_bias.fill_(1.0)
            self.A_log.fill_(0.0)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Return hidden states [s, b, h], or this rank's [s / tp, b, h] under sequence parallelism,
        to the same.

        Packed sequences begin with an empty state each. With a context, the scan continues from the
        state after the tokens that it has read, and stores the new state there.
        """
        projected = self.in_proj(hidden_states)[0].transpose(0, 1)
        k = self.qk_dim // self.tp_size
        v = self.v_dim // self.tp_size
        heads = self.num_v_heads_local_tp
        qkv, gate, beta, alpha = projected.split([2 * k + v, v, heads, heads], -1)
        edges = _boundaries(packed_seq_params)
        marks = segments_of(edges, qkv.shape[1])
        before = State.of(inference_context, self.layer_number)
        mixed, tail = self._convolved(qkv.mT, marks, before)
        queries, keys, values = mixed.mT.split([k, k, v], -1)
        # fp32, because these logarithms of decays are summed over many tokens.
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        y, state = gated_delta_rule(
            queries.unflatten(-1, (-1, self.key_head_dim)),
            keys.unflatten(-1, (-1, self.key_head_dim)),
            values.unflatten(-1, (-1, self.value_head_dim)),
            decay,
            beta.sigmoid(),
            l2norm=True,
            state=None if before is None else before.state,
            segments=marks,
            edges=edges,
            impl=self.impl,
        )
        if inference_context is not None:
            State(tail, state).keep(inference_context, self.layer_number, qkv.shape[1])
        y = self.out_norm(y) * F.silu(gate.unflatten(-1, (-1, self.value_head_dim)).float())
        out, _bias = self.out_proj(y.to(qkv.dtype).flatten(2).transpose(0, 1).contiguous())
        return out, None

    def _convolved(
        self, x: Tensor, marks: Tensor | None, before: State | None
    ) -> tuple[Tensor, Tensor]:
        """Return `x` [b, d, s] convolved, and the last inputs, which later tokens reach back to."""
        weight = self.conv1d.weight.squeeze(1)
        times = x.shape[-1]
        if before is not None:
            x = torch.cat([before.tail, x], -1)
        # Padded in front where the text is shorter than the kernel.
        tail = F.pad(x, (weight.shape[-1] - 1, 0))[..., x.shape[-1] :]
        return causal_conv1d(x, weight, segments=marks, impl=self.impl)[..., -times:], tail

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return megatron-core's state, with a weight of several sections as one tensor."""
        found: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        factories = {
            name: _joined(t) for name, t in found.items() if isinstance(t, ShardedTensorFactory)
        }
        return found | factories


def _boundaries(packed: Any) -> Tensor | None:
    """Return the offsets of packed sequences, padding included; None where they are not packed."""
    if packed is None or packed.qkv_format != "thd":
        return None
    padded: Tensor | None = packed.cu_seqlens_q_padded
    return packed.cu_seqlens_q if padded is None else padded


def _joined(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    """Return the same with its sections behind each other in one tensor."""
    build = factory.build_fn

    def joined(*args: Any) -> list[ShardedTensor]:
        return _behind_each_other(args[0], build(*args))

    return replace(factory, build_fn=joined)


def _behind_each_other(key: str, sections: Sequence[ShardedTensor]) -> list[ShardedTensor]:
    axis = sections[0].prepend_axis_num
    whole = sum(section.global_shape[axis] for section in sections)
    out = []
    begin = 0
    for section in sections:
        shape = list(section.global_shape)
        offset = list(section.global_offset)
        offset[axis] += begin
        begin = begin + shape[axis]
        shape[axis] = whole
        places = {
            "global_shape": tuple(shape),
            "global_offset": tuple(offset),
            # Sections of different sizes are no regular fragmentation of the whole axis.
            "axis_fragmentations": None,
        }
        out.append(replace(section, key=key, **places))
    return out


def _decay_at_the_start(share: Tensor) -> Tensor:
    """Return the logarithm of the decays of heads that drew a share in [0, 1)."""
    low, high = DECAYS
    return (low + share * (high - low)).log()
