"""Definition of cross entropy over a vocabulary that may be split over ranks, in plain torch.

A rank holds the columns `first .. first + v_local` of the logits. What it knows of a row is three
numbers: the log-sum-exp of its columns, the logit of the label (zero where another rank holds it)
and the sum of its logits. They add up over the ranks (`vocabulary.merge`); loss and gradient follow
from the merged three. Two more say whether the label has the largest logit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """The terms of a token's loss, for a vocabulary of `vocab` in all; columns after it are
    padding.

    `label_smoothing` e in [0, 1), `z_loss` z >= 0, `soft_cap` c >= 0 (0: none), and the label
    `ignore_index` whose tokens count nothing: `loss = lse - (1 - e) x_y - e mean(x) + z lse^2` on
    `x = c tanh(logits / c)`. Where classes have weights, `w_c` weighs `lse - x_c` of each class in
    both terms, as in torch; the z-loss is as it is.
    """

    vocab: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0
    ignore_index: int = -100


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    first: int,
    terms: Terms,
    *,
    class_weights: Tensor | None = None,
    ranked: bool = False,
) -> Tensor:
    """Return the numbers of each row: log-sum-exp, logit of the label and, if labels are smoothed,
    the sum of logits.

    `logits` [t, v_local], `labels` [t] int64 over the whole vocabulary, `first` the vocabulary
    index of column 0; `class_weights` [v] of the whole vocabulary weigh the sum. The result is [3,
    t] in fp32 (fp64 for fp64 logits); a number that is not needed or not held here is 0. `ranked`:
    [5, t] with those of `first_place` behind them.
    """
    x = capped(wide(logits), terms.soft_cap)
    here, column = local_labels(labels, first, x.shape[1])
    # A rank may hold nothing but padding, and `gather` needs a column.
    target = (
        x.gather(1, column[:, None])[:, 0].where(here, 0) if x.shape[1] else x.new_zeros(x.shape[0])
    )
    total = (
        weighed_sum(x, first, class_weights) if terms.label_smoothing else torch.zeros_like(target)
    )
    found = torch.stack([x.logsumexp(1), target, total])
    return torch.cat([found, first_place(logits, labels, first)]) if ranked else found


def weighed_sum(x: Tensor, first: int, class_weights: Tensor | None) -> Tensor:
    """Return the sum of each row of `x` [t, v_local], where a class weighs 1 or what
    `class_weights` [v] says.
    """
    if class_weights is None:
        return x.sum(1)
    return x @ class_weights[first : first + x.shape[1]].to(x.dtype)


def first_place(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """Return the largest local logit of each row, and its first column relative to the label: [2,
    t].

    The second is 1 at the label, -1 where all columns that are held here come before the label,
    else 0: where the largest logits of several parts are equal, the sum of it over them is 1 if and
    only if the label is first of all.
    """
    behind = (labels >= first + logits.shape[1]).to(wide(logits).dtype)
    if not logits.shape[1]:
        return torch.stack([torch.full_like(behind, -torch.inf), -behind])
    top, column = logits.max(1)
    return torch.stack([wide(top), (column + first == labels).to(behind.dtype) - behind])


def label_weights(labels: Tensor, class_weights: Tensor | None, terms: Terms) -> Tensor | None:
    """Return the class weight of each label [t]: 0 outside of the vocabulary; None without
    `class_weights`.
    """
    if class_weights is None:
        return None
    inside = (labels >= 0) & (labels < terms.vocab)
    return class_weights.gather(0, labels.where(inside, 0)).where(inside, 0)


def token_losses(
    statistics: Tensor, labels: Tensor, terms: Terms, class_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token [t] and what of it is z-loss, from the merged statistics; both
    0 where ignored.
    """
    lse, target, total = statistics[:3]
    e = terms.label_smoothing
    weights = label_weights(labels, class_weights, terms)
    if class_weights is None or weights is None:
        loss = lse - (1 - e) * target - e / terms.vocab * total if e else lse - target
    else:
        weights = weights.to(lse.dtype)
        loss = (1 - e) * (lse - target) * weights
        if e:
            loss = loss + e / terms.vocab * (class_weights.sum().to(lse.dtype) * lse - total)
        else:
            loss = loss
        # what is not finite shows, whatever its class weighs
        loss = loss.where(lse.isfinite(), lse)
    z = terms.z_loss * lse.square() if terms.z_loss else torch.zeros_like(lse)
    counted = labels != terms.ignore_index
    return (loss + z if terms.z_loss else loss).where(counted, 0), z.where(counted, 0)


def logits_gradient(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    rows: Tensor,
    first: int,
    terms: Terms,
    class_weights: Tensor | None = None,
) -> Tensor:
    """Return `rows[i] d loss_i / d logits_i` for every row, 0 where the label is ignored; shape and
    dtype of `logits`.

    `lse` [t] is the merged log-sum-exp, `rows` [t] a factor per token; the rest as in
    `row_statistics`.
    """
    x = capped(wide(logits), terms.soft_cap)
    gradient = (x - lse[:, None]).exp()
    share, hit = shares(lse, labels, terms, class_weights)
    if class_weights is not None or terms.z_loss:
        gradient *= share[:, None]
    if terms.label_smoothing:
        gradient -= smoothed(x, first, terms, class_weights)
    here, column = local_labels(labels, first, x.shape[1])
    if x.shape[1]:
        # A label that another rank holds has column 0 here, to which zero is added.
        gradient.scatter_add_(1, column[:, None], -(hit * here)[:, None].to(gradient.dtype))
    if terms.soft_cap:
        gradient *= 1 - (x / terms.soft_cap).square()
    counted = (labels != terms.ignore_index)[:, None]
    # Selected instead of multiplied by zero, since ignored rows may hold NaN.
    return (gradient * rows[:, None].to(gradient.dtype)).where(counted, 0).to(logits.dtype)


def shares(
    lse: Tensor, labels: Tensor, terms: Terms, class_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the factors of a row's probabilities and of its label's one in the gradient of the
    loss: [t] both.
    """
    e = terms.label_smoothing
    weights = label_weights(labels, class_weights, terms)
    if class_weights is None or weights is None:
        hit = torch.full_like(lse, 1 - e)
        share = torch.ones_like(lse)
    else:
        hit = (1 - e) * weights.to(lse.dtype)
        share = hit + e / terms.vocab * class_weights.sum().to(lse.dtype)
    return (share + 2 * terms.z_loss * lse if terms.z_loss else share), hit


def smoothed(x: Tensor, first: int, terms: Terms, class_weights: Tensor | None) -> Tensor | float:
    """Return the share of label smoothing in the gradient of each column of `x` [t, v_local]."""
    share = terms.label_smoothing / terms.vocab
    if class_weights is None:
        return share
    return share * class_weights[first : first + x.shape[1]].to(x.dtype)


def cross_entropy(
    logits: Tensor, labels: Tensor, terms: Terms, class_weights: Tensor | None = None
) -> Tensor:
    """Return the loss of each token with the whole vocabulary at hand, differentiable by autograd;
    see `Terms`.

    `logits` [t, v], `labels` [t], `class_weights` [v]; the result is [t] in fp32 (fp64 for fp64
    logits). Sources: label smoothing, Szegedy et al. 2016, arXiv:1512.00567; z-loss, Chowdhery et
    al. 2022, arXiv:2204.02311, sec. 5.
    """
    statistics = row_statistics(logits, labels, 0, terms, class_weights=class_weights)
    return token_losses(statistics, labels, terms, class_weights)[0]


def capped(x: Tensor, soft_cap: float) -> Tensor:
    """Return `soft_cap tanh(x / soft_cap)`, or `x` itself where `soft_cap` is 0."""
    return (x / soft_cap).tanh() * soft_cap if soft_cap else x


def local_labels(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return whether each label's column is one of the `columns` from `first` on, and which (0
    where it is not).
    """
    column = labels - first
    here = (column >= 0) & (column < columns)
    return here, column.where(here, 0)


def real_columns(columns: int, first: int, terms: Terms) -> int:
    """Return how many of the `columns` from vocabulary index `first` on are in the vocabulary: the
    others are padding.
    """
    return min(columns, max(0, terms.vocab - first))


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or as it is if fp64."""
    return x if x.dtype == torch.float64 else x.float()


def valid_terms(terms: Terms, columns: int) -> None:
    """Raise `ValueError` for a number of `terms` outside its range; there are `columns` of logits
    in all.
    """
    if not 1 <= terms.vocab <= columns:
        raise ValueError(
            f"vocab_size {terms.vocab} must lie in [1, {columns}], as many as there are columns"
        )
    if not 0 <= terms.label_smoothing < 1:
        raise ValueError(f"label_smoothing {terms.label_smoothing} must lie in [0, 1)")
    if not (terms.z_loss >= 0 and math.isfinite(terms.z_loss)):
        raise ValueError(f"z_loss {terms.z_loss} must be zero or positive")
    if not (terms.soft_cap >= 0 and math.isfinite(terms.soft_cap)):
        raise ValueError(f"soft_cap {terms.soft_cap} must be positive, or zero or None for none")
