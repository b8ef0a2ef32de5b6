"""Definition of a linear layer and cross entropy, and the same in chunks of tokens with gradients
made at once.

Per chunk there are three matrix products: the logits, their gradient times the weight, and their
gradient times the hidden state. Only one chunk of logits is alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mtrain_kernels.cross_entropy import reference as rows_reference
from mtrain_kernels.cross_entropy.op import mark_foreign
from mtrain_kernels.cross_entropy.reference import (
    Terms,
    capped,
    first_place,
    local_labels,
    real_columns,
    shares,
    smoothed,
    token_losses,
    weighed_sum,
    wide,
)
from mtrain_kernels.cross_entropy.vocabulary import Vocabulary
from mtrain_kernels.linear import add_weight_gradient, product, zero_gradient

# What turns the merged log-sum-exp and a factor per token into the gradient of a chunk of logits,
# which may be overwritten; memory for the logits of so many tokens, allocated once.
Finish = Callable[[Tensor, Tensor], Tensor]
Room = Callable[[int], Tensor]


class Chunks(Protocol):
    """Makes logits of some tokens, and what is known of their rows."""

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
        """Return the statistics [3 or 5, t] of `hidden` [t, h] times `weight` [v_local, h], and
        what makes their gradient.

        Where the logits are not `kept`, nobody asks for a gradient. The rest is as in
        `row_statistics`.
        """


# A weight gradient in half precision is rounded with every chunk that is added to it. With so many
# chunks that leaves no more than a sum in fp32, to which rounded shares are added, and which is
# rounded at the end.
MOST_PARTS = 3


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    terms: Terms,
    class_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `sum_i token_weights_i loss_i` and the losses [t] of `hidden weight^T`, by autograd,
    with all logits at once.

    `hidden` [t, h], `weight` [v, h], `labels` [t] int64, `token_weights` [t]; see `cross_entropy`
    for the loss.
    """
    losses = rows_reference.cross_entropy(F.linear(hidden, weight), labels, terms, class_weights)
    return (losses * token_weights).sum(), losses


class Gradients(NamedTuple):
    """The result of one pass over the chunks: losses [t], and gradients [t, h] and [v_local, h] up
    to a common factor.

    The gradient of the weighted sum is `scale` times `hidden`, summed over the ranks, and `scale`
    times `weight`. What was not asked for is empty. `z_losses` [t] are a part of the losses, `hits`
    [t] are 1 where the label has the largest logit.
    """

    losses: Tensor
    z_losses: Tensor
    hits: Tensor
    hidden: Tensor
    weight: Tensor
    scale: Tensor


def chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    vocabulary: Vocabulary,
    terms: Terms,
    *,
    rows: int,
    need_hidden: bool,
    need_weight: bool,
    chunks: Chunks,
    class_weights: Tensor | None = None,
    ranked: bool = False,
    wide: bool = False,
    plain: bool = False,
    into: Tensor | None = None,
) -> Gradients:
    """Return losses and gradients of the weighted sum, `rows` tokens at a time; see
    `linear_cross_entropy` and `Gradients`.

    The weights of the tokens multiply hidden states and their gradients instead of the logits'
    gradient, divided by the largest of them: masks of zeros and ones are exact, and nothing
    underflows in fp16. Rows of the weight that are padding are left out of every product, and their
    gradient stays 0. `wide`: it is added up in fp32 and left so. `ranked`: the hits say whose label
    has the largest logit. `plain`: products are by torch's BLAS, see `mtrain_kernels.linear`.
    `into` [v_local, h]: each chunk's gradient of the weight is added to it, times 1 instead of a
    scale, and none is returned.
    """
    if into is not None:
        scale = token_weights.new_ones(())
        factors = token_weights[:, None]
    else:
        scale = token_weights.abs().amax() if len(token_weights) else token_weights.new_zeros(())
        # With all weights zero any divisor will do.
        factors = (token_weights / scale.where(scale != 0, 1))[:, None]
    counted = (labels != terms.ignore_index).to(scale.dtype)
    losses = torch.empty_like(token_weights)
    z_losses = torch.empty_like(token_weights)
    hits = token_weights.new_empty(len(labels) if ranked else 0)
    dhidden = hidden.new_empty(hidden.shape if need_hidden else (0, hidden.shape[1]))
    many = wide or len(labels) > MOST_PARTS * rows
    kept = torch.promote_types(weight.dtype, torch.float32) if many else weight.dtype
    taught = weight if need_weight and into is None else weight[:0]
    dweight = zero_gradient(taught, kept, min(rows, len(labels)), plain=plain)
    first = vocabulary.rank * weight.shape[0]
    padded = weight.shape[0]
    weight = weight[: real_columns(weight.shape[0], first, terms)]
    in_place = hidden.device.type == "cpu" and hidden.dtype in (torch.float32, torch.float64)
    # aligned rows multiply faster; a softmax in place wants none
    width = weight.shape[0] if in_place else padded
    room = _room(hidden, min(rows, len(labels)), width, weight.shape[0])
    real = (dweight if into is None else into)[: weight.shape[0]]
    for start in range(0, len(labels), rows):
        part = slice(start, start + rows)
        given = hidden[part], weight, labels[part], first, terms, room
        kept_logits = need_hidden or need_weight
        statistics, finish = chunks.open(
            *given, kept=kept_logits, class_weights=class_weights, ranked=ranked
        )
        statistics = mark_foreign(vocabulary.merge(statistics), labels[part], terms)
        losses[part], z_losses[part] = token_losses(statistics, labels[part], terms, class_weights)
        if ranked:
            hits[part] = (statistics[4] == 1).to(hits.dtype) * counted[part]
        if not (need_hidden or need_weight):
            continue
        dlogits = finish(statistics[0], counted[part])
        if need_hidden:
            torch.mul(product(dlogits, weight.T, plain=plain), factors[part], out=dhidden[part])
        if need_weight:
            weighted = (hidden[part] * factors[part]).to(hidden.dtype)
            add_weight_gradient(real, dlogits, weighted, plain=plain)
    return Gradients(
        losses,
        z_losses,
        hits,
        dhidden,
        (dweight if wide else dweight.to(weight.dtype)).contiguous(),
        scale,
    )


def _room(hidden: Tensor, tokens: int, width: int, columns: int) -> Room:
    # Allocated at first use: ways that write no logits never ask for it.
    held: list[Tensor] = []

    def room(some: int) -> Tensor:
        if not held:
            held.append(hidden.new_empty((tokens, width))[:, :columns])
        return held[0][:some]

    return room


class ReferenceChunks:
    """Opens chunks of logits in plain torch; the fp32 copy of a chunk is allocated once, for a
    CPU's sake.
    """

    def __init__(self, *, plain: bool = True) -> None:
        self._plain = plain
        self._space: Tensor | None = None

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
        """See `Chunks`."""
        return self(
            product(hidden, weight, out=room(len(labels)), plain=self._plain),
            labels,
            first,
            terms,
            class_weights,
            ranked,
        )

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        first: int,
        terms: Terms,
        class_weights: Tensor | None = None,
        ranked: bool = False,
    ) -> tuple[Tensor, Finish]:
        """Return one softmax over the local columns, which is rescaled once the whole
        sum is known.
        """
        if not logits.shape[1]:  # a rank that holds nothing but padding
            statistics = rows_reference.row_statistics(logits, labels, first, terms, ranked=ranked)
            return statistics, lambda lse, factors: logits
        place = [first_place(logits, labels, first)] if ranked else []
        # Taken now, since the softmax overwrites the logits.
        highest = capped(wide(logits.amax(1)), terms.soft_cap)
        x = capped(self._widened(logits), terms.soft_cap)
        here, column = local_labels(labels, first, x.shape[1])
        target = x.gather(1, column[:, None])[:, 0].where(here, 0)
        if terms.label_smoothing:
            total = weighed_sum(x, first, class_weights)
        else:
            total = torch.zeros_like(target)
        slope = 1 - (x / terms.soft_cap).square() if terms.soft_cap else None
        gradient = torch.softmax(x, 1, out=x)
        # The greatest probability is exp(highest - lse), so lse needs no further pass.
        local = highest - gradient.amax(1).log()

        def finish(lse: Tensor, factors: Tensor) -> Tensor:
            of_all, of_label = shares(lse, labels, terms, class_weights)
            share = (local - lse).exp() * of_all * factors
            if x.device.type != "cpu" or (share != 1).any():  # on one rank mostly one pass less
                gradient.mul_(share[:, None])
            if terms.label_smoothing:
                gradient.sub_(smoothed(gradient, first, terms, class_weights) * factors[:, None])
            hit = of_label * here * factors
            gradient.scatter_add_(1, column[:, None], -hit[:, None].to(gradient.dtype))
            if slope is not None:
                gradient.mul_(slope)
            # Even where it is NaN. A CPU writes few rows; a device must not wait for their number.
            ignored = labels == terms.ignore_index
            if x.device.type == "cpu":
                gradient.index_fill_(0, ignored.nonzero()[:, 0], 0)
            else:
                gradient.masked_fill_(ignored[:, None], 0)
            return logits.copy_(gradient)

        return torch.cat([torch.stack([local, target, total]), *place]), finish

    def _widened(self, logits: Tensor) -> Tensor:
        if logits.dtype in (torch.float32, torch.float64):
            return logits
        if self._space is None or self._space.shape[0] < logits.shape[0]:
            self._space = logits.new_empty(logits.shape, dtype=torch.float32)
        return self._space[: logits.shape[0]].copy_(logits)
