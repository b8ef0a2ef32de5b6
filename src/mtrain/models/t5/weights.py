"""The weights of an encoder-decoder on one rank; it stands on one pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.t5.config import T5Config
from mtrain.models.t5.count import decoder_layers
from mtrain.models.weights import Weight, column, mlp, norm, row


def stage_weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield all of them."""
    rows = m.padded_vocab_size // p.tp
    h = m.hidden_size
    yield Weight("embedding.word_embeddings.weight", (rows, h), "embedding")
    table = (T5Config.of(m).relative_attention_buckets, m.num_attention_heads)
    for stack in ("encoder", "decoder"):
        yield Weight(
            f"{stack}_relative_pos_emb.relative_attention_bias.weight",
            table,
            "attention",
            whole=True,
        )
    for stack, layers in (("encoder", m.num_layers), ("decoder", decoder_layers(m))):
        for number in range(layers):
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
