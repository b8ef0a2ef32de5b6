"""The chunk of an encoder-decoder, with the chosen layers and T5's initial weights."""

from __future__ import annotations

from typing import Any

import torch

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.mcore.adapter.op_overrides import override_operations
from mtrain.mcore.layers import backend
from mtrain.mcore.models.encoder_decoder import EncoderDecoder
from mtrain.models.t5.config import T5Config, decoder_layers


def chunk(run: RunConfig, config: Any, stage: int | None) -> EncoderDecoder:
    """Build encoder and decoder with embedding and loss, in a single stage."""
    m = run.model
    t = T5Config.of(m)
    assert run.kernels.loss is not None, "a resolved run says who makes its loss"
    # T5 has no experts, so no router is replaced.
    override_operations(run.kernels, None)
    made = EncoderDecoder(
        config,
        backend.provider(run.kernels),
        decoder_layers=decoder_layers(m),
        vocab_size=m.padded_vocab_size,
        max_sequence_length=m.max_position_embeddings,
        buckets=t.relative_attention_buckets,
        max_distance=t.relative_attention_distance,
        tied=m.tie_word_embeddings,
        loss=run.kernels.loss,
        loss_vocab_size=m.loss_vocab_size,
        logit_scale=m.hidden_size**-0.5 if m.tie_word_embeddings and t.scale_logits else None,
    )
    _mark_initial_weights(made, m)
    return made


def _mark_initial_weights(made: EncoderDecoder, m: ModelConfig) -> None:
    """Note how each matrix is drawn: as in Mesh TensorFlow's T5, and v1.1's head as any layer."""
    factor = T5Config.of(m).initializer_factor
    width = m.hidden_size
    head = m.head_dim
    inputs = {
        "word_embeddings": 1,
        "linear_qkv": width,
        "linear_q": width * head,
        "linear_kv": width,
        "linear_proj": m.num_attention_heads * head,
        "linear_fc1": width,
        "linear_fc2": m.ffn_hidden_size,
        "relative_attention_bias": width,
        "output_layer": width,
    }

    def queries_smaller(rows: torch.Tensor) -> torch.Tensor:
        """Return the factors of queries, keys and values, which are interleaved by head."""
        return torch.where(rows // head % 3 == 0, head**-0.5, 1.0)

    for name, parameter in made.named_parameters():
        *_, module, kind = name.split(".")
        if kind == "weight" and module in inputs:
            parameter.mtrain_init_std = factor * inputs[module] ** -0.5  # type: ignore[attr-defined]
            if module == "linear_qkv":
                parameter.mtrain_init_scale = queries_smaller  # type: ignore[attr-defined]
