"""An encoder-decoder, small enough for a laptop: narrower, with the layers that it is given."""

from __future__ import annotations

import math

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.gpt.shrink import FFN, HEAD, HIDDEN, vocabulary
from mtrain.models.t5.config import LENGTH_MULTIPLE, T5Config, lengths

SENTINELS = 16


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """`model` with so many layers in the encoder, and in the decoder one more where it had another
    number.

    Norm, activation, gate, tying, buckets and noise stay as they were; encoder and decoder are as
    long as samples of `seq_length` need, in parts that tp shards.
    """
    t = T5Config.of(model)
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
            "vocab_size": vocabulary(model),
            "max_position_embeddings": max(seq_length, 64),
            "t5": t.model_copy(update={"decoder_layers": deep, **ids, **filled}),
        }
    )
