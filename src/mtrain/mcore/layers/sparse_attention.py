"""DeepSeek sparse attention behind the specification of MLA: core attention to the keys that an
indexer chooses.

megatron-core's own module needs bf16 and a CUDA library in 0.16.1, where it neither follows the
scale of the loss nor has the channels of published weights in order; 0.19's is built of
TransformerEngine's layers. Names of weights are theirs. Their Hadamard transform of queries and
keys is orthogonal and changes no product: it is for those in 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from mtrain_kernels.linear import linear
from torch import Tensor, nn
from torch.nn import functional as F

from mtrain.mcore.layers.attention import CoreAttention
from mtrain.mcore.layers.balance import ROUTER_LOSS_SHARE
from mtrain.mcore.layers.padding import padding_of
from mtrain.mcore.layers.sparse_index import Index, Teacher, marks, taught

EPSILON = 1e-6
"""Epsilon of the norm of the indexer's keys, as in DeepSeek-V3.2's own code."""


class Projection(nn.Module):
    """A linear layer without bias, whole with its gradient on every tensor-parallel rank."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        if config.perform_initialization and not self.weight.is_meta:
            config.init_method(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return linear(x, self.weight)


class KeyNorm(nn.Module):
    """LayerNorm of the last axis, in fp32."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(width, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., width]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.layer_norm(
            x.to(wide), x.shape[-1:], self.weight.to(wide), self.bias.to(wide), EPSILON
        ).to(x.dtype)


class Indexer(MegatronModule):
    """Queries, keys and weights of scores, from attention's input; alike on tensor ranks."""

    def __init__(self, config: Any, *, cp_group: Any) -> None:
        super().__init__(config=config)
        self.heads = config.dsa_indexer_n_heads
        self.width = config.dsa_indexer_head_dim
        self.rotary_pos_emb = _rotary(config, cp_group)
        latent = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
        self.linear_wq_b = Projection(config, latent, self.heads * self.width)
        self.linear_wk = Projection(config, config.hidden_size, self.width)
        self.k_norm = KeyNorm(config, self.width)
        self.linear_weights_proj = Projection(config, config.hidden_size, self.heads)

    def forward(self, x: Tensor, qr: Tensor) -> Index:
        """Return the index of hidden states [s, b, hidden_size] and normed latent queries [s, b,
        q_lora_rank].
        """
        angles = self.rotary_pos_emb(x.shape[0], packed_seq=False)
        angles, factor = angles if isinstance(angles, tuple) else (angles, 1.0)
        q = _turned(self.linear_wq_b(qr).unflatten(-1, (self.heads, self.width)), angles, factor)
        k = _turned(self.k_norm(self.linear_wk(x)).unsqueeze(2), angles, factor).squeeze(2)
        return Index(q, k, self.linear_weights_proj(x) * (self.heads * self.width) ** -0.5)


def _rotary(config: Any, cp_group: Any) -> Any:
    """Return the positions of MLA's heads."""
    width = config.qk_pos_emb_head_dim
    if config.rope_type == "rope":
        return RotaryEmbedding(
            width,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            cp_group=cp_group,
        )
    names = (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    )
    given = {name: getattr(config, name) for name in names}
    factor = config.rotary_scaling_factor
    return YarnRotaryEmbedding(
        width, rotary_base=config.rotary_base, scaling_factor=factor, cp_group=cp_group, **given
    )


def _turned(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotate the first channels of `x` [s, b, h, d] by `angles` [s, 1, 1, r], and scale it."""
    head, rest = x.split([angles.shape[-1], x.shape[-1] - angles.shape[-1]], dim=-1)
    cos, sin = ((turn * factor).to(x.dtype) for turn in (angles.cos(), angles.sin()))
    first, second = head.chunk(2, dim=-1)
    return torch.cat([head * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


class SparseAttention(CoreAttention):
    """Softmax attention of this rank's heads to the keys that an indexer chooses, which it trains
    by the way.

    The indexer reads hidden states and latent queries without their history. The gradient of its
    loss is made in the forward, multiplied with the loss scale of fp16.
    """

    requires_dsa_inputs = True
    """Requests `x` and `qr` from MLA since 0.19; before, the configuration's variant dsa does."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.indexer = Indexer(config, cp_group=getattr(kwargs.get("pg_collection"), "cp", None))

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        x: Tensor,
        qr: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Map queries [s, b, n, d] to attention [s, b, n * e]; `x` [s, b, h] and `qr` [s, b, r] are
        the inputs of MLA, a rank's part of the tokens under sequence parallelism. Every query
        attends to the keys up to its own.

        Raises:
            NotImplementedError: packed sequences, or queries that follow those of a cache.
        """
        if packed_seq_params is not None or query.shape[0] != key.shape[0]:
            raise NotImplementedError(
                "sparse attention takes whole sequences, each in a row of its own"
            )
        x = x.detach()
        qr = qr.detach()
        # Ranks split the heads, not the tokens: each chooses keys for whole sequences, all alike.
        if self.config.sequence_parallel:
            x, qr = (
                gather_from_sequence_parallel_region(part, group=self._tp_group) for part in (x, qr)
            )
        learns = (
            self.training
            and torch.is_grad_enabled()
            and self.indexer.linear_wk.weight.requires_grad
        )
        topk = self.config.dsa_indexer_topk
        with torch.set_grad_enabled(learns):
            index = self.indexer(x, qr)
        if not learns:
            seen = marks(index, topk, query.shape[2])
            return self._attend(query, key, value, seen[:, None], causal=False)
        scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
        sparse = self.config.dsa_indexer_use_sparse_loss
        teacher = Teacher(query.detach(), key.detach(), scale, sparse, self._mean)
        padding = padding_of(query.shape[0], self._tp_group)
        learned = None if padding is None else ~padding.t()
        with torch.no_grad():
            seen, _, gradient = taught(
                index, topk, teacher, factor=self._factor(query), learned=learned
            )
        out = self._attend(query, key, value, seen[:, None], causal=False)
        taught_by: Tensor = _Teaches.apply(out, index.q, index.k, index.w, gradient)
        return taught_by

    def _factor(self, like: Tensor) -> Tensor:
        """Return the factor of the indexer's loss, a sum over all tokens, also unused ones."""
        share = getattr(self.config, ROUTER_LOSS_SHARE, 1.0)
        factor = self.config.dsa_indexer_loss_coeff * torch.as_tensor(share, device=like.device)
        scaled = self.config.grad_scale_func
        return factor if scaled is None else scaled(factor)  # type: ignore[no-any-return]

    def _mean(self, summed: Tensor) -> Tensor:
        """Return the mean over the heads of all ranks, of a sum over this rank's."""
        if self._tp_group.size() > 1:
            # In place and outside of autograd: `taught` calls this without gradients.
            torch.distributed.all_reduce(summed, group=self._tp_group)
        return summed / self.config.num_attention_heads


class _Teaches(torch.autograd.Function):
    """Hands an output on, and in the backward gives an index the gradient of its own loss."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, q: Tensor, k: Tensor, w: Tensor, gradient: Index) -> Tensor:
        ctx.save_for_backward(gradient.q, gradient.k, gradient.w)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # The index's gradient is not multiplied with that of the output, on which its loss does not
        # depend.
        return grad, *ctx.saved_tensors, None
