"""Definition of AdamW on tensors kept in low precision, and of the gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain_kernels.optimizer.rounding import (
    join_master,
    load_moment,
    split_master,
    stochastic_bf16,
    store_moment,
    words,
)


class Hyper(NamedTuple):
    """The numbers of a step; `bias1` and `bias2` are `1 - beta^step`, or 1 without bias correction.

    `decoupled` is AdamW's weight decay, else the decay is added to the gradient. `stochastic`
    rounds what is kept in bf16 without a master (weights, moments) stochastically, with `seed` and
    `step` as in `rounding.words`.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    bias1: float
    bias2: float
    decoupled: bool
    stochastic: bool
    seed: int
    step: int


class Lists(NamedTuple):
    """The tensors of a step, one of each for every parameter, all contiguous; a list that is not
    used is empty.

    `params`, `grads` in fp32, fp16 or bf16; `exp_avgs`, `exp_avg_sqs` in fp32, bf16 or uint8 with
    their scales; `masters` in fp32, or int16 remainders of bf16 parameters. Each list has one
    dtype.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    masters: Sequence[Tensor]
    exp_avg_scales: Sequence[Tensor]
    exp_avg_sq_scales: Sequence[Tensor]


def adamw_(
    lists: Lists,
    streams: Sequence[int],
    grad_scale: Tensor | None,
    clock: Tensor | None,
    hyper: Hyper,
) -> None:
    """Take one step of Adam with weight decay in fp32, in place, whatever the tensors' formats are.

    `g = grad grad_scale`; `m = beta1 m + (1 - beta1) g`; `v = beta2 v + (1 - beta2) g^2`; `p -= lr
    weight_decay p`; `p = p - lr / bias1 m / (sqrt(v) / sqrt(bias2) + eps)`. `streams` name the
    parameters to the random numbers. `clock` [2] fp64 holds learning rate and step, if given, and
    `hyper` says only whether biases are corrected.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """
    if clock is not None:
        hyper = at(clock, hyper)
    # fp32 tensors come back themselves and change in place; the others are copies that `_write`
    # rounds.
    read = _read(lists)
    p, m, v = read
    g = [x.reshape(-1).float() for x in lists.grads]
    if grad_scale is not None:
        g = list(torch._foreach_mul(g, grad_scale))
    if hyper.weight_decay and hyper.decoupled:
        torch._foreach_mul_(p, 1 - hyper.lr * hyper.weight_decay)
    elif hyper.weight_decay:
        g = list(torch._foreach_add(g, p, alpha=hyper.weight_decay))
    torch._foreach_mul_(m, hyper.beta1)
    torch._foreach_add_(m, g, alpha=1 - hyper.beta1)
    torch._foreach_mul_(v, hyper.beta2)
    torch._foreach_addcmul_(v, g, g, 1 - hyper.beta2)
    under = torch._foreach_sqrt(v)
    torch._foreach_div_(under, hyper.bias2**0.5)
    torch._foreach_add_(under, hyper.eps)
    torch._foreach_addcdiv_(p, m, under, -hyper.lr / hyper.bias1)
    _write(lists, read, streams, hyper)


def at(clock: Tensor, hyper: Hyper) -> Hyper:
    """Return `hyper` at the learning rate and the step of `clock` [2] fp64."""
    lr, step = clock.tolist()
    # Both are 1 only without bias correction, as 1 - beta^step stays below 1.
    corrected = not hyper.bias1 == hyper.bias2 == 1
    bias1, bias2 = (1 - hyper.beta1**step, 1 - hyper.beta2**step) if corrected else (1.0, 1.0)
    return hyper._replace(lr=lr, step=int(step), bias1=bias1, bias2=bias2)


def _read(lists: Lists) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return master, first and second moment of every parameter in fp32 [n]: the tensors themselves
    where they are fp32.
    """
    count = len(lists.params)
    if lists.masters and lists.masters[0].dtype == torch.int16:
        p = [
            join_master(w.view(-1), r.view(-1))
            for w, r in zip(lists.params, lists.masters, strict=True)
        ]
    else:
        p = [x.view(-1).float() for x in (lists.masters or lists.params)]
    none: list[Tensor | None] = [None] * count
    first = lists.exp_avg_scales or none
    second = lists.exp_avg_sq_scales or none
    m = [load_moment(x.view(-1), s, False) for x, s in zip(lists.exp_avgs, first, strict=True)]
    v = [load_moment(x.view(-1), s, True) for x, s in zip(lists.exp_avg_sqs, second, strict=True)]
    return p, m, v


def _write(
    lists: Lists, values: tuple[list[Tensor], ...], streams: Sequence[int], hyper: Hyper
) -> None:
    for i, (p, m, v) in enumerate(zip(*values, strict=True)):
        random: tuple[Tensor | None, ...] = (None, None, None)
        if hyper.stochastic:
            random = words(hyper.seed, len(p), streams[i], hyper.step, p.device)
        weight = lists.params[i].view(-1)
        if lists.masters and lists.masters[i].dtype == torch.int16:
            upper, remainder = split_master(p)
            weight.copy_(upper)
            lists.masters[i].view(-1).copy_(remainder)
        elif lists.masters:
            weight.copy_(p)
        elif random[0] is not None and weight.dtype == torch.bfloat16:
            weight.copy_(stochastic_bf16(p, random[0]))
        else:
            weight.copy_(p)
        for kept, scales, x, second in (
            (lists.exp_avgs, lists.exp_avg_scales, m, False),
            (lists.exp_avg_sqs, lists.exp_avg_sq_scales, v, True),
        ):
            # The first of the three words is the weight's.
            stored, scale = store_moment(x, kept[i].dtype, second, random[1 + second])
            kept[i].view(-1).copy_(stored)
            if scale is not None:
                scales[i].copy_(scale)


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements of all tensors, a scalar in fp32; 0 for
    no tensors.
    """
    if not grads:
        return torch.zeros(())
    return torch.stack([g.float().norm() for g in grads]).norm()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that keeps gradients of a `norm` within `max_norm`; at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
