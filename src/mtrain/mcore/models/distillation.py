"""The divergence of a model from a frozen teacher, from the hidden states and output layers of
both, a part of the tokens at a time: no rank ever holds, sends or receives all logits.

For each token, p and q are the student's and the teacher's distributions at a temperature T. With
beta 0 the loss is KL(q || p), with 1 KL(p || q), and between them the generalised Jensen-Shannon
divergence beta KL(q || m) + (1 - beta) KL(p || m) to the mixture m = (1 - beta) p + beta q (Agarwal
et al. 2023, arXiv:2306.13649, equation 1).

With b over tokens of the vocabulary, or over k tokens and one bucket of all others, every gradient
has one form: that of the logit of token j in b, at T = 1, is g_b p_j / p_b - p_j sum(g), where g_b
is -q_b; p_b (log p_b - log q_b); (1 - beta) p_b (log p_b - log m_b).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mtrain_kernels.cross_entropy.vocabulary import Vocabulary, name_of
from mtrain_kernels.linear import add_weight_gradient, product
from mtrain_kernels.linear_cross_entropy.chunks import chunk_rows
from torch import Tensor
from torch.autograd.function import once_differentiable

HOST_LOGITS = 1 << 20
GPU_LOGITS = 1 << 25
"""Logits of one model that exist at a time, in fp32. A chunk takes about ten times as many
numbers.
"""


@dataclass(frozen=True)
class Divergence:
    """The loss of a token: 1 - `ce_weight` times the divergence, and the cross entropy of the label
    at a temperature of 1.
    """

    beta: float = 0.0
    temperature: float = 1.0
    ce_weight: float = 0.0


@dataclass(frozen=True)
class Head:
    """The output layer of one model on a rank: logits are c tanh(x / c) of x = scale hidden
    weight^T + bias, c being `soft_cap`; without it, x.
    """

    weight: Tensor
    """[v / tp, h]."""
    bias: Tensor | None = None
    scale: float | None = None
    soft_cap: float | None = None

    def logits(self, hidden: Tensor, columns: int) -> Tensor:
        """Return the first `columns` logits of hidden states [t, h], at least in fp32."""
        x = _wide_product(hidden, self.weight[:columns])
        if self.scale is not None:
            x = x * self.scale
        if self.bias is not None:
            x = x + self.bias[:columns]
        return x if self.soft_cap is None else self.soft_cap * torch.tanh(x / self.soft_cap)


class TopK(NamedTuple):
    """The likeliest tokens of a teacher at its temperature, the same on all tensor-parallel ranks.

    `ids` [t, k] or [s, b, k], in int64 or int32, `log_probabilities` [t, k + 1] or [s, b, k + 1]:
    the last one is of all other tokens.
    """

    ids: Tensor
    log_probabilities: Tensor


@dataclass(frozen=True)
class Lesson:
    """A teacher's view of the tokens of a micro-batch: the input of its output layer, or its top
    k.
    """

    divergence: Divergence
    hidden: Tensor | None = None
    """[s, b, h], or this rank's [s / tp, b, h] under sequence parallelism."""
    head: Head | None = None
    top: TopK | None = None
    chunk: int = 0
    """Tokens done at a time; 0: as many as make `GPU_LOGITS`, on a CPU `HOST_LOGITS`."""


def divergence_terms(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the divergence [t] over the last axis of two log-distributions, and g [t, n]."""
    p = log_p.exp()
    q = log_q.exp()
    if beta == 0:
        return (q * (log_q - log_p)).sum(-1), -q
    if beta == 1:
        g = p * (log_p - log_q)
        return g.sum(-1), g
    log_m = torch.logaddexp(log_p + log(1 - beta), log_q + log(beta))
    g = (1 - beta) * p * (log_p - log_m)
    return g.sum(-1) + beta * (q * (log_q - log_m)).sum(-1), g


def distil(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    lesson: Lesson,
    *,
    vocab_size: int,
    soft_cap: float | None = None,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return [3]: the sum of weighted losses, of weighted divergences and of weighted cross
    entropies; only the first has a gradient.

    `hidden` [t, h] (this rank's [t / tp, h] under sequence parallelism), `weight` [v / tp, h],
    `labels` and `token_weights` [t]. Ids from `vocab_size` on have no probability in either model.
    Gradients are made in the forward, as in `linear_cross_entropy`.
    """
    grad = torch.is_grad_enabled()
    found: Tensor = _Distilled.apply(
        (grad and hidden.requires_grad, grad and weight.requires_grad),
        hidden,
        weight,
        labels,
        token_weights,
        lesson,
        vocab_size,
        soft_cap,
        Vocabulary(name_of(group)),
        sequence_parallel,
    )
    return found


@torch.no_grad()
def top_k(
    hidden: Tensor,
    head: Head,
    k: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> TopK:
    """Return the k likeliest tokens after each of the hidden states [s, b, h], in rows of s b."""
    vocabulary = Vocabulary(name_of(group))
    rows = hidden.flatten(0, 1)
    rows = vocabulary.gather(rows) if sequence_parallel else rows
    first, real = _columns(head.weight, vocabulary, vocab_size)
    size = _rows(0, rows, head.weight)
    found = []
    for part in rows.split(size):
        z = head.logits(part, real) / temperature
        values, ids = z.topk(min(k, real), dim=-1)
        values = _filled(values, k, -torch.inf)
        ids = _filled(ids + first, k, 0)
        values = _of_ranks(values, vocabulary)
        ids = _of_ranks(ids, vocabulary)
        values, places = values.topk(k, dim=-1)
        ids = ids.gather(1, places)
        _, column = _places(ids, first, real)
        others = _extended(z).scatter_(1, column, -torch.inf)
        others[:, -1] = -torch.inf
        sums = _log_sums(torch.stack([z.logsumexp(-1), others.logsumexp(-1)]), vocabulary)
        found.append((ids, torch.cat([values, sums[1][:, None]], dim=1) - sums[0][:, None]))
    return TopK(*(torch.cat(each) for each in zip(*found, strict=True)))


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        needs: tuple[bool, bool],
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor,
        lesson: Lesson,
        vocab_size: int,
        soft_cap: float | None,
        vocabulary: Vocabulary,
        sequence_parallel: bool,
    ) -> Tensor:
        rows = vocabulary.gather(hidden) if sequence_parallel else hidden
        first, real = _columns(weight, vocabulary, vocab_size)
        student = Head(weight, soft_cap=soft_cap)
        top = None if lesson.top is None else [each.flatten(0, -2) for each in lesson.top]
        taught = None
        if lesson.hidden is not None:
            taught = lesson.hidden.flatten(0, 1)
            taught = vocabulary.gather(taught) if sequence_parallel else taught
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = rows.new_zeros(3, dtype=torch.float64)
        dhidden = torch.empty_like(rows) if needs[0] else None
        dweight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        size = _rows(lesson.chunk, rows, weight)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits = student.logits(rows[part], real)
            if taught is not None:
                assert lesson.head is not None
                given: Tensor | TopK = lesson.head.logits(taught[part], real)
            else:
                assert top is not None
                given = TopK(*(each[part] for each in top))
            factors = token_weights[part].to(wide)
            losses, slope = _chunk(
                logits, given, labels[part], lesson.divergence, first, vocabulary
            )
            sums += (losses * factors).double().sum(1)
            if not any(needs):
                continue
            slope *= factors[:, None]
            if soft_cap is not None:
                slope *= 1 - (logits / soft_cap).square()
            slope = slope.to(weight.dtype)
            if dhidden is not None:
                dhidden[part] = product(slope, weight[:real].t())
            if dweight is not None:
                add_weight_gradient(dweight[:real], slope, rows[part])
        if dhidden is not None:
            over = vocabulary.scatter_sum if sequence_parallel else vocabulary.sum
            dhidden = over(dhidden)
        ctx.made = dhidden, dweight
        ctx.dtype = weight.dtype
        return sums.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsums: Tensor) -> tuple[Any, ...]:
        if ctx.made is None:
            raise RuntimeError("distil made its gradients once and has given them away")
        dhidden, dweight = ctx.made
        ctx.made = None
        factor = dsums[0]
        return (
            None,
            None if dhidden is None else dhidden.mul_(factor),
            None if dweight is None else dweight.mul_(factor).to(ctx.dtype),
            *[None] * 7,
        )


def _chunk(
    logits: Tensor,
    given: Tensor | TopK,
    labels: Tensor,
    how: Divergence,
    first: int,
    vocabulary: Vocabulary,
) -> tuple[Tensor, Tensor]:
    """Return losses, divergences and cross entropies [3, t], and the gradient of each loss by this
    rank's logits [t, n].
    """
    z = logits / how.temperature
    if isinstance(given, TopK):
        divergence, slope = _by_top(z, given, how.beta, first, vocabulary)
    else:
        divergence, slope = _by_logits(z, given / how.temperature, how.beta, vocabulary)
    slope *= (1 - how.ce_weight) / how.temperature
    here, column = _places(labels[:, None], first, logits.shape[1])
    label = _extended(logits, 0.0).gather(1, column)[:, 0]
    lse = _log_sums(logits.logsumexp(-1)[None], vocabulary)[0]
    entropy = lse - vocabulary.sum(label)
    if how.ce_weight:
        slope += how.ce_weight * (logits - lse[:, None]).exp()
        slope.scatter_add_(1, column.clamp(max=slope.shape[1] - 1), -how.ce_weight * here.to(slope))
    losses = (1 - how.ce_weight) * divergence + how.ce_weight * entropy
    return torch.stack([losses, divergence, entropy]), slope


def _by_logits(
    z: Tensor, taught: Tensor, beta: float, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Return the divergence [t], and its gradient by the student's logits z [t, n]."""
    sums = torch.stack([z.logsumexp(-1), taught.logsumexp(-1)])
    mine, theirs = _log_sums(sums, vocabulary)
    log_p = z - mine[:, None]
    divergence, slope = divergence_terms(log_p, taught - theirs[:, None], beta)
    divergence, total = vocabulary.sum(torch.stack([divergence, slope.sum(-1)]))
    return divergence, slope - log_p.exp() * total[:, None]


def _by_top(
    z: Tensor, top: TopK, beta: float, first: int, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Return the same, of the k tokens of a teacher and one bucket of all others."""
    log_q = top.log_probabilities.to(z.dtype)
    _, column = _places(top.ids, first, z.shape[1])
    chosen = vocabulary.sum(_extended(z, 0.0).gather(1, column))
    others = _extended(z).scatter_(1, column, -torch.inf)
    others[:, -1] = -torch.inf
    mine, rest = _log_sums(torch.stack([z.logsumexp(-1), others.logsumexp(-1)]), vocabulary)
    log_p = torch.cat([chosen, rest[:, None]], dim=1) - mine[:, None]
    # Every rank knows all buckets, so nothing is summed over ranks.
    divergence, g = divergence_terms(log_p, log_q, beta)
    total = g.sum(-1, keepdim=True)
    p = (z - mine[:, None]).exp()
    # Of the bucket each token has its share; the share of the k tokens is replaced.
    slope = others.sub_(rest[:, None]).exp_()[:, :-1] * g[:, -1:] - p * total
    slope = _extended(slope, 0.0)
    slope.scatter_(1, column, g[:, :-1] - log_p[:, :-1].exp() * total)
    return divergence, slope[:, :-1].contiguous()


def _columns(weight: Tensor, vocabulary: Vocabulary, vocab_size: int) -> tuple[int, int]:
    """Return the first id of this rank's rows of a weight, and how many are of real ids."""
    first = vocabulary.rank * weight.shape[0]
    return first, min(weight.shape[0], max(0, vocab_size - first))


def _places(ids: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Return whether this rank has each of some ids, and its column: one past the last if not."""
    ids = ids.long()
    here = (ids >= first) & (ids < first + real)
    return here, torch.where(here, ids - first, real)


def _extended(x: Tensor, value: float = -torch.inf) -> Tensor:
    """Return a copy of x [t, n] with one column more, for the columns of other ranks."""
    return torch.nn.functional.pad(x, (0, 1), value=value)


def _filled(x: Tensor, columns: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1]), value=value)


def _log_sums(local: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the log-sum-exp over all ranks of theirs [n, t]."""
    if vocabulary.ranks == 1:
        return local
    return vocabulary.gather(local[None]).logsumexp(0)


def _of_ranks(x: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the columns [t, n ranks] of all ranks, each with [t, n]."""
    return vocabulary.gather(x.t().contiguous()).t()


def _rows(chunk: int, rows: Tensor, weight: Tensor) -> int:
    elements = HOST_LOGITS if rows.is_cpu else GPU_LOGITS
    return chunk_rows(chunk, len(rows), weight.shape[0], rows.device, elements)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T, of half precision in fp32: rounded logits would move the divergence."""
    if x.dtype in (torch.float32, torch.float64):
        return product(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()
