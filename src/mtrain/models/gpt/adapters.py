"""Parameters of the low-rank adapters of a decoder-only transformer, from its configuration
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.parts import parts_of
from mtrain.models.weights import Weight, expert_tensors

Size = tuple[int, int, int]
"""A layer: its inputs, its outputs, and how many of Hugging Face's layers it is."""


def adapter_parameters(model: ModelConfig, peft: PeftConfig) -> tuple[int, int]:
    """Return the parameters of adapters: of layers that every token visits, and of routed experts.

    `peft` is resolved.
    """
    target = peft.target or ()
    moe = model.moe
    sparse = 0 if moe is None else model.num_layers - min(moe.first_dense_layers, model.num_layers)
    shared = moe.shared_expert_intermediate_size if moe is not None else None
    total = model.num_layers * adapters_of(attention_layers(model, target), peft)
    total += (model.num_layers - sparse) * adapters_of(
        mlp_layers(model, model.ffn_hidden_size, target), peft
    )
    total += sparse * adapters_of(mlp_layers(model, shared, target), peft) if shared else 0
    if moe is None or "experts" not in target:
        return total, 0
    # gate and up projection of an expert are one weight
    layers = [
        (inputs, outputs, 1)
        for inputs, outputs, _ in mlp_layers(model, moe.ffn_hidden_size, ("fc1", "fc2"))
    ]
    return total, sparse * moe.num_experts * adapters_of(layers, peft)


def adapters_of(layers: Iterable[Size], peft: PeftConfig) -> int:
    """Return the parameters of the adapters of layers."""
    assert peft.r is not None
    magnitudes = int(peft.kind == "dora")
    return sum(
        peft.r * (parts * inputs + outputs) + magnitudes * outputs
        for inputs, outputs, parts in layers
    )


def attention_layers(model: ModelConfig, target: Iterable[str]) -> list[Size]:
    """Return the layers of attention that are in `target`."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    mla = model.mla
    if mla is None:
        width = heads * model.head_dim
        qkv = [(hidden, width + 2 * model.query_groups * model.head_dim, 3)]
    else:
        width = heads * mla.v_head_dim
        queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        rank = mla.q_lora_rank
        latent = mla.kv_lora_rank
        qkv = [(hidden, rank, 1), (rank, queries, 1)] if rank else [(hidden, queries, 1)]
        qkv += [
            (hidden, latent + mla.qk_pos_emb_head_dim, 1),
            (latent, heads * (mla.qk_head_dim + mla.v_head_dim), 1),
        ]
    return [*(qkv if "qkv" in target else ()), *([(width, hidden, 1)] if "proj" in target else ())]


def mlp_layers(model: ModelConfig, width: int, target: Iterable[str]) -> list[Size]:
    """Return the layers of an MLP of a width that are in `target`."""
    parts = 2 if model.gated else 1
    first = (model.hidden_size, parts * width, parts)
    second = (width, model.hidden_size, 1)
    return [size for name, size in (("fc1", first), ("fc2", second)) if name in target]


def adapted(weights: Iterable[Weight], run: RunConfig) -> Iterator[Weight]:
    """Yield the weights of a stage, frozen, and those of the adapters of a layer behind its own;
    MTP layers have none.
    """
    for layer, group in groupby(weights, lambda weight: weight.name.rpartition(".")[0]):
        own = [replace(weight, frozen=True) for weight in group]
        yield from own
        if layer.startswith("mtp."):
            continue
        if own[0].kind == "experts":
            yield from _of_experts(layer, own, run) if "experts" in (run.peft.target or ()) else ()
        elif parts := parts_of(layer, run):
            yield from _of_layer(layer, own[0], parts, run.peft)


def _of_layer(name: str, weight: Weight, parts: int, peft: PeftConfig) -> Iterator[Weight]:
    """`lora_a` is split as the columns of the weight are, `lora_b` and magnitudes as its rows."""
    rows, columns = weight.shape
    by_columns = name.endswith(("linear_proj", "linear_fc2", "out_proj"))
    own = Weight(
        f"{name}.lora_a",
        (parts * (peft.r or 0), columns),
        "adapters",
        whole=weight.whole or not by_columns,
    )
    b = replace(
        own, name=f"{name}.lora_b", shape=(rows, peft.r or 0), whole=weight.whole or by_columns
    )
    yield from (own, b)
    if peft.kind == "dora":
        yield replace(b, name=f"{name}.magnitude", shape=(rows,))


def _of_experts(name: str, own: list[Weight], run: RunConfig) -> Iterator[Weight]:
    """Yield the adapters of each expert; a factor that is not split with the weight is split along
    the hidden size.
    """
    ranks = expert_tensors(run.parallel)
    r = run.peft.r or 0
    for number, weight in enumerate(w for w in own if len(w.shape) == 2):
        rows, columns = weight.shape
        columns, rows = (
            (columns // ranks, rows) if name.endswith("linear_fc1") else (columns, rows // ranks)
        )
        for part, shape in (("lora_a", (r, columns)), ("lora_b", (rows, r))):
            yield Weight(f"{name}.{part}{number}", shape, "adapters", expert=weight.expert)
