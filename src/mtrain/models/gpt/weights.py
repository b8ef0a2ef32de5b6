"""The weights of a decoder-only transformer on one rank of a stage, with its low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import VALUE_HEAD, ModelConfig
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.parts import parts_of
from mtrain.models.weights import Weight, column, expert_tensors, mlp, norm, row


def stage_weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield the weights of a stage, including tables that several stages share."""
    rows = m.padded_vocab_size // p.tp
    h = m.hidden_size
    apart = m.ties_output and not (held.embedding and held.loss)
    if held.embedding or held.mtp:
        # The stages of embedding, MTP and loss each hold the table, and add up its gradient.
        again = apart or (bool(m.mtp_num_layers) and not (held.embedding and held.mtp))
        yield Weight("embedding.word_embeddings.weight", (rows, h), "embedding", shared=again)
        if m.position_embedding_type == "learned_absolute":
            shape = (m.max_position_embeddings, h)
            yield Weight("embedding.position_embeddings.weight", shape, "embedding", whole=True)
    for number, index in enumerate(held.layers):
        yield from layer(m, p, f"decoder.layers.{number}", index)
    if ends(m, held):
        yield from norm(m, "decoder.final_layernorm", h)
    for number in range(min(held.mtp, m.mtp_held)):
        yield from prediction(m, p, f"mtp.layers.{number}")
    if held.loss and not (m.ties_output and (held.embedding or held.mtp)):
        if m.head:
            yield Weight(f"{VALUE_HEAD}.weight", (1, h), "output", whole=True)
        else:
            yield Weight("output_layer.weight", (rows, h), "output", shared=m.ties_output)


def buffers(m: ModelConfig) -> Iterator[Weight]:
    """Yield the biases that balance routers, which the optimizer does not move."""
    if m.moe is None or not m.moe.router_enable_expert_bias:
        return
    layers = [f"decoder.layers.{index}" for index in range(m.moe.first_dense_layers, m.num_layers)]
    layers += [f"mtp.layers.{number}.transformer_layer" for number in range(m.mtp_held)]
    for name in layers:
        yield Weight(f"{name}.mlp.router.expert_bias", (m.moe.num_experts,), "router", whole=True)


def alike(m: ModelConfig) -> dict[int, int]:
    """Return a layer of each kind, and how many have its weights."""
    last = m.num_layers - 1
    dense = last if m.moe is None else min(m.moe.first_dense_layers, last)
    # With multi-token prediction the final norm comes with the last layer (`ends`).
    found = {last: 1}
    for first, end in ((0, dense), (dense, last)):
        softmax = m.softmax_among(end) - m.softmax_among(first)
        for linear, number in ((False, softmax), (True, end - first - softmax)):
            if number:
                of_kind = (i for i in range(first, end) if m.is_linear(i) == linear)
                # A model with a section of another family, which a rule refuses, may have none.
                found[next(of_kind, first)] = number
    return found


def ends(m: ModelConfig, held: Stage) -> bool:
    """Return whether the final norm is on a stage: that of the loss or of the last MTP layer."""
    return m.num_layers - 1 in held.layers if m.mtp_num_layers else held.loss


def layer(m: ModelConfig, p: ParallelConfig, name: str, index: int) -> Iterator[Weight]:
    """Yield the weights of layer `index`, counted from 0."""
    before = m.norm_placement in ("pre", "pre_and_post")
    if before:
        yield from norm(m, f"{name}.input_layernorm", m.hidden_size)
    if m.is_linear(index):
        mixer = gated_delta_net
    else:
        mixer = latent if m.mla else attention
    yield from mixer(m, p, f"{name}.self_attention")
    if before:
        yield from norm(m, f"{name}.pre_mlp_layernorm", m.hidden_size)
    yield from _feed_forward(m, p, f"{name}.mlp", index)
    if m.norm_placement != "pre":
        yield from norm(m, f"{name}.post_self_attn_layernorm", m.hidden_size)
        yield from norm(m, f"{name}.post_mlp_layernorm", m.hidden_size)


def _sinks(m: ModelConfig, p: ParallelConfig, name: str) -> Iterator[Weight]:
    if m.softmax_type == "learnable":
        yield Weight(
            f"{name}.core_attention.softmax_offset", (m.num_attention_heads // p.tp,), "attention"
        )


def attention(m: ModelConfig, p: ParallelConfig, name: str) -> Iterator[Weight]:
    """Yield the weights of softmax attention with one linear layer for QKV."""
    h = m.hidden_size
    d = m.head_dim
    queries = m.num_attention_heads * d
    keys = m.query_groups * d
    yield from _sinks(m, p, name)
    bias = m.add_bias_linear or m.add_proj_bias
    yield from row(f"{name}.linear_proj", "attention", h, queries, p.tp, bias=bias)
    bias = m.add_bias_linear or m.add_qkv_bias
    gates = queries if m.attention_output_gate else 0
    yield from column(
        f"{name}.linear_qkv", "attention", queries + gates + 2 * keys, h, p.tp, bias=bias
    )
    if m.qk_layernorm:
        across = m.qk_layernorm_across_heads
        yield from norm(m, f"{name}.q_layernorm", queries if across else d)
        yield from norm(m, f"{name}.k_layernorm", keys if across else d)


def gated_delta_net(m: ModelConfig, p: ParallelConfig, name: str) -> Iterator[Weight]:
    """Yield the weights of linear attention."""
    own = m.linear_attention
    assert own is not None
    for each in ("dt_bias", "A_log"):
        yield Weight(f"{name}.{each}", (own.num_value_heads // p.tp,), "attention")
    yield from column(f"{name}.in_proj", "attention", sum(own.sections), m.hidden_size, p.tp)
    yield Weight(
        f"{name}.conv1d.weight", (own.conv_channels // p.tp, 1, own.conv_kernel_dim), "attention"
    )
    yield Weight(f"{name}.out_norm.weight", (own.value_head_dim,), "norm", whole=True)
    yield from row(f"{name}.out_proj", "attention", m.hidden_size, own.value_channels, p.tp)


def latent(m: ModelConfig, p: ParallelConfig, name: str) -> Iterator[Weight]:
    """Yield the weights of multi-latent attention."""
    mla = m.mla
    h = m.hidden_size
    n = m.num_attention_heads
    assert mla is not None
    wide = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    low = mla.kv_lora_rank
    yield from _sinks(m, p, name)
    yield from indexer(m, f"{name}.core_attention.indexer")
    yield from row(
        f"{name}.linear_proj", "attention", h, n * mla.v_head_dim, p.tp, bias=m.add_bias_linear
    )
    if mla.q_lora_rank:
        yield Weight(
            f"{name}.linear_q_down_proj.weight", (mla.q_lora_rank, h), "attention", whole=True
        )
        yield from column(f"{name}.linear_q_up_proj", "attention", n * wide, mla.q_lora_rank, p.tp)
    else:
        yield from column(f"{name}.linear_q_proj", "attention", n * wide, h, p.tp)
    yield Weight(
        f"{name}.linear_kv_down_proj.weight",
        (low + mla.qk_pos_emb_head_dim, h),
        "attention",
        whole=True,
    )
    yield from column(
        f"{name}.linear_kv_up_proj", "attention", n * (mla.qk_head_dim + mla.v_head_dim), low, p.tp
    )
    if m.qk_layernorm:
        yield from norm(m, f"{name}.q_layernorm", mla.q_lora_rank) if mla.q_lora_rank else ()
        yield from norm(m, f"{name}.kv_layernorm", low)


def indexer(m: ModelConfig, name: str) -> Iterator[Weight]:
    """Yield the weights of the indexer of sparse attention."""
    if m.dsa is None or m.mla is None:
        return
    width = m.dsa.indexer_head_dim
    latent = m.mla.q_lora_rank or m.hidden_size
    shapes = {
        "linear_wq_b": (m.dsa.indexer_n_heads * width, latent),
        "linear_wk": (width, m.hidden_size),
    }
    for layer, shape in shapes.items():
        yield Weight(f"{name}.{layer}.weight", shape, "attention", whole=True)
    for part in ("weight", "bias"):
        yield Weight(f"{name}.k_norm.{part}", (width,), "norm", whole=True)
    yield Weight(
        f"{name}.linear_weights_proj.weight",
        (m.dsa.indexer_n_heads, m.hidden_size),
        "attention",
        whole=True,
    )


def _feed_forward(m: ModelConfig, p: ParallelConfig, name: str, index: int) -> Iterator[Weight]:
    moe = m.moe
    if moe is None or index < moe.first_dense_layers:
        yield from mlp(m, name, m.ffn_hidden_size, p.tp, bias=m.add_bias_linear or m.add_mlp_bias)
        return
    yield from mixture(m, p, moe, name)


def mixture(m: ModelConfig, p: ParallelConfig, moe: MoEConfig, name: str) -> Iterator[Weight]:
    """Yield router and experts."""
    yield Weight(f"{name}.router.weight", (moe.num_experts, m.hidden_size), "router", whole=True)
    if m.add_bias_linear:
        yield Weight(f"{name}.router.bias", (moe.num_experts,), "router", whole=True)
    yield from _experts(m, p, moe, f"{name}.experts")
    if moe.shared_expert_intermediate_size:
        shared = f"{name}.shared_experts"
        if moe.shared_expert_gate:
            yield Weight(f"{shared}.gate_weight", (1, m.hidden_size), "router", whole=True)
        yield from mlp(m, shared, moe.shared_expert_intermediate_size, p.tp, bias=m.add_bias_linear)


def _experts(m: ModelConfig, p: ParallelConfig, moe: MoEConfig, name: str) -> Iterator[Weight]:
    width = moe.ffn_hidden_size // expert_tensors(p)
    h = m.hidden_size
    # Otherwise experts are reduced over the same ranks as all other weights.
    apart = p.ep > 1 or expert_tensors(p) != p.tp
    up = (2 if m.gated else 1) * width
    for part, shape in (("linear_fc1", (up, h)), ("linear_fc2", (h, width))):
        for number in range(moe.num_experts // p.ep):
            yield Weight(f"{name}.{part}.weight{number}", shape, "experts", expert=apart)
            if m.add_bias_linear:
                yield Weight(f"{name}.{part}.bias{number}", shape[:1], "experts", expert=apart)


def prediction(m: ModelConfig, p: ParallelConfig, name: str) -> Iterator[Weight]:
    """Yield the weights of one layer of multi-token prediction."""
    h = m.hidden_size
    yield from norm(m, f"{name}.enorm", h)
    yield from norm(m, f"{name}.hnorm", h)
    yield from column(f"{name}.eh_proj", "mlp", h, 2 * h, p.tp)
    # megatron-core builds it like the last layer of the model.
    yield from layer(m, p, f"{name}.transformer_layer", m.num_layers - 1)
    yield from norm(m, f"{name}.final_layernorm", h)


def adapted(weights: Iterable[Weight], run: RunConfig) -> Iterator[Weight]:
    """Yield the weights of a stage, frozen but for a value head, and those of the adapters of a
    layer behind its own; MTP layers have none.
    """
    for layer, group in groupby(weights, lambda weight: weight.name.rpartition(".")[0]):
        own = [replace(weight, frozen=layer != VALUE_HEAD) for weight in group]
        yield from own
        if layer.startswith("mtp."):
            continue
        if own[0].kind == "experts":
            yield from _of_experts(layer, own, run) if "experts" in (run.peft.target or ()) else ()
        elif parts := parts_of(layer, run):
            yield from _of_layer(layer, own[0], parts, run.peft)


def _of_layer(name: str, weight: Weight, parts: int, peft: PeftConfig) -> Iterator[Weight]:
    """Yield `lora_a`, split like the weight's columns, and the factors split like its rows."""
    rows, columns = weight.shape
    # Row-parallel layers are split by their inputs: A is split with them, and each rank has all of
    # B.
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
    """Yield the adapters of each expert; an uncut factor is split along the hidden size."""
    ranks = expert_tensors(run.parallel)
    r = run.peft.r or 0
    for number, weight in enumerate(w for w in own if len(w.shape) == 2):
        rows, columns = weight.shape
        # Expert-tensor ranks split fc1 by outputs and fc2 by inputs; the other factor is split
        # along the hidden size, so that none is held twice.
        columns, rows = (
            (columns // ranks, rows) if name.endswith("linear_fc1") else (columns, rows // ranks)
        )
        for part, shape in (("lora_a", (r, columns)), ("lora_b", (rows, r))):
            yield Weight(f"{name}.{part}{number}", shape, "adapters", expert=weight.expert)
