"""This rank's chunk of BERT, with the layers that `kernels` chose."""

from __future__ import annotations

from typing import Any

from mtrain.config.engine.kernels import sums_apart
from mtrain.config.schema.run import RunConfig
from mtrain.mcore.layers import backend
from mtrain.mcore.layers.recipe import recipe
from mtrain.mcore.models.bert_model import BertModel
from mtrain.models.bert.config import BertConfig
from mtrain.models.gpt.build import arguments


def chunk(run: RunConfig, config: Any, stage: int | None) -> BertModel:
    """Return the layers, embedding and heads of a virtual pipeline stage of this rank."""
    m = run.model
    bert = BertConfig.of(run.model)
    provider = backend.provider(
        run.kernels,
        backend.Parts.of(m, attn_mask="no_mask"),
        norms_add=sums_apart(run) is None,
        fp8=recipe(run),
    )
    shared = arguments(run, stage)
    return BertModel(
        config,
        backend.layer_spec(config, provider, vp_stage=stage),
        provider.layer_norm(),
        vocab_size=m.padded_vocab_size,
        max_sequence_length=m.max_position_embeddings,
        token_types=bert.type_vocab_size,
        norms_embeddings=m.norm_placement == "post_residual",
        head_activation=bert.head_activation or m.activation,
        next_sentence=bert.next_sentence,
        pad_token=bert.pad_token_id,
        **shared,
    )
