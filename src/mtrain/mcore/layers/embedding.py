"""Embeddings whose gradient is added up in fp32, and that may be scaled.

On a CPU torch adds the gradients of all tokens with one id up in the dtype of the weight: in bf16 a
sum of ones stays at 256. On CUDA it adds in fp32 by itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mtrain.mcore.layers.linear import adds_to_main_grad, nothing


class _Lookup(torch.autograd.Function):
    """Rows `ids` [...] of `weight` [v, h]; gradients of a row sum in fp32 and round once."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        # Sums for the ids that occur: an fp32 gradient of the whole vocabulary would take twice the
        # memory of the weight.
        found, place = ids.flatten().unique(return_inverse=True)
        sums = torch.zeros(len(found), dy.shape[-1], dtype=torch.float32, device=dy.device)
        sums.index_add_(0, place, dy.flatten(0, -2).float())
        gradient = dy.new_zeros(ctx.rows, dy.shape[-1])
        gradient[found] = sums.to(dy.dtype)
        return gradient, None


class _Added(torch.autograd.Function):
    """Rows `ids` [...] of `weight` [v, h], whose gradient is added to `weight.main_grad`.

    A gradient of the whole vocabulary is zeros but for the ids that occur. Made, added and cleared
    in every micro-batch, it takes as long as a layer.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        into = ctx.weight.main_grad
        # It sorts the ids, so that sums have one order, and the same bits every time.
        into.index_put_((ids.flatten(),), dy.flatten(0, -2).to(into.dtype), accumulate=True)
        # The output layer returns the placeholder of a tied weight's gradient.
        return None if getattr(ctx.weight, "tied_in_stage", False) else nothing(ctx.weight), None


def _needs_lookup(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype in (torch.bfloat16, torch.float16)


@functools.cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype))


class WordEmbedding(VocabParallelEmbedding):
    """megatron-core's embedding of tokens, each tensor-parallel rank with a part of the vocabulary.

    What it makes is multiplied by `scale`, rounded to the dtype of the weight (as in Gemma), where
    that is not None.
    """

    scale: float | None = None
    fuses = False
    """True if the backward adds gradients directly to their buffers."""

    def forward(self, input_: Tensor) -> Tensor:
        """Return ids [b, s] to [b, s, h], or to this rank's [s / tp, b, h] where it scatters to
        sequence parallelism.
        """
        found = self._rows(input_)
        if self.scale is None:
            return found
        # Gemma was trained with the scale in bf16, where the root of 3072 is 55.5.
        return found * _rounded(self.scale, self.weight.dtype)

    def _rows(self, input_: Tensor) -> Tensor:
        fuses = self.fuses and torch.is_grad_enabled() and adds_to_main_grad(self.weight)
        if fuses and getattr(self.weight, "zero_out_wgrad", False):
            # megatron-core expects a gradient of its own embedding next to the zeros of a fused
            # output layer. Here neither gives one.
            self.weight.zero_out_wgrad = False
            self.weight.tied_in_stage = True
        if not fuses and not _needs_lookup(self.weight):
            return super().forward(input_)  # type: ignore[no-any-return]
        lookup = _Added if fuses else _Lookup
        if self.tp_group.size() == 1:
            out = lookup.apply(self.weight, input_)
        else:
            # As in megatron-core, ids of other ranks read row 0 and are masked; the sum over the
            # ranks has every row.
            local = input_ - self.vocab_start_index
            elsewhere = (local < 0) | (local >= self.num_embeddings_per_partition)
            found = lookup.apply(self.weight, local.masked_fill(elsewhere, 0))
            out = found.masked_fill(elsewhere[..., None], 0)
        if self.reduce_scatter_embeddings:
            # A reduce-scatter splits the first axis, which has to be the sequence.
            out = out.transpose(0, 1).contiguous()
            scattered: Tensor = reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
            return scattered
        summed: Tensor = reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return summed


class PositionEmbedding(nn.Embedding):
    """torch's embedding, for learned positions."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ids [...] to [..., h]."""
        if _needs_lookup(self.weight):
            return _Lookup.apply(self.weight, input)  # type: ignore[no-any-return]
        return super().forward(input)


def add_in_fp32(embedding: Any, scale: float | None = None) -> None:
    """Make both embeddings of a `LanguageModelEmbedding`, which names their classes itself, those
    of this module.
    """
    # The class changes and the object stays, with its parameter and the marks on it.
    embedding.word_embeddings.__class__ = WordEmbedding
    embedding.word_embeddings.scale = scale
    embedding.word_embeddings.fuses = bool(embedding.config.gradient_accumulation_fusion)
    if embedding.add_position_embedding:
        embedding.position_embeddings.__class__ = PositionEmbedding
