"""Hybrids: decoders of Mamba-2 layers, attention, MLPs and experts, in the order of a pattern."""

from __future__ import annotations

from math import lcm
from typing import Any

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.base import Family
from mtrain.models.count import counted
from mtrain.models.gpt import count as decoder
from mtrain.models.gpt.shrink import HEAD
from mtrain.models.gpt.shrink import shrink as shrink_decoder
from mtrain.models.gpt.weights import adapted
from mtrain.models.hybrid.config import (
    ATTENTION,
    DELTA,
    KINDS,
    LATENT,
    MAMBA,
    SPARSE,
    HybridConfig,
)
from mtrain.models.hybrid.graph import stage
from mtrain.models.hybrid.weights import alike, apart, buffers, saved_as, stage_weights

STATE = 16
CHUNK = 8


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation.

    6 per weight that multiplies and, of each layer of attention, 12 per query channel and key,
    halved when `causal`; of MLA 6 per channel of a query and of a value. A gated delta net and an
    indexer as in `models.gpt.count`. Of a Mamba-2 layer: in a chunk each token is multiplied with
    half of it (all of it, unless `causal`), with what it wrote for each group and with the channels
    of each head, and each channel with its state twice.
    Source: Dao and Gu 2024, arXiv:2405.21060, section 6.
    """
    h = HybridConfig.of(model)
    weights = counted(stage_weights, model, alike).active_parameters
    if not model.tie_word_embeddings:
        weights -= model.padded_vocab_size * model.hidden_size
    if model.position_embedding_type == "learned_absolute":
        weights -= model.max_position_embeddings * model.hidden_size
    share = 0.5 if causal else 1.0
    widths = 2 * model.head_dim * h.pattern.count(ATTENTION)
    if model.mla is not None:
        latent = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim + model.mla.v_head_dim
        widths += latent * (h.pattern.count(LATENT) + h.pattern.count(SPARSE))
    keys = decoder.chosen_keys(model, seq_length, causal=causal)
    logits = 6.0 * keys * model.num_attention_heads * widths
    chunk = share * min(h.chunk_size, seq_length)
    scan = h.pattern.count(MAMBA) * (chunk * (h.states + h.channels) + 2 * h.channels * h.state_dim)
    others = decoder.state_flops(model, h.pattern.count(DELTA))
    others += decoder.index_flops(model, h.pattern.count(SPARSE), seq_length, causal=causal)
    return 6.0 * weights + logits + 6.0 * scan + others


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """Return `model` with so many layers, for the layout `p` and sequences of `seq_length`.

    Attention, MLPs and experts shrink as a decoder-only transformer's do. Mixers keep groups and
    heads that tp and cp split, several heads of a group where there were several, and several
    chunks in a sequence.
    """
    hybrid = HybridConfig.of(model)
    small = shrink_decoder(model, p, layers=layers, seq_length=seq_length)
    own_groups = 2 if hybrid.num_groups >= 2 * p.tp else 1
    each = 2 if hybrid.num_heads > hybrid.num_groups else 1
    update = {
        "pattern": pattern(hybrid.pattern, layers),
        # tp and cp both split heads, in whole groups.
        "num_heads": each * p.tp * lcm(own_groups, p.cp),
        "head_dim": HEAD,
        "state_dim": STATE,
        "num_groups": p.tp * own_groups,
        "chunk_size": min(hybrid.chunk_size, CHUNK),
    }
    changed: dict[str, Any] = {"hybrid": hybrid.model_copy(update=update)}
    if (
        model.linear_attention is not None and small.linear_attention is not None
    ):  # the pattern names the layers
        freq = model.linear_attention.freq
        changed["linear_attention"] = small.linear_attention.model_copy(update={"freq": freq})
    return small.model_copy(update=changed)


def pattern(whole: str, layers: int) -> str:
    """Return a pattern of so many layers, with each kind once in order, then again."""
    kinds = list(dict.fromkeys(kind for kind in whole if kind in KINDS)) or ["M"]
    return "".join(kinds[i % len(kinds)] for i in range(layers))


FAMILY = Family(
    name="hybrid",
    builder="mtrain.models.hybrid.build:chunk",
    files="mtrain.models.hybrid.hf:files",
    reads_between=False,
    flops_per_token=flops_per_token,
    shrink=shrink,
    fewest_layers=lambda model: max(2, len(set(HybridConfig.of(model).pattern))),
    weights=stage_weights,
    alike=alike,
    buffers=buffers,
    saved_as=saved_as,
    apart=apart,
    stage=stage,
    adapted=adapted,
)
