"""Parameters and floating-point operations of a hybrid, from its configuration only."""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.models.gpt.adapters import Size, adapters_of, attention_layers, mlp_layers
from mtrain.models.gpt.count import (
    attention,
    chosen_keys,
    gated_delta_net,
    index_flops,
    latent_attention,
    state_flops,
)
from mtrain.models.hybrid.config import (
    ATTENTION,
    DELTA,
    DESCRIBED,
    EXPERTS,
    KINDS,
    LATENT,
    MAMBA,
    MLP,
    SPARSE,
    HybridConfig,
)


def own(model: ModelConfig) -> HybridConfig:
    """Return the section of the family's own keys, which is there."""
    assert model.hybrid is not None, "a model of the family hybrid has the section model.hybrid"
    return model.hybrid


def is_described(model: ModelConfig, kind: str) -> bool:
    """Return whether the model has the sections that describe a layer of this kind; a rule refuses
    others.
    """
    return kind in KINDS and all(
        getattr(model, section) is not None for section in DESCRIBED.get(kind, ())
    )


def channels(h: HybridConfig) -> int:
    """Return the channels of all heads of a Mamba-2 mixer."""
    return h.num_heads * h.head_dim


def states(h: HybridConfig) -> int:
    """Return the numbers that a token writes into the states of a Mamba-2 mixer; it reads as
    many.
    """
    return h.num_groups * h.state_dim


def parameters(model: ModelConfig) -> int:
    """Return the trainable parameters of the model as built, with the padded vocabulary; a tied
    weight once.
    """
    table = model.padded_vocab_size * model.hidden_size
    ends = (1 if model.tie_word_embeddings else 2) * table + _norm(model)
    if model.position_embedding_type == "learned_absolute":
        ends += model.max_position_embeddings * model.hidden_size
    each = {kind: layer_parameters(model, kind) for kind in set(own(model).pattern)}
    return ends + sum(each[kind] for kind in own(model).pattern)


def active_parameters(model: ModelConfig) -> int:
    """Return the parameters that one token visits."""
    if model.moe is None:
        return parameters(model)
    idle = model.moe.num_experts - model.moe.router_topk
    return parameters(model) - own(model).pattern.count(EXPERTS) * idle * _mlp(
        model, model.moe.ffn_hidden_size
    )


def expert_parameters(model: ModelConfig) -> int:
    """Return the parameters of routed experts."""
    if model.moe is None:
        return 0
    return (
        own(model).pattern.count(EXPERTS)
        * model.moe.num_experts
        * _mlp(model, model.moe.ffn_hidden_size)
    )


def layer_parameters(model: ModelConfig, kind: str) -> int:
    """Return the parameters of a layer, with its norm."""
    made = {
        MAMBA: _mamba,
        ATTENTION: attention,
        LATENT: latent_attention,
        SPARSE: latent_attention,
        DELTA: gated_delta_net,
        MLP: lambda m: _mlp(m, m.ffn_hidden_size),
        EXPERTS: _experts,
    }
    return _norm(model) + (made[kind](model) if is_described(model, kind) else 0)


def _norm(model: ModelConfig) -> int:
    return model.hidden_size if model.normalization == "RMSNorm" else 2 * model.hidden_size


def _mamba(model: ModelConfig) -> int:
    h = own(model)
    mixed = channels(own(model)) + 2 * states(own(model))
    linear = model.hidden_size * (channels(h) + mixed + h.num_heads + channels(h))
    return linear + mixed * (h.conv_kernel + 1) + channels(h) + 3 * h.num_heads


def _mlp(model: ModelConfig, width: int) -> int:
    return (3 if model.gated else 2) * model.hidden_size * width


def _experts(model: ModelConfig) -> int:
    moe = model.moe
    if moe is None:
        return 0
    total = moe.num_experts * (model.hidden_size + _mlp(model, moe.ffn_hidden_size))
    if moe.shared_expert_intermediate_size:
        total += _mlp(model, moe.shared_expert_intermediate_size)
        total += model.hidden_size if moe.shared_expert_gate else 0
    return total


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation.

    6 per weight that multiplies and, of each layer of attention, 12 per query channel and key,
    halved when `causal`; of MLA 6 per channel of a query and of a value. A gated delta net and an
    indexer as in `models.gpt.count`. Of a Mamba-2 layer: in a chunk each token is multiplied with
    half of it (all of it, unless `causal`), with what it wrote for each group and with the channels
    of each head, and each channel with its state twice.
    Source: Dao and Gu 2024, arXiv:2405.21060, section 6.
    """
    h = own(model)
    table = model.padded_vocab_size * model.hidden_size
    weights = active_parameters(model) - (0 if model.tie_word_embeddings else table)
    if model.position_embedding_type == "learned_absolute":
        weights -= model.max_position_embeddings * model.hidden_size
    share = 0.5 if causal else 1.0
    widths = 2 * model.head_dim * h.pattern.count(ATTENTION)
    if model.mla is not None:
        latent = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim + model.mla.v_head_dim
        widths += latent * (h.pattern.count(LATENT) + h.pattern.count(SPARSE))
    keys = chosen_keys(model, seq_length, causal=causal)
    logits = 6.0 * keys * model.num_attention_heads * widths
    chunk = share * min(h.chunk_size, seq_length)
    scan = h.pattern.count(MAMBA) * (
        chunk * (states(h) + channels(h)) + 2 * channels(h) * h.state_dim
    )
    others = state_flops(model, h.pattern.count(DELTA))
    others += index_flops(model, h.pattern.count(SPARSE), seq_length, causal=causal)
    return 6.0 * weights + logits + 6.0 * scan + others


def adapter_parameters(model: ModelConfig, peft: PeftConfig) -> tuple[int, int]:
    """Return the parameters of adapters: of layers that every token visits, and of routed experts.

    `peft` is resolved.
    """
    target = peft.target or ()
    moe = model.moe
    pattern = own(model).pattern
    shared = moe.shared_expert_intermediate_size if moe is not None else None
    layers: dict[str, list[Size]] = {
        MAMBA: [size for name, size in _mixer(model) if name in target],
        **dict.fromkeys((ATTENTION, LATENT), attention_layers(model, target)),
        MLP: mlp_layers(model, model.ffn_hidden_size, target),
        EXPERTS: mlp_layers(model, shared, target) if shared else [],
    }
    total = sum(pattern.count(kind) * adapters_of(sizes, peft) for kind, sizes in layers.items())
    if moe is None or "experts" not in target:
        return total, 0
    # gate and up projection of an expert are one weight
    each = [
        (inputs, outputs, 1)
        for inputs, outputs, _ in mlp_layers(model, moe.ffn_hidden_size, ("fc1", "fc2"))
    ]
    return total, pattern.count(EXPERTS) * moe.num_experts * adapters_of(each, peft)


def _mixer(model: ModelConfig) -> list[tuple[str, Size]]:
    h = own(model)
    rows = 2 * channels(h) + 2 * states(h) + h.num_heads
    return [
        ("in_proj", (model.hidden_size, rows, 1)),
        ("out_proj", (channels(h), model.hidden_size, 1)),
    ]
