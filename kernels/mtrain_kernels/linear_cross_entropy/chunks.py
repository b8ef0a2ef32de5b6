"""The size of a chunk of tokens, and the implementation that computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain_kernels.cross_entropy.reference import Terms
from mtrain_kernels.cross_entropy.vocabulary import Vocabulary
from mtrain_kernels.linear import product
from mtrain_kernels.linear_cross_entropy import tiles
from mtrain_kernels.linear_cross_entropy.reference import (
    Finish,
    Gradients,
    ReferenceChunks,
    Room,
    chunked,
)
from mtrain_kernels.runtime import ceil_div

# logits alive at a time: 16 MiB in fp32 suit caches and stay in the heap
CHUNK_ELEMENTS = {"cpu": 1 << 22}
# 256 MiB in bf16: matrix products of 1,024 tokens at a vocabulary of 128 thousand
GPU_CHUNK_ELEMENTS = 1 << 27
# times as many tokens where logits are not written: five numbers a tile of 128 columns are less
LONGER = 8


def chunk_rows(
    chunk: int, tokens: int, columns: int, device: torch.device, elements: int = 0
) -> int:
    """Return how many tokens are done at a time: `chunk`, or for 0 a multiple of 64 that keeps to
    the elements allowed.

    `elements` are the logits of a chunk, 0: 2^27, or 2^22 on a CPU. There it is at most half of the
    tokens, so that few tokens, too, never have all their logits at once.
    """
    if chunk:
        return chunk
    elements = elements or CHUNK_ELEMENTS.get(device.type, GPU_CHUNK_ELEMENTS)
    # Multiples of 64 fill the tiles of a matrix product.
    rows = max(64, elements // columns // 64 * 64)
    return min(rows, max(1, ceil_div(tokens, 2))) if device.type == "cpu" else rows


class TritonChunks:
    """Opens chunks by kernels: logits by cuBLAS with a pass behind them, or with their statistics
    by one kernel.
    """

    def open(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        first: int,
        terms: Terms,
        room: Room,
        *,
        kept: bool,
        class_weights: Tensor | None,
        ranked: bool,
    ) -> tuple[Tensor, Finish]:
        """See `reference.Chunks`."""
        from mtrain_kernels.cross_entropy import triton as rows
        from mtrain_kernels.linear_cross_entropy import triton

        way = tiles.way_for(hidden, weight.shape[0], kept)
        logits = room(len(labels)) if kept or way is tiles.APART else None
        if isinstance(way, tiles.Tile):
            hidden, weight = (x if x.stride(1) == 1 else x.contiguous() for x in (hidden, weight))
            given = hidden, weight, labels, first, terms, way
            statistics = triton.product_statistics(
                *given, logits=logits, class_weights=class_weights, ranked=ranked
            )
        else:
            assert logits is not None
            logits = product(hidden, weight, out=logits)
            statistics = rows.row_statistics(
                logits, labels, first, terms, class_weights=class_weights, ranked=ranked
            )

        def finish(lse: Tensor, factors: Tensor) -> Tensor:
            assert logits is not None, "logits that were not kept have no gradient"
            return rows.logits_gradient(
                logits, labels, lse, factors, first, terms, logits, class_weights
            )

        return statistics, finish


def run(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    class_weights: Tensor | None,
    group: str,
    sequence_parallel: bool,
    terms: Terms,
    chunk: int,
    logits: int,
    ranked: bool,
    need_hidden: bool,
    need_weight: bool,
    wide: bool,
    backend: str,
    into: Tensor | None = None,
) -> Gradients:
    """Run `reference.chunked` by a backend for a rank of `group`, and sum its gradients of hidden
    states over the group.
    """
    vocabulary = Vocabulary(group)
    plain = backend == "reference"
    rows = chunk_rows(chunk, labels.shape[0], weight.shape[0], hidden.device, logits)
    # Only statistics are wanted, so no logits are written and a chunk may be longer.
    if not (chunk or need_hidden or need_weight or backend != "triton") and isinstance(
        tiles.way_for(hidden, weight.shape[0], False), tiles.Tile
    ):
        rows *= LONGER
    found = chunked(
        vocabulary.gather(hidden) if sequence_parallel else hidden,
        weight,
        labels.contiguous(),
        token_weights,
        vocabulary,
        terms,
        rows=rows,
        need_hidden=need_hidden,
        need_weight=need_weight,
        chunks=TritonChunks() if backend == "triton" else ReferenceChunks(plain=plain),
        class_weights=class_weights,
        ranked=ranked,
        wide=wide,
        plain=plain,
        into=into,
    )
    if need_hidden:
        # Each rank has only its own columns' share of the gradient of hidden states.
        if sequence_parallel:
            dhidden = vocabulary.scatter_sum(found.hidden)
        else:
            dhidden = vocabulary.sum(found.hidden)
        found = found._replace(hidden=dhidden)
    return found
