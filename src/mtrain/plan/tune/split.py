"""The division of layers among the stages of a pipeline."""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.models.registry import family_of

Sizes = tuple[int, ...]


def splits(layers: int, pp: int, vpp: int, ends: tuple[float, float]) -> list[Sizes | None]:
    """Return stage sizes, in the order of the model: equal ones (None) where they are whole, and
    balanced ones.

    `ends` are the work of the first and the last rank outside layers, in layers.
    """
    blocks = pp * vpp
    equal: list[Sizes | None] = [None] if layers % blocks == 0 else []
    if pp == 1:
        return equal
    sizes = balanced(layers, pp, vpp, *ends)
    whole = len(set(sizes)) == 1
    return equal if whole and equal else [*equal, sizes]


def balanced(layers: int, pp: int, vpp: int, first: float, last: float) -> Sizes:
    """Return stage sizes that minimise the slowest rank.

    `first` and `last` are the work of the first and the last rank outside layers, in layers.
    """
    held = [0] * pp
    more = [first, *[0.0] * (pp - 2), last]
    for _ in range(
        layers
    ):  # each to the rank with the least, of several to the last, whose micro-batches are few
        rank = min(range(pp), key=lambda r: (held[r] + more[r], -r))
        held[rank] += 1
    sizes = [0] * (pp * vpp)
    for rank, number in enumerate(held):
        for chunk in range(vpp):
            share = number // vpp + (chunk < number % vpp if rank else chunk >= vpp - number % vpp)
            sizes[chunk * pp + rank] = share
    return tuple(sizes)


def ends_of(model: ModelConfig) -> tuple[float, float]:
    """Return the cost of embedding and loss in layers, by the weights that a token visits."""
    table = model.padded_vocab_size * model.hidden_size
    tables = 1 if model.tie_word_embeddings else 2
    layer = max(
        1.0, (family_of(model).active_parameters(model) - tables * table) / model.num_layers
    )
    again = model.mtp_num_layers or 0
    return 0.0, table / layer * (1 + again) + again
