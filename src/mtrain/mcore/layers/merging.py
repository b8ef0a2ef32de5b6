"""Whole weights and their low-rank adapters: which belong together, and the one weight that they
amount to.

Needs no megatron-core: readers and converters of checkpoints use it before the adapter to
megatron-core is installed.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

A = "lora_a"
B = "lora_b"
MAGNITUDE = "magnitude"
LATENT = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
"""Projections of MLA that make queries, keys and values."""
_KINDS = "|".join(("qkv", "proj", "fc1", "fc2", *LATENT))
_LAYER = rf"(?P<layer>.*\b(?:linear_(?P<kind>{_KINDS})|mixer\.(?:in|out)_proj))"
_WEIGHT = re.compile(rf"{_LAYER}\.weight(?P<expert>\d*)(?P<part>\.\w+)?")
_OWN = re.compile(rf".*\.({A}|{B}|{MAGNITUDE})\d*(\.\w+)?")


class Names(NamedTuple):
    """The names of an adapter's tensors."""

    a: str
    b: str
    magnitude: str


class Whole(NamedTuple):
    """An adapter of a whole weight: `a` [..., parts * r, in], `b` [..., out, r], `magnitude` [...,
    out] or None.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a model, or of a checkpoint, is part of an adapter."""
    return _OWN.fullmatch(name) is not None


def names_beside(weight: str) -> Names | None:
    """Return the names of the adapter that the weight of this name may have; None: it can have
    none.

    Parts of a weight that are tensors of their own in a checkpoint share one A.
    """
    found = _WEIGHT.fullmatch(weight)
    if found is None:
        return None
    layer = found["layer"]
    expert = found["expert"]
    part = found["part"] or ""
    return Names(
        f"{layer}.{A}{expert}", *(f"{layer}.{own}{expert}{part}" for own in (B, MAGNITUDE))
    )


def one_hot_of(weight: str, adapter: Whole, model: Any) -> Tensor | None:
    """Return the part that each row of a whole weight belongs to, [out, parts]; None if there is
    one part.

    `model` is its section.
    """
    found = _WEIGHT.fullmatch(weight)
    assert found is not None
    count = adapter.a.shape[-2] // adapter.b.shape[-1]
    rows = adapter.b.shape[-2]
    if count == 1:
        return None
    each = model.num_attention_heads // model.query_groups
    if found["kind"] == "qkv":
        parts = parts_of_qkv(0, rows, each, model.head_dim)
    else:
        parts = parts_of_halves(rows)
    return F.one_hot(parts, count).bool()


@torch.no_grad()
def merged(weight: Tensor, adapter: Whole, one_hot: Tensor | None, scale: float) -> Tensor:
    """Return W + s B A like `weight` [..., out, in]; rows with a magnitude are scaled to it."""
    # fp32, rounded once: the change is small next to the weight.
    own = spread(adapter.b.float(), one_hot)
    whole = weight.float() + scale * (own @ adapter.a.float())
    if adapter.magnitude is not None:
        whole *= (adapter.magnitude.float() / torch.linalg.vector_norm(whole, dim=-1)).unsqueeze(-1)
    return whole.to(weight.dtype)


def spread(b: Tensor, one_hot: Tensor | None) -> Tensor:
    """Return `lora_b` [..., rows, r] as [..., rows, parts * r], which multiplies the product with
    all A.

    `one_hot` [rows, parts] says which part a row is; None: there is one.
    """
    return b if one_hot is None else (b.unsqueeze(-2) * one_hot.unsqueeze(-1)).flatten(-2)


def parts_of_qkv(first: int, rows: int, each: int, head: int) -> Tensor:
    """Return whether rows are of queries, keys or values: 0, 1 or 2, of `rows` rows from `first`
    on.

    A query group has `each` heads of queries, one of keys and one of values, of `head` rows each.
    """
    place = (torch.arange(first, first + rows) // head) % (each + 2)
    # Within a group the first `each` heads clamp to 0; the next one is 1, the last one 2.
    return (place - each + 1).clamp_min(0)


def parts_of_halves(rows: int) -> Tensor:
    """Return 0 for the rows of gates, which come first, and 1 for the gated rows."""
    return torch.arange(rows) // (rows // 2)
