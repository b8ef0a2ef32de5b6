"""Parameters of the low-rank adapters of a decoder-only transformer, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterable

from mtrain.config.model import ModelConfig
from mtrain.config.peft import PeftConfig

Size = tuple[int, int, int]
"""A layer: its inputs, its outputs, and how many of Hugging Face's layers it is."""


def adapter_parameters(model: ModelConfig, peft: PeftConfig) -> tuple[int, int]:
    """Of a resolved `peft` section: those of layers that every token visits, and those of routed experts."""
    target, moe = peft.target or (), model.moe
    sparse = 0 if moe is None else model.num_layers - min(moe.first_dense_layers, model.num_layers)
    shared = moe.shared_expert_intermediate_size if moe is not None else None
    total = model.num_layers * _adapters(_attention(model, target), peft)
    total += (model.num_layers - sparse) * _adapters(_mlp(model, model.ffn_hidden_size, target), peft)
    total += sparse * _adapters(_mlp(model, shared, target), peft) if shared else 0
    if moe is None or "experts" not in target:
        return total, 0
    # gate and up projection of an expert are one weight
    layers = [(inputs, outputs, 1) for inputs, outputs, _ in _mlp(model, moe.ffn_hidden_size, ("fc1", "fc2"))]
    return total, sparse * moe.num_experts * _adapters(layers, peft)


def _adapters(layers: Iterable[Size], peft: PeftConfig) -> int:
    assert peft.r is not None
    magnitudes = int(peft.kind == "dora")
    return sum(peft.r * (parts * inputs + outputs) + magnitudes * outputs for inputs, outputs, parts in layers)


def _attention(model: ModelConfig, target: Iterable[str]) -> list[Size]:
    hidden, heads, mla = model.hidden_size, model.num_attention_heads, model.mla
    if mla is None:
        width = heads * model.head_dim
        qkv = [(hidden, width + 2 * model.query_groups * model.head_dim, 3)]
    else:
        width, queries = heads * mla.v_head_dim, heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        rank, latent = mla.q_lora_rank, mla.kv_lora_rank
        qkv = [(hidden, rank, 1), (rank, queries, 1)] if rank else [(hidden, queries, 1)]
        qkv += [
            (hidden, latent + mla.qk_pos_emb_head_dim, 1),
            (latent, heads * (mla.qk_head_dim + mla.v_head_dim), 1),
        ]
    return [*(qkv if "qkv" in target else ()), *([(width, hidden, 1)] if "proj" in target else ())]


def _mlp(model: ModelConfig, width: int, target: Iterable[str]) -> list[Size]:
    parts = 2 if model.gated else 1
    first, second = (model.hidden_size, parts * width, parts), (width, model.hidden_size, 1)
    return [size for name, size in (("fc1", first), ("fc2", second)) if name in target]
