"""Definition of the permutation of tokens by expert and of its way back, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """The place of every copy of a token among rows sorted by expert.

    `position` [t, k]: the row of token t's k-th copy, or -1 if it is dropped. `source` [r]: which
    copy, counted as t * k + j, row r holds, or -1 for a row of padding. `counts` [e]: the rows of
    each expert, padding included. Integers are int32. Rows of one expert are neighbours, in the
    order of their tokens; rows behind the last expert's, of each block of them, belong to nobody.
    """

    position: Tensor
    source: Tensor
    counts: Tensor


def plan(
    indices: Tensor,
    experts: int,
    *,
    capacity: int | None = None,
    pad_to: int = 1,
    rows: int | None = None,
    blocks: int = 1,
) -> Plan:
    """Sort copies of tokens by expert: `indices` [t, k] names the expert of each copy, a negative
    one drops it.

    An expert keeps its first `capacity` copies and drops the others; its rows are padded to a
    multiple of `pad_to` (grouped FP8 products need 16 or more). `rows` is the number of rows r;
    without it r is the most there can be, so that nothing waits for the counts to reach the host.
    `blocks` equal runs of experts, as those of as many ranks, have r / blocks rows each, whether
    they fill them or not. Nothing here depends on timing: same input, same plan. Raises
    `ValueError` where the sizes do not fit; an index of `experts` or more is not looked for and is
    dropped, and so is a copy for which a given `rows` has no room, though `counts` counts it.
    """
    require_plan(indices, experts, capacity, pad_to, rows, blocks)
    t, k = indices.shape
    flat = indices.reshape(-1).to(torch.int64)
    # Whatever is dropped sorts behind all experts.
    owner = torch.where((flat < 0) | (flat >= experts), experts, flat)
    # A stable sort keeps the rows of an expert in the order of their tokens.
    by_expert, order = owner.sort(stable=True)
    edges = torch.searchsorted(by_expert, torch.arange(experts + 1, device=flat.device))
    held = edges.diff()
    if capacity is not None:
        held = held.clamp(max=capacity)
    counts = (held + pad_to - 1) // pad_to * pad_to
    starts = counts.cumsum(0) - counts
    rows = blocks * most_rows(t * k, experts // blocks, capacity, pad_to) if rows is None else rows
    if blocks > 1:
        first = torch.arange(blocks, device=flat.device)[:, None] * (rows // blocks)
        starts = (starts.view(blocks, -1) - starts.view(blocks, -1)[:, :1] + first).view(-1)
    # where the dropped ones go, and are cut off
    beyond = torch.full((1,), rows, device=flat.device)
    place = torch.arange(t * k, device=flat.device) - edges[by_expert]
    # The dropped ones have no room at all, hence the zero behind the experts.
    kept = place < torch.cat([held, torch.zeros_like(held[:1])])[by_expert]
    row = torch.where(kept, torch.cat([starts, beyond])[by_expert] + place, rows).clamp(max=rows)
    if blocks > 1:
        # A copy for which its block has no room must not take rows of the next block.
        row = torch.where(
            row // max(1, rows // blocks) == by_expert // (experts // blocks), row, rows
        )
    position = torch.empty_like(row).scatter(0, order, row)
    # The last entry collects all dropped copies and is cut off.
    source = torch.full((rows + 1,), -1, device=flat.device).scatter(0, row, order)[:rows]
    position = torch.where(position < rows, position, -1).view(t, k)
    return Plan(position.int(), source.int(), counts.int())


def most_rows(copies: int, experts: int, capacity: int | None, pad_to: int) -> int:
    """Return the most rows that `copies` of tokens can take with `experts` experts, whatever the
    router says.
    """
    touched = min(experts, copies)  # an expert without a copy has no padding either
    most = copies + touched * (pad_to - 1)
    if capacity is not None:
        most = min(most, experts * (-(-capacity // pad_to) * pad_to))
    return most


def permute(x: Tensor, plan: Plan) -> Tensor:
    """Return the rows [r, h] of tokens `x` [t, h] in the order of the plan; rows that hold no copy
    are zero.

    The result has x's dtype; its gradient adds the copies of a token up in fp32 for half input.
    Raises `ValueError` where x and the plan do not belong together.
    """
    require_permute(x, plan.position)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _rows(x.to(wide), plan.source, plan.position.shape[1]).to(x.dtype)


def unpermute(rows: Tensor, plan: Plan, weights: Tensor | None = None) -> Tensor:
    """Return tokens [t, h] from `rows` [r, h]: the sum of a token's copies, each times its weight
    of `weights` [t, k].

    Summed in fp32 for half input and returned in the dtype of the rows; dropped copies add nothing,
    whatever their weight. Raises `ValueError` where rows, weights and plan do not belong together.
    """
    require_unpermute(rows, plan.position, plan.source, weights)
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    copies = (
        _rows(rows, plan.position.reshape(-1), 1).view(*plan.position.shape, rows.shape[1]).to(wide)
    )
    if weights is not None:
        kept = (plan.position >= 0)[..., None]
        copies = torch.where(kept, copies * weights.to(wide)[..., None], 0.0)
    return copies.sum(1).to(rows.dtype)


def require_plan(
    indices: Tensor, experts: int, capacity: int | None, pad_to: int, rows: int | None, blocks: int
) -> None:
    """Raise `ValueError` unless the arguments of `plan` belong together."""
    if (
        indices.ndim != 2
        or indices.dtype not in (torch.int32, torch.int64)
        or indices.shape[1] == 0
    ):
        raise ValueError(
            f"indices must be integers [tokens, k >= 1], not {indices.dtype} {tuple(indices.shape)}"
        )
    if (
        experts < 1
        or pad_to < 1
        or (capacity is not None and capacity < 0)
        or (rows is not None and rows < 0)
    ):
        raise ValueError(
            f"experts {experts}, capacity {capacity}, pad_to {pad_to} and rows {rows} must be"
            " positive"
        )
    if blocks < 1 or experts % blocks or (rows or 0) % blocks:
        raise ValueError(f"{blocks} blocks do not divide experts {experts} and rows {rows}")
    if indices.numel() >= 2**31:
        raise ValueError(f"{indices.numel()} copies of tokens cannot be counted in int32")


def require_permute(x: Tensor, position: Tensor) -> None:
    """Raise `ValueError` unless tokens and a plan belong together."""
    if x.device != position.device:
        raise ValueError(f"x is on {x.device}, the plan on {position.device}")
    if x.ndim != 2 or x.shape[0] != position.shape[0] or not x.is_floating_point():
        found = f"x {x.dtype} {tuple(x.shape)}"
        raise ValueError(
            f"{found} must be floating [{position.shape[0]}, h], the tokens of the plan"
        )


def require_unpermute(
    rows: Tensor, position: Tensor, source: Tensor, weights: Tensor | None
) -> None:
    """Raise `ValueError` unless rows, weights and a plan belong together."""
    if any(t is not None and t.device != position.device for t in (rows, weights)):
        raise ValueError(f"rows and weights must be on {position.device}, as the plan")
    if rows.ndim != 2 or rows.shape[0] != source.shape[0] or not rows.is_floating_point():
        found = f"rows {rows.dtype} {tuple(rows.shape)}"
        raise ValueError(f"{found} must be floating [{source.shape[0]}, h], the rows of the plan")
    if weights is not None and weights.shape != position.shape:
        raise ValueError(
            f"weights {tuple(weights.shape)} must be {tuple(position.shape)}, one for each copy"
        )


def _rows(x: Tensor, source: Tensor, k: int) -> Tensor:
    """Return row source[r] // k of x for every r, or zeros where the source is negative."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])
    return padded[torch.where(source < 0, x.shape[0], source.long() // k)]
