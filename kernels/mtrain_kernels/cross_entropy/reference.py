"""Definition of cross entropy over a vocabulary that may be split over ranks, in plain torch.

A rank holds the columns `first .. first + v_local` of the logits. What it knows of a row is three numbers: the
log-sum-exp of its columns, the logit of the label (zero where another rank holds it) and the sum of its logits.
They add up over the ranks (`vocabulary.merge`); loss and gradient follow from the merged three.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """What the loss of a token is made of, for a vocabulary of `vocab` in all; columns behind it are padding.

    `label_smoothing` e in [0, 1), `z_loss` z >= 0, `soft_cap` c >= 0 (0: none), and the label `ignore_index`
    whose tokens count nothing: `loss = lse - (1 - e) x_y - e mean(x) + z lse^2` on `x = c tanh(logits / c)`.
    """

    vocab: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0
    ignore_index: int = -100


def row_statistics(logits: Tensor, labels: Tensor, first: int, terms: Terms) -> Tensor:
    """The three numbers of each row: log-sum-exp, logit of the label and, if labels are smoothed, the sum of logits.

    `logits` [t, v_local], `labels` [t] int64 over the whole vocabulary, `first` the vocabulary index of column 0.
    The result is [3, t] in fp32 (fp64 for fp64 logits); a number that is not needed or not held here is 0.
    """
    x = capped(wide(logits), terms.soft_cap)
    here, column = local_labels(labels, first, x.shape[1])
    target = x.gather(1, column[:, None])[:, 0].where(here, 0) if x.shape[1] else x.new_zeros(x.shape[0])
    total = x.sum(1) if terms.label_smoothing else torch.zeros_like(target)
    return torch.stack([x.logsumexp(1), target, total])


def token_losses(statistics: Tensor, labels: Tensor, terms: Terms) -> Tensor:
    """The loss of each token [t] from the merged statistics [3, t] and the labels [t]; 0 where ignored."""
    lse, target, total = statistics
    e = terms.label_smoothing
    loss = lse - (1 - e) * target - e / terms.vocab * total if e else lse - target
    if terms.z_loss:
        loss = loss + terms.z_loss * lse.square()
    return loss.where(labels != terms.ignore_index, 0)


def logits_gradient(logits: Tensor, labels: Tensor, lse: Tensor, rows: Tensor, first: int, terms: Terms) -> Tensor:
    """`rows[i] d loss_i / d logits_i` for every row, 0 where the label is ignored; shape and dtype of `logits`.

    `lse` [t] is the merged log-sum-exp, `rows` [t] a factor per token; the rest as in `row_statistics`.
    """
    x = capped(wide(logits), terms.soft_cap)
    gradient = (x - lse[:, None]).exp()
    if terms.z_loss:
        gradient *= (1 + 2 * terms.z_loss * lse)[:, None]
    if terms.label_smoothing:
        gradient -= terms.label_smoothing / terms.vocab
    here, column = local_labels(labels, first, x.shape[1])
    if x.shape[1]:
        hit = (1 - terms.label_smoothing) * here.to(gradient.dtype)
        gradient.scatter_add_(1, column[:, None], -hit[:, None])
    if terms.soft_cap:
        gradient *= 1 - (x / terms.soft_cap).square()
    counted = (labels != terms.ignore_index)[:, None]
    return (gradient * rows[:, None].to(gradient.dtype)).where(counted, 0).to(logits.dtype)


def cross_entropy(logits: Tensor, labels: Tensor, terms: Terms) -> Tensor:
    """The loss of each token with the whole vocabulary at hand, differentiable by autograd; see `Terms`.

    `logits` [t, v], `labels` [t]; the result is [t] in fp32 (fp64 for fp64 logits). Sources: label smoothing,
    Szegedy et al. 2016, arXiv:1512.00567; z-loss, Chowdhery et al. 2022, arXiv:2204.02311, section 5.
    """
    return token_losses(row_statistics(logits, labels, 0, terms), labels, terms)


def capped(x: Tensor, soft_cap: float) -> Tensor:
    """`soft_cap tanh(x / soft_cap)`, or `x` itself where `soft_cap` is 0."""
    return (x / soft_cap).tanh() * soft_cap if soft_cap else x


def local_labels(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Whether each label's column is one of the `columns` from `first` on, and which (0 where it is not)."""
    column = labels - first
    here = (column >= 0) & (column < columns)
    return here, column.where(here, 0)


def real_columns(columns: int, first: int, terms: Terms) -> int:
    """How many of the `columns` from vocabulary index `first` on are in the vocabulary: the others are padding."""
    return min(columns, max(0, terms.vocab - first))


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is if fp64."""
    return x if x.dtype == torch.float64 else x.float()


def valid_terms(terms: Terms, columns: int) -> None:
    """Raises `ValueError` for a number of `terms` outside its range; there are `columns` of logits in all."""
    if not 1 <= terms.vocab <= columns:
        raise ValueError(f"vocab_size {terms.vocab} must lie in [1, {columns}], as many as there are columns")
    if not 0 <= terms.label_smoothing < 1:
        raise ValueError(f"label_smoothing {terms.label_smoothing} must lie in [0, 1)")
    if not (terms.z_loss >= 0 and math.isfinite(terms.z_loss)):
        raise ValueError(f"z_loss {terms.z_loss} must be zero or positive")
    if not (terms.soft_cap >= 0 and math.isfinite(terms.soft_cap)):
        raise ValueError(f"soft_cap {terms.soft_cap} must be positive, or zero or None for none")
