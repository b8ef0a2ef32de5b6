"""BERT, small enough for a laptop: narrower, with the layers that it is given."""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.bert.config import BertConfig
from mtrain.models.gpt.shrink import HEAD, vocabulary

IDS = ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """`model` with so many layers, for the layout `p` and sequences of `seq_length`.

    Heads become the fewest that tp splits. Norms, positions, kinds of tokens and both objectives
    stay as they were; the special tokens that there are get small ids.
    """
    heads = max(4, p.tp)
    bert = BertConfig.of(model)
    ids: dict[str, Any] = {
        name: None if getattr(bert, name) is None else number for number, name in enumerate(IDS)
    }
    return model.model_copy(
        update={
            "num_layers": layers,
            "hidden_size": HEAD * heads,
            "ffn_hidden_size": 2 * HEAD * heads,
            "num_attention_heads": heads,
            "vocab_size": vocabulary(model),
            "max_position_embeddings": max(seq_length, 64),
            "bert": bert.model_copy(update=ids),
        }
    )
