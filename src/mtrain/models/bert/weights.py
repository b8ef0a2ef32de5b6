"""The weights of BERT on one rank of a stage."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.bert.count import own
from mtrain.models.gpt.weights import layer
from mtrain.models.weights import Weight, norm, square


def stage_weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield the weights of a (virtual) stage; the first and the last both hold the tied table."""
    rows = m.padded_vocab_size // p.tp
    h = m.hidden_size
    apart = not (held.embedding and held.loss)
    if held.embedding:
        yield Weight("embedding.word_embeddings.weight", (rows, h), "embedding", shared=apart)
        for name, count in (
            ("position", m.max_position_embeddings),
            ("tokentype", own(m).type_vocab_size),
        ):
            yield Weight(f"embedding.{name}_embeddings.weight", (count, h), "embedding", whole=True)
        if m.norm_placement == "post_residual":
            yield from norm(m, "embedding.norm", h)
    for number, index in enumerate(held.layers):
        yield from layer(m, p, f"encoder.layers.{number}", index)
    if not held.loss:
        return
    if m.norm_placement == "pre":
        yield from norm(m, "encoder.final_layernorm", h)
    yield from square("head.dense", "output", h)
    yield from norm(m, "head.norm", h)
    if apart:
        yield Weight("output_layer.weight", (rows, h), "output", shared=True)
    yield Weight("output_layer.bias", (rows,), "output")
    if own(m).next_sentence:
        yield from square("pooler", "output", h)
        yield Weight("next_sentence.weight", (2, h), "output", whole=True)
        yield Weight("next_sentence.bias", (2,), "output", whole=True)
