"""An encoder-decoder, small enough for a laptop: narrower, with the layers that it is given."""

from __future__ import annotations

import math

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.t5.config import LENGTH_MULTIPLE, lengths
from mtrain.models.t5.count import section

HEAD = 16
HIDDEN = 64
FFN = 128
VOCAB = 512
PADDED = 385
"""Token ids where the model has padding: an odd number, whose last rows of 512 are padding on whole
ranks of tp8.
"""
SENTINELS = 16


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """`model` with so many layers in the encoder, and in the decoder one more where it had another
    number.

    Norm, activation, gate, tying, buckets and noise stay as they were; encoder and decoder are as
    long as samples of `seq_length` need, in parts that tp shards.
    """
    t = section(model)
    wide = max(1, p.tp // 4)
    deep = layers + 1 if t.decoder_layers not in (None, model.num_layers) else None
    ids = {"sentinels": SENTINELS, "first_sentinel": None, "start_id": 0, "end_id": 1}
    part = math.lcm(LENGTH_MULTIPLE, p.tp if p.sequence_parallel else 1)
    read, written = (-(-need // part) * part for need in lengths(t, seq_length))
    filled = {"encoder_length": read, "decoder_length": written}
    return model.model_copy(
        update={
            "num_layers": layers,
            "hidden_size": HIDDEN * wide,
            "ffn_hidden_size": FFN * wide,
            "num_attention_heads": max(p.tp, 2),
            "kv_channels": HEAD,
            "vocab_size": VOCAB if model.padded_vocab_size == model.vocab_size else PADDED,
            "max_position_embeddings": max(seq_length, 64),
            "t5": t.model_copy(update={"decoder_layers": deep, **ids, **filled}),
        }
    )
