"""Parameters and floating-point operations of a decoder-only transformer, from its configuration
only.
"""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig


def parameters(model: ModelConfig) -> int:
    """Return the trainable parameters of the model as built, with the padded vocabulary; each
    shared weight once.
    """
    embeddings = model.padded_vocab_size * model.hidden_size
    total = embeddings if model.tie_word_embeddings else 2 * embeddings
    if model.position_embedding_type == "learned_absolute":
        total += model.max_position_embeddings * model.hidden_size
    total += _norm(model, model.hidden_size)
    total += model.mtp_held * prediction_parameters(model)
    if model.moe is None:
        dense = model.num_layers
    else:
        dense = min(model.moe.first_dense_layers, model.num_layers)
    for moe, first, end in ((False, 0, dense), (True, dense, model.num_layers)):
        if first < end:
            softmax = model.softmax_among(end) - model.softmax_among(first)
            total += softmax * _layer(model, moe, False)
            total += (
                (end - first - softmax) * _layer(model, moe, True) if softmax < end - first else 0
            )
    return total


def active_parameters(model: ModelConfig) -> int:
    """Return the parameters that one token visits: all of them for a dense model, the chosen
    experts for an MoE.
    """
    if model.moe is None:
        return parameters(model)
    idle = model.moe.num_experts - model.moe.router_topk
    layers = model.num_layers - model.moe.first_dense_layers + model.mtp_held
    return parameters(model) - layers * idle * _mlp(model, model.moe.ffn_hidden_size)


def layer_parameters(model: ModelConfig, index: int) -> int:
    """Return the trainable parameters of layer `index` (counted from 0)."""
    moe = model.moe is not None and index >= model.moe.first_dense_layers
    return _layer(model, moe, model.is_linear(index))


def _layer(model: ModelConfig, moe: bool, linear: bool) -> int:
    norms = (4 if model.norm_placement == "pre_and_post" else 2) * _norm(model, model.hidden_size)
    if linear:
        return norms + gated_delta_net(model) + _feed_forward(model, moe)
    mixer = latent_attention(model) if model.mla else attention(model)
    sinks = model.num_attention_heads if model.softmax_type == "learnable" else 0
    return norms + mixer + sinks + _feed_forward(model, moe)


def prediction_parameters(model: ModelConfig) -> int:
    """Return the trainable parameters of one layer of multi-token prediction: a layer like the
    last, the projection of hidden state and next embedding in front of it, which has no bias, and
    three norms.
    """
    hidden = model.hidden_size
    return (
        layer_parameters(model, model.num_layers - 1)
        + 2 * hidden * hidden
        + 3 * _norm(model, hidden)
    )


def _norm(model: ModelConfig, width: int) -> int:
    return width if model.normalization == "RMSNorm" else 2 * width


def attention(model: ModelConfig) -> int:
    """Return the trainable parameters of one layer's softmax attention."""
    hidden = model.hidden_size
    heads = model.num_attention_heads * model.head_dim
    qkv = (
        heads * (2 if model.attention_output_gate else 1) + 2 * model.query_groups * model.head_dim
    )
    total = hidden * qkv + heads * hidden
    if model.add_bias_linear or model.add_qkv_bias:
        total += qkv
    if model.add_bias_linear or model.add_proj_bias:
        total += hidden
    if model.qk_layernorm:
        whole = heads + model.query_groups * model.head_dim
        total += _norm(model, whole if model.qk_layernorm_across_heads else 2 * model.head_dim)
    return total


def gated_delta_net(model: ModelConfig) -> int:
    """Return the trainable parameters of one gated delta net."""
    own = model.linear_attention
    assert own is not None
    projections = model.hidden_size * (sum(own.sections) + own.value_channels)
    return (
        projections
        + own.conv_channels * own.conv_kernel_dim
        + 2 * own.num_value_heads
        + own.value_head_dim
    )


def latent_attention(model: ModelConfig) -> int:
    """Return the trainable parameters of one layer's multi-latent attention."""
    mla = model.mla
    assert mla is not None
    hidden = model.hidden_size
    heads = model.num_attention_heads
    q_width = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    if mla.q_lora_rank:
        total = hidden * mla.q_lora_rank + mla.q_lora_rank * q_width
        total += _norm(model, mla.q_lora_rank) if model.qk_layernorm else 0
    else:
        total = hidden * q_width
    total += hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    total += _norm(model, mla.kv_lora_rank) if model.qk_layernorm else 0
    total += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
    norm = 2 * model.dsa.indexer_head_dim if model.dsa is not None else 0
    bias = hidden if model.add_bias_linear else 0
    return total + heads * mla.v_head_dim * hidden + bias + _indexer(model) + norm


def _indexer(model: ModelConfig) -> int:
    """Return the parameters of the matrices of one layer's indexer."""
    if model.dsa is None or model.mla is None:
        return 0
    heads = model.dsa.indexer_n_heads
    width = model.dsa.indexer_head_dim
    return heads * width * (model.mla.q_lora_rank or model.hidden_size) + model.hidden_size * (
        width + heads
    )


def _mlp(model: ModelConfig, width: int) -> int:
    up = 2 * width if model.gated else width
    total = model.hidden_size * (up + width)
    return total + (up + model.hidden_size if model.add_bias_linear or model.add_mlp_bias else 0)


def _feed_forward(model: ModelConfig, sparse: bool) -> int:
    moe = model.moe
    if moe is None or not sparse:
        return _mlp(model, model.ffn_hidden_size)
    router = model.hidden_size + (1 if model.add_bias_linear else 0)
    total = moe.num_experts * (router + _mlp(model, moe.ffn_hidden_size))
    if moe.shared_expert_intermediate_size:
        total += _mlp(model, moe.shared_expert_intermediate_size)
        total += model.hidden_size if moe.shared_expert_gate else 0
    return total


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation.

    6 per weight that multiplies (2 forward, 4 backward), the embedding's look-up excluded, and 12
    per layer, query head width and key for attention, halved when `causal` (published figures use
    both conventions). Layers with a window count the keys in it under both; a layer of linear
    attention counts 6 for each element of its state, forward. Sparse attention is to the chosen
    keys, and `index_flops` are of what chooses them.
    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    weights = active_parameters(model)
    table = model.padded_vocab_size * model.hidden_size
    if not model.tie_word_embeddings:
        weights -= table
    if model.position_embedding_type == "learned_absolute":
        weights -= model.max_position_embeddings * model.hidden_size
    # a layer that is used several times multiplies each time, and every MTP layer with the output
    # layer once more
    weights += ((model.mtp_num_layers or 0) - model.mtp_held) * _visited_by_prediction(model)
    weights += (model.mtp_num_layers or 0) * table
    if model.mla:
        widths = (
            2 * model.mla.qk_head_dim + 2 * model.mla.qk_pos_emb_head_dim + 2 * model.mla.v_head_dim
        )
    else:
        widths = 4 * model.head_dim
    softmax = [layer for layer in range(model.num_layers) if not model.is_linear(layer)]
    keys = sum(_keys(model, layer, seq_length, causal=causal) for layer in softmax)
    keys += (model.mtp_num_layers or 0) * _keys(model, 0, seq_length, causal=causal)
    states = state_flops(model, model.num_layers - model.softmax_among(model.num_layers))
    indexers = index_flops(
        model, model.num_layers + (model.mtp_num_layers or 0), seq_length, causal=causal
    )
    return 6.0 * weights + 3.0 * model.num_attention_heads * widths * keys + states + indexers


def _visited_by_prediction(model: ModelConfig) -> int:
    """Return the parameters of an MTP layer that one token visits."""
    if model.moe:
        idle = (model.moe.num_experts - model.moe.router_topk) * _mlp(
            model, model.moe.ffn_hidden_size
        )
    else:
        idle = 0
    return prediction_parameters(model) - idle


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
    return layers * (products - 2.0 * _indexer(model))


def chosen_keys(model: ModelConfig, seq_length: int, *, causal: bool) -> float:
    """Return the keys that a token of sparse attention is multiplied with, on average over the
    sequence; without it, all.
    """
    if model.dsa is None or model.dsa.indexer_topk >= seq_length:
        return seq_length / 2 if causal else float(seq_length)
    topk = model.dsa.indexer_topk
    # the first tokens see fewer
    return topk * (1 - topk / (2 * seq_length)) if causal else float(topk)


def _keys(model: ModelConfig, layer: int, seq_length: int, *, causal: bool) -> float:
    """Return the keys that a token of layer `layer` is multiplied with, on average over the
    sequence.
    """
    every = model.window_attn_skip_freq
    window = model.window_size
    whole = chosen_keys(model, seq_length, causal=causal)
    if window is None or (every is not None and (layer + 1) % every == 0) or window >= seq_length:
        return whole
    # the first `window` tokens see half a window on average, the others a whole one
    return window * (1 - window / (2 * seq_length))


def expert_parameters(model: ModelConfig) -> int:
    """Return the trainable parameters of routed experts: what expert parallelism shards."""
    if model.moe is None:
        return 0
    layers = model.num_layers - model.moe.first_dense_layers + model.mtp_held
    return layers * model.moe.num_experts * _mlp(model, model.moe.ffn_hidden_size)
