"""A decoder-only transformer shrunk for a laptop: narrower, with the given layers."""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.linear_attention import LinearAttentionConfig
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.config.schema.rope_scaling import RopeScalingConfig

HEAD = 16
HIDDEN = 64
FFN = 128
VOCAB = 512
PADDED = 385
"""Token ids of a model with padding, whose last rows are padding on whole ranks of tp8."""


def vocabulary(model: ModelConfig) -> int:
    """Return the token ids of a small model, which has padding where the model has."""
    return VOCAB if model.padded_vocab_size == model.vocab_size else PADDED


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """Return `model` with so many layers, for the layout `p` and sequences of `seq_length`.

    Heads and key/value heads become the fewest that keep how they are split, experts at most two
    per rank. Everything that decides which code runs stays as it was: norm, activation, biases,
    positions, windows, sinks, tying, routing.
    """
    # Groups that several ranks share stay shared.
    groups = p.tp if model.query_groups >= p.tp else model.query_groups
    ratio = min(2, model.num_attention_heads // model.query_groups)
    heads = groups * ratio
    if heads % p.tp:
        heads = groups * p.tp
    if p.cp_comm_type in ("a2a", "a2a+p2p"):  # as many key/value heads as are exchanged
        exchange = (p.hierarchical_cp_sizes or (p.cp, 1))[0]
        groups = p.tp * exchange
        heads = groups
    update: dict[str, Any] = {
        "num_layers": layers,
        # At least 16 channels for each tensor-parallel rank.
        "hidden_size": HIDDEN * max(1, p.tp // 4),
        "ffn_hidden_size": FFN * max(1, p.tp // 4),
        "num_attention_heads": heads,
        "num_query_groups": groups if model.num_query_groups is not None else None,
        "kv_channels": HEAD,
        "vocab_size": vocabulary(model),
        "max_position_embeddings": max(seq_length, 64),
    }
    if model.num_query_groups is None:
        update["num_attention_heads"] = max(groups, 2)
    if model.window_size is not None:
        # Narrow enough that a window hides something in so short a sequence.
        update["window_size"] = min(model.window_size, seq_length // 4)
    if (
        model.window_attn_skip_freq is not None
    ):  # some layer keeps its window, and where there are two, one has none
        update["window_attn_skip_freq"] = min(model.window_attn_skip_freq, max(2, layers))
    if model.rope_scaling is not None:
        update["rope_scaling"] = _scaling(model.rope_scaling, int(HEAD * model.rotary_percent) // 2)
    if model.dsa is not None:  # some queries choose among more keys than they may
        chosen = min(model.dsa.indexer_topk, max(1, seq_length // 4))
        small = {"indexer_n_heads": 4, "indexer_head_dim": HEAD, "indexer_topk": chosen}
        update["dsa"] = model.dsa.model_copy(update=small)
    if model.linear_attention is not None:
        update["linear_attention"] = _gated_delta_net(model.linear_attention, p, layers)
    if model.mup is not None:  # as many times as wide as its base
        base = max(1, round(update["hidden_size"] / model.width_mult))
        update["mup"] = model.mup.model_copy(update={"base_hidden_size": base})
    if model.moe is not None:
        update["moe"] = _experts(model.moe, p, layers)
    if model.mla is not None:
        update["kv_channels"] = model.kv_channels
        update["num_attention_heads"] = max(
            groups if p.cp_comm_type in ("a2a", "a2a+p2p") else p.tp, 2
        )
        update["mla"] = model.mla.model_copy(
            update={
                "q_lora_rank": 32 if model.mla.q_lora_rank else None,
                "kv_lora_rank": 32,
                "qk_head_dim": 16,
                "qk_pos_emb_head_dim": 8,
                "v_head_dim": 16,
            }
        )
    return model.model_copy(update=update)


def _scaling(scaling: RopeScalingConfig, turns: int) -> RopeScalingConfig:
    short = scaling.short_factor
    long = scaling.long_factor
    return scaling.model_copy(
        update={"short_factor": short and short[:turns], "long_factor": long and long[:turns]}
    )


def _gated_delta_net(
    own: LinearAttentionConfig, p: ParallelConfig, layers: int
) -> LinearAttentionConfig:
    """Return a small gated delta net: one head of queries and keys on a rank, as many of values as
    share it, at most two; a layer of each kind.
    """
    return own.model_copy(
        update={
            "freq": min(own.freq, max(2, layers)),
            "num_key_heads": p.tp,
            "num_value_heads": p.tp * min(2, own.num_value_heads // own.num_key_heads),
            "key_head_dim": HEAD,
            "value_head_dim": HEAD if own.key_head_dim == own.value_head_dim else 2 * HEAD,
        }
    )


def _experts(moe: MoEConfig, p: ParallelConfig, layers: int) -> MoEConfig:
    groups = 2 if moe.router_num_groups else None
    experts = p.ep * min(2, moe.num_experts // p.ep)
    experts = max(experts, 4) if experts % (2 * p.ep) == 0 or p.ep in (1, 2, 4) else experts
    topk = min(moe.router_topk, 2, experts)
    shared = 32 * p.tp if moe.shared_expert_intermediate_size else None
    chosen = min(moe.group_score_topk or 1, experts // groups) if groups else None
    return moe.model_copy(
        update={
            "num_experts": experts,
            "router_topk": topk,
            "ffn_hidden_size": 32 * (p.etp or p.tp),
            "shared_expert_intermediate_size": shared,
            "alltoall_capacity_factor": None,  # an untrained router is not balanced
            "first_dense_layers": min(moe.first_dense_layers, 1 if layers > 1 else 0),
            "router_num_groups": groups,
            "router_group_topk": 1 if groups and moe.router_group_topk else None,
            "router_group_score_topk": chosen,
        }
    )
