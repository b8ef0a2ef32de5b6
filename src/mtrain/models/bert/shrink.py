"""BERT, small enough for a laptop: narrower, with the layers that it is given."""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.bert.count import own

HEAD = 16
VOCAB = 512
PADDED = 385
"""Token ids where the model has padding: an odd number, whose last rows of 512 are padding on whole
ranks of tp8.
"""
IDS = ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """`model` with so many layers, for the layout `p` and sequences of `seq_length`.

    Heads become the fewest that tp splits. Norms, positions, kinds of tokens and both objectives
    stay as they were; the special tokens that there are get small ids.
    """
    heads = max(4, p.tp)
    bert = own(model)
    ids: dict[str, Any] = {
        name: None if getattr(bert, name) is None else number for number, name in enumerate(IDS)
    }
    return model.model_copy(
        update={
            "num_layers": layers,
            "hidden_size": HEAD * heads,
            "ffn_hidden_size": 2 * HEAD * heads,
            "num_attention_heads": heads,
            "vocab_size": VOCAB if model.padded_vocab_size == model.vocab_size else PADDED,
            "max_position_embeddings": max(seq_length, 64),
            "bert": bert.model_copy(update=ids),
        }
    )
