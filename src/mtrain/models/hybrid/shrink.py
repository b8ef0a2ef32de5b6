"""A hybrid, small enough for a laptop: narrower, with as many layers as it is given, of every kind
that it has.
"""

from __future__ import annotations

from math import lcm
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.gpt.shrink import shrink as shrink_decoder
from mtrain.models.hybrid.config import KINDS
from mtrain.models.hybrid.count import own

HEAD = 16
STATE = 16
CHUNK = 8


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """`model` with so many layers, for the layout `p` and sequences of `seq_length`.

    Attention, MLPs and experts shrink as a decoder-only transformer's do. Mixers keep groups and
    heads that tp and cp split, several heads of a group where there were several, and several
    chunks in a sequence.
    """
    hybrid = own(model)
    small = shrink_decoder(model, p, layers=layers, seq_length=seq_length)
    own_groups = 2 if hybrid.num_groups >= 2 * p.tp else 1
    each = 2 if hybrid.num_heads > hybrid.num_groups else 1
    update = {
        "pattern": pattern(hybrid.pattern, layers),
        "num_heads": each * p.tp * lcm(own_groups, p.cp),
        "head_dim": HEAD,
        "state_dim": STATE,
        "num_groups": p.tp * own_groups,
        "chunk_size": min(hybrid.chunk_size, CHUNK),
    }
    changed: dict[str, Any] = {"hybrid": hybrid.model_copy(update=update)}
    if (
        model.linear_attention is not None and small.linear_attention is not None
    ):  # the pattern says which layers
        freq = model.linear_attention.freq
        changed["linear_attention"] = small.linear_attention.model_copy(update={"freq": freq})
    return small.model_copy(update=changed)


def pattern(whole: str, layers: int) -> str:
    """Return a pattern of so many layers that has every kind, if there is room: each once in the
    order of the model, then again.
    """
    kinds = list(dict.fromkeys(kind for kind in whole if kind in KINDS)) or ["M"]
    return "".join(kinds[i % len(kinds)] for i in range(layers))
