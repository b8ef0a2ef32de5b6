"""Definition of the router of a mixture of experts, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

SCORES = ("softmax", "sigmoid")
TINY = 1e-20  # keeps the normalisation of k scores finite where all of them are zero


def moe_router(
    logits: Tensor,
    topk: int,
    *,
    score: str = "softmax",
    pre_softmax: bool = False,
    normalize: bool | None = None,
    scale: float = 1.0,
    expert_bias: Tensor | None = None,
    groups: int = 1,
    group_topk: int = 1,
    group_members: int = 2,
    experts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `topk` experts of every token, best first, their weights, and how many tokens each
    expert got.

    `logits` [t, e]. The scores are the sigmoid of the logits, their softmax over all experts
    (`pre_softmax`), or the logits themselves, of which the chosen ones then go through a softmax.
    Experts are chosen by score plus `expert_bias` [e]; the bias touches only the choice. With
    `groups` > 1 the experts form that many equal runs, each worth the sum of its `group_members`
    best, and only experts of the `group_topk` best groups are chosen. Weights are the chosen
    scores, divided by their sum if `normalize` (None: for a sigmoid of several experts), times
    `scale`. With `experts` [t, topk], int64, the choice is made already, and they are the indices.

    Returns `weights` [t, topk] in the dtype of the logits, `indices` [t, topk] and `counts` [e],
    both int64. Half input is scored in fp32. Equals go to the lower index; NaN counts as greater
    than every number, so that it shows in the weights. Without bias and groups the logits choose,
    since scores are monotone in them: no rounding of an exponential decides. Gradients reach the
    logits through the weights only.

    Raises `ValueError` where sizes or names do not fit. Sources: Shazeer et al. 2017,
    arXiv:1701.06538; groups and
    bias: DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """
    require_router(logits, topk, score, expert_bias, groups, group_topk, group_members)
    x = logits if logits.dtype == torch.float64 else logits.float()
    if score == "sigmoid":
        scores = x.sigmoid()
    else:
        scores = x.softmax(-1) if pre_softmax else x
    if experts is None:
        indices = _choose(
            scores.detach(), x.detach(), topk, expert_bias, groups, group_topk, group_members
        )
    else:
        indices = experts
    if score == "softmax" and pre_softmax:
        weights = scores.gather(-1, indices)
    else:
        chosen = x.gather(-1, indices)
        weights = chosen.sigmoid() if score == "sigmoid" else chosen.softmax(-1)
    if normalizes(normalize, score, topk):
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    # Comparisons instead of bincount, which waits for the device.
    counts = (indices.reshape(-1, 1) == torch.arange(logits.shape[1], device=logits.device)).sum(0)
    return (weights * scale).to(logits.dtype), indices, counts


def normalizes(normalize: bool | None, score: str, topk: int) -> bool:
    """Return whether the weights are divided by their sum: as said, or by default for a sigmoid of
    several experts.
    """
    return (score == "sigmoid" and topk > 1) if normalize is None else normalize


def require_router(
    logits: Tensor,
    topk: int,
    score: str,
    expert_bias: Tensor | None,
    groups: int,
    group_topk: int,
    group_members: int,
) -> None:
    """Raise `ValueError` unless the arguments of `moe_router` belong together."""
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating [tokens, experts], not {logits.dtype} {tuple(logits.shape)}"
        )
    experts = logits.shape[1]
    if score not in SCORES:
        raise ValueError(f"score {score!r} is none of {', '.join(SCORES)}")
    if groups < 1 or experts % groups:
        raise ValueError(f"{experts} experts do not form {groups} equal groups")
    if not 1 <= group_topk <= groups:
        raise ValueError(f"group_topk {group_topk} must be 1 to groups {groups}")
    size = experts // groups
    if not 1 <= topk <= size * group_topk:
        raise ValueError(
            f"topk {topk} must be 1 to {size * group_topk}, the experts of {group_topk} groups"
        )
    if groups > 1 and not 1 <= group_members <= size:
        raise ValueError(
            f"group_members {group_members} must be 1 to {size}, the experts of a group"
        )
    if expert_bias is not None and expert_bias.shape != (experts,):
        raise ValueError(f"expert_bias {tuple(expert_bias.shape)} must be ({experts},)")
    if expert_bias is not None and expert_bias.device != logits.device:
        raise ValueError(f"expert_bias is on {expert_bias.device}, logits on {logits.device}")


def _choose(
    scores: Tensor,
    x: Tensor,
    topk: int,
    bias: Tensor | None,
    groups: int,
    group_topk: int,
    members: int,
) -> Tensor:
    """Return the chosen experts [t, topk], best first, by two stable sorts: by value, then the
    excluded to the end.
    """
    value = x if bias is None and groups == 1 else scores
    if bias is not None:
        value = value + bias.to(value.dtype)
    order = value.sort(dim=-1, descending=True, stable=True).indices
    if groups > 1:
        best = value.unflatten(-1, (groups, -1)).sort(dim=-1, descending=True).values[..., :members]
        # one after another: the order of a sum must not decide between groups
        worth = sum(best.unbind(-1))
        taken = worth.sort(dim=-1, descending=True, stable=True).indices[..., :group_topk]
        open_ = torch.zeros_like(worth, dtype=torch.int8).scatter(-1, taken, 1)
        excluded = 1 - open_.repeat_interleave(scores.shape[1] // groups, -1).gather(-1, order)
        order = order.gather(-1, excluded.sort(dim=-1, stable=True).indices)
    return order[:, :topk].contiguous()  # a view would keep the places of all experts
