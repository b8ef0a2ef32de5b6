"""Floating-point operations of a decoder-only transformer, from its configuration only."""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.models.count import counted, counts, one_expert
from mtrain.models.gpt.weights import alike, indexer, prediction, stage_weights


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation.

    6 per weight that multiplies (2 forward, 4 backward), the embedding's look-up excluded, and 12
    per layer, query head width and key for attention, halved when `causal` (published figures use
    both conventions). Layers with a window count the keys in it under both; a layer of linear
    attention counts 6 for each element of its state, forward. Sparse attention is to the chosen
    keys, and `index_flops` are of what chooses them.
    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    weights = counted(stage_weights, model, alike).active_parameters
    table = model.padded_vocab_size * model.hidden_size
    if not model.ties_output:
        weights -= table
    if model.position_embedding_type == "learned_absolute":
        weights -= model.max_position_embeddings * model.hidden_size
    predictions = model.mtp_num_layers or 0
    # A layer that is used several times multiplies each time.
    if again := predictions - model.mtp_held:
        layer = prediction(model, one_expert(model), "mtp")
        weights += again * counts(layer, model).active_parameters
    # Every MTP layer multiplies with the output layer once more.
    weights += predictions * table
    if model.mla:
        mla = model.mla
        widths = 2 * (mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim)
    else:
        widths = 4 * model.head_dim
    softmax = [layer for layer in range(model.num_layers) if not model.is_linear(layer)]
    keys = sum(_keys(model, layer, seq_length, causal=causal) for layer in softmax)
    keys += predictions * _keys(model, 0, seq_length, causal=causal)
    states = state_flops(model, model.num_layers - model.softmax_among(model.num_layers))
    indexers = index_flops(model, model.num_layers + predictions, seq_length, causal=causal)
    return 6.0 * weights + 3.0 * model.num_attention_heads * widths * keys + states + indexers


def state_flops(model: ModelConfig, layers: int) -> float:
    """Return the FLOPs of a token with the states of so many layers of linear attention: it reads,
    corrects and queries one for each head of values.
    """
    own = model.linear_attention
    if own is None:
        return 0.0
    return 18.0 * layers * own.num_value_heads * own.key_head_dim * own.value_head_dim


def index_flops(model: ModelConfig, layers: int, seq_length: int, *, causal: bool) -> float:
    """Return the FLOPs of a token with the indexers of so many layers, without the 6 for each
    weight: a product with every key, forward and twice backward. What an indexer reads has no
    gradient.
    """
    if model.dsa is None:
        return 0.0
    pairs = seq_length / 2 if causal else float(seq_length)
    products = 6.0 * model.dsa.indexer_n_heads * model.dsa.indexer_head_dim * pairs
    matrices = sum(w.numel for w in indexer(model, "indexer") if w.kind != "norm")
    return layers * (products - 2.0 * matrices)


def chosen_keys(model: ModelConfig, seq_length: int, *, causal: bool) -> float:
    """Return the mean number of keys per token of sparse attention; without it, all."""
    if model.dsa is None or model.dsa.indexer_topk >= seq_length:
        return seq_length / 2 if causal else float(seq_length)
    topk = model.dsa.indexer_topk
    # the first tokens see fewer
    return topk * (1 - topk / (2 * seq_length)) if causal else float(topk)


def _keys(model: ModelConfig, layer: int, seq_length: int, *, causal: bool) -> float:
    """Return the mean number of keys that a token of layer `layer` is multiplied with."""
    every = model.window_attn_skip_freq
    window = model.window_size
    whole = chosen_keys(model, seq_length, causal=causal)
    if window is None or (every is not None and (layer + 1) % every == 0) or window >= seq_length:
        return whole
    # the first `window` tokens see half a window on average, the others a whole one
    return window * (1 - window / (2 * seq_length))
