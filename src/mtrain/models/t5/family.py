"""T5: an encoder-decoder that learns to fill in the spans that were removed from a text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.base import Family
from mtrain.models.gpt.shrink import FFN, HEAD, HIDDEN, vocabulary
from mtrain.models.gpt.weights import alike
from mtrain.models.t5.config import LENGTH_MULTIPLE, T5Config, decoder_layers, lengths, padded
from mtrain.models.t5.graph import stage
from mtrain.models.weights import Weight, column, mlp, norm, row

SENTINELS = 16


def stage_weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield the weights of the one stage."""
    rows = m.padded_vocab_size // p.tp
    h = m.hidden_size
    yield Weight("embedding.word_embeddings.weight", (rows, h), "embedding")
    t = T5Config.of(m)
    table = (t.relative_attention_buckets, m.num_attention_heads)
    for stack in ("encoder", "decoder"):
        yield Weight(
            f"{stack}_relative_pos_emb.relative_attention_bias.weight",
            table,
            "attention",
            whole=True,
        )
    written = held.layers if t.decoder_layers is None else range(t.decoder_layers)
    for stack, layers in (("encoder", held.layers), ("decoder", written)):
        for number in range(len(layers)):
            yield from _layer(m, p, f"{stack}.layers.{number}", crosses=stack == "decoder")
        yield from norm(m, f"{stack}.final_layernorm", h)
    if not m.tie_word_embeddings:
        yield Weight("output_layer.weight", (rows, h), "output")


def _layer(m: ModelConfig, p: ParallelConfig, name: str, *, crosses: bool) -> Iterator[Weight]:
    h = m.hidden_size
    inner = m.num_attention_heads * m.head_dim
    yield from norm(m, f"{name}.input_layernorm", h)
    yield from row(f"{name}.self_attention.linear_proj", "attention", h, inner, p.tp)
    yield from column(f"{name}.self_attention.linear_qkv", "attention", 3 * inner, h, p.tp)
    if crosses:
        yield from norm(m, f"{name}.pre_cross_attn_layernorm", h)
        yield from row(f"{name}.cross_attention.linear_proj", "attention", h, inner, p.tp)
        yield from column(f"{name}.cross_attention.linear_q", "attention", inner, h, p.tp)
        yield from column(f"{name}.cross_attention.linear_kv", "attention", 2 * inner, h, p.tp)
    yield from norm(m, f"{name}.pre_mlp_layernorm", h)
    yield from mlp(m, f"{name}.mlp", m.ffn_hidden_size, p.tp, bias=False)


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of the forward and backward of one sample of `seq_length` tokens, for
    each of these tokens.

    6 per weight that multiplies and token that it meets, padding included: those of the encoder,
    and keys and values of cross attention, meet the encoder's tokens, all others the decoder's. 12
    per layer, head width, query and key for attention; of the decoder's own, half of the keys if
    `causal`.
    """
    t = T5Config.of(model)
    hidden = model.hidden_size
    needed = lengths(t, seq_length)
    read = t.encoder_length or padded(needed[0])
    written = t.decoder_length or padded(needed[1])
    layers = decoder_layers(model)
    inner = model.num_attention_heads * model.head_dim
    attention = 4 * hidden * inner
    mlp = (3 if model.gated else 2) * hidden * model.ffn_hidden_size
    encoder = model.num_layers * (attention + mlp) * read
    # Keys and values of cross attention, half of its weights, are made of the encoder's tokens.
    crossed = layers * (attention // 2) * read
    decoder = layers * (attention + attention // 2 + mlp) * written
    output = model.padded_vocab_size * hidden * written
    pairs = model.num_layers * read**2 + layers * (
        written * read + written**2 / (2 if causal else 1)
    )
    return (6.0 * (encoder + crossed + decoder + output) + 12.0 * inner * pairs) / seq_length


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """Return `model` with so many layers in the encoder, and in the decoder one more if its number
    differed.

    Norm, activation, gate, tying, buckets and noise stay as they were; encoder and decoder are as
    long as samples of `seq_length` need, in parts that tp shards.
    """
    t = T5Config.of(model)
    wide = max(1, p.tp // 4)
    deep = layers + 1 if decoder_layers(model) != model.num_layers else None
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


FAMILY = Family(
    name="t5",
    builder="mtrain.models.t5.build:chunk",
    collator="mtrain.models.t5.data:collator",
    files="mtrain.models.t5.hf:files",
    auto_class="AutoModelForSeq2SeqLM",
    settled="mtrain.models.t5.hf:settled",
    writes=False,
    predicts_all=False,
    flops_per_token=flops_per_token,
    shrink=shrink,
    weights=stage_weights,
    alike=alike,
    stage=stage,
)
