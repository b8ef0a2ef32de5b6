"""BERT: an encoder that predicts masked tokens, and whether a sentence follows another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.base import Family
from mtrain.models.bert.config import BertConfig
from mtrain.models.bert.graph import stage
from mtrain.models.count import counted
from mtrain.models.gpt.shrink import HEAD, vocabulary
from mtrain.models.gpt.torch_dist import names_written
from mtrain.models.gpt.weights import alike, layer
from mtrain.models.weights import Weight, norm, square

IDS = ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def stage_weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield the weights of a (virtual) stage; the first and the last both hold the tied table."""
    rows = m.padded_vocab_size // p.tp
    h = m.hidden_size
    apart = not (held.embedding and held.loss)
    if held.embedding:
        yield Weight("embedding.word_embeddings.weight", (rows, h), "embedding", shared=apart)
        for name, count in (
            ("position", m.max_position_embeddings),
            ("tokentype", BertConfig.of(m).type_vocab_size),
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
    if BertConfig.of(m).next_sentence:
        yield from square("pooler", "output", h)
        yield Weight("next_sentence.weight", (2, h), "output", whole=True)
        yield Weight("next_sentence.bias", (2,), "output", whole=True)


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation.

    6 per weight of the layers, of the masked-token head and of the output layer, which every
    position goes through, and 12 per layer, channel and key of attention. `causal` has no effect
    here: a token sees the whole sample. What is pooled from one token of a sample is left out.
    """
    bert = BertConfig.of(model)
    hidden = model.hidden_size
    weights = counted(stage_weights, model, alike).parameters
    # Embeddings of positions and kinds are looked up, and the pooler reads one token of a sample.
    weights -= (model.max_position_embeddings + bert.type_vocab_size + 2) * hidden
    if bert.next_sentence:
        weights -= hidden * hidden + 3 * hidden + 2
    return 6.0 * weights + 12.0 * model.num_layers * hidden * seq_length


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """Return `model` with so many layers, for the layout `p` and sequences of `seq_length`.

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


def _saved_as(model: ModelConfig, name: str) -> str:
    """Return a weight's name in our checkpoints, norms after the next linear layer's."""
    return names_written(name, model)[-1] if name.startswith("encoder.layers.") else name


FAMILY = Family(
    name="bert",
    builder="mtrain.models.bert.build:chunk",
    collator="mtrain.models.bert.data:collator",
    files="mtrain.models.bert.hf:files",
    settled="mtrain.models.bert.hf:settled",
    auto_class="AutoModelForMaskedLM",
    writes=False,
    predicts_all=False,
    tokens_alone=lambda model: not BertConfig.of(model).next_sentence,
    flops_per_token=flops_per_token,
    shrink=shrink,
    weights=stage_weights,
    alike=alike,
    saved_as=_saved_as,
    stage=stage,
)
