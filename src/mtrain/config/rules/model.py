"""Model rules: heads, widths and positions that fit each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtrain.config.engine.formats import FORMATS
from mtrain.config.engine.kernels import te_norm_obstacle
from mtrain.config.rules.finding import Change, Finding, divisors, listed, multiples, nearest
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

FP16_MAX = int(FORMATS["fp16"].largest)


@rule(
    Code("MT201", example="model.hidden_size=250"),
    reads="model.kv_channels model.mla model.hidden_size model.num_attention_heads",
)
def head_width(run: RunConfig) -> Iterator[Finding]:
    """Without an explicit width, a head is hidden_size / num_attention_heads wide."""
    m = run.model
    if m.mla is None and m.kv_channels is None and m.hidden_size % m.num_attention_heads:
        width = m.hidden_size / m.num_attention_heads
        rule = (
            f"hidden_size {m.hidden_size} / {m.num_attention_heads} heads = {width:.4g} is no whole"
            " width of a head"
        )
        head = max(2, m.hidden_size // m.num_attention_heads // 2 * 2)
        near: tuple[Change, ...] = tuple(
            {"model.hidden_size": n} for n in multiples(m.hidden_size, 2 * m.num_attention_heads)
        )
        yield Finding("MT201", "model.hidden_size", rule, (*near, {"model.kv_channels": head}))


@rule(
    Code("MT202", example="model.num_query_groups=3"),
    reads="model.mla model.num_query_groups model.num_attention_heads",
)
def query_group_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Each key/value head serves the same number of query heads."""
    m = run.model
    if (
        m.mla is None
        and m.num_query_groups is not None
        and m.num_attention_heads % m.num_query_groups
    ):
        legal = divisors(m.num_attention_heads)
        rule = (
            f"{m.num_query_groups} groups do not divide {m.num_attention_heads} heads; legal:"
            f" {listed(legal)}"
        )
        fixes: tuple[Change, ...] = tuple(
            {"model.num_query_groups": n} for n in nearest(m.num_query_groups, legal)
        )
        yield Finding("MT202", "model.num_query_groups", rule, fixes)


@rule(
    Code("MT203", example="model.kv_channels=15"),
    reads=(
        "model.position_embedding_type model.rotary_percent model.kv_channels model.hidden_size "
        "model.num_attention_heads model.mla.qk_pos_emb_head_dim"
    ),
)
def rotary_width(run: RunConfig) -> Iterator[Finding]:
    """Rotary positions rotate pairs of channels."""
    m = run.model
    if m.position_embedding_type != "rope":
        return
    whole = m.mla.qk_pos_emb_head_dim if m.mla is not None else m.head_dim
    width = int(whole * m.rotary_percent)
    if width >= 2 and width % 2 == 0:
        return
    key = "model.mla.qk_pos_emb_head_dim" if m.mla is not None else "model.kv_channels"
    even: Change = {key: max(2, whole // 2 * 2)}
    all_of_it: Change = {"model.rotary_percent": 1.0}
    fixes = (all_of_it, {"model.rotary_percent": 0.5}, even, {**even, **all_of_it})
    blamed = key if m.mla is not None and m.rotary_percent == 1 else "model.rotary_percent"
    rule = (
        f"{width} channels of a head rotate, and they rotate in pairs: an even number, at least 2"
    )
    yield Finding(
        "MT203",
        blamed,
        rule,
        fixes,
        also=("model.kv_channels", "model.hidden_size", "model.num_attention_heads"),
    )


@rule(
    Code("MT204", example="data.seq_length=2048"),
    reads=(
        "data.seq_length model.position_embedding_type model.max_position_embeddings"
        " model.rope_scaling.rope_type"
    ),
)
def position_range(run: RunConfig) -> Iterator[Finding]:
    """No sample is longer than the model's positions, except with dynamic ones."""
    m = run.model
    seq = run.data.length
    if m.position_embedding_type in ("none", "relative") or seq <= m.max_position_embeddings:
        return
    if m.rope_scaling is None or m.rope_scaling.rope_type != "dynamic":
        rule = (
            f"samples of {seq} tokens, and positions for {m.max_position_embeddings}"
            " (model.max_position_embeddings)"
        )
        fixes: tuple[Change, ...] = (
            {"data.seq_length": m.max_position_embeddings},
            {"model.max_position_embeddings": seq},
        )
        yield Finding("MT204", "data.seq_length", rule, fixes)


@rule(
    Code(
        "MT207",
        "MLA carries its positions in rope.",
        example="model=deepseek_tiny model.position_embedding_type=none",
    ),
    Code(
        "MT208",
        "MLA has no key/value heads to group.",
        example="model=deepseek_tiny model.num_query_groups=1",
    ),
    Code(
        "MT209",
        "The widths of MLA are those of model.mla.",
        example="model=deepseek_tiny model.kv_channels=16",
    ),
    Code(
        "MT210",
        "The projections of MLA have no biases.",
        example="model=deepseek_tiny model.add_qkv_bias=true",
    ),
    Code(
        "MT218",
        "MLA rotates the halves of a head, never neighbours.",
        example="model=deepseek_tiny model.rotary_interleaved=true",
    ),
    reads=(
        "model.mla model.add_qkv_bias model.kv_channels model.num_attention_heads"
        " model.num_query_groups model.position_embedding_type model.rotary_interleaved"
    ),
)
def latent_attention(run: RunConfig) -> Iterator[Finding]:
    """MLA has its own widths and its own positions."""
    m = run.model
    if m.mla is None:
        return
    if m.position_embedding_type != "rope":
        rule = f"MLA carries its positions in rope, not in {m.position_embedding_type}"
        yield Finding(
            "MT207",
            "model.position_embedding_type",
            rule,
            ({"model.position_embedding_type": "rope"},),
        )
    if m.num_query_groups not in (None, m.num_attention_heads):
        rule = "has no effect: MLA has no key/value heads to group"
        yield Finding("MT208", "model.num_query_groups", rule, ({"model.num_query_groups": None},))
    if m.kv_channels is not None:
        rule = "has no effect: the widths of MLA are those of model.mla"
        yield Finding("MT209", "model.kv_channels", rule, ({"model.kv_channels": None},))
    if m.add_qkv_bias:
        rule = "has no effect: the projections of MLA have no biases"
        yield Finding("MT210", "model.add_qkv_bias", rule, ({"model.add_qkv_bias": False},))
    if m.rotary_interleaved:
        rule = "MLA rotates the halves of a head; megatron-core refuses to pair neighbours there"
        yield Finding(
            "MT218", "model.rotary_interleaved", rule, ({"model.rotary_interleaved": False},)
        )


@rule(
    Code("MT212", example="model.qk_l2_norm=true model.qk_layernorm=true"),
    reads="model.qk_l2_norm model.mla model.qk_layernorm",
)
def query_key_norms(run: RunConfig) -> Iterator[Finding]:
    """Queries and keys share one kind of norm, and MLA has its own."""
    m = run.model
    if not m.qk_l2_norm:
        return
    off: Change = {"model.qk_l2_norm": False}
    if m.mla is not None:
        yield Finding("MT212", "model.qk_l2_norm", "is not defined for MLA", (off,))
    elif m.qk_layernorm:
        rule = (
            "queries and keys have one norm: model.qk_layernorm is true too, and would have no"
            " effect"
        )
        yield Finding("MT212", "model.qk_l2_norm", rule, (off, {"model.qk_layernorm": False}))


NO_PREDICTIONS: Change = {"model.mtp_num_layers": None, "model.mtp_loss_scaling_factor": None}


@rule(Code("MT213", example="model.no_rope_freq=3"), reads="model.no_rope_freq model.num_layers")
def unrotated_layer_period(run: RunConfig) -> Iterator[Finding]:
    """Layers without rotary positions come in whole periods."""
    m = run.model
    if m.no_rope_freq is not None and m.num_layers % m.no_rope_freq:
        legal = [n for n in divisors(m.num_layers) if n > 1]
        rule = f"{m.num_layers} layers are no multiple of {m.no_rope_freq}; legal: {listed(legal)}"
        fixes: tuple[Change, ...] = tuple(
            {"model.no_rope_freq": n} for n in nearest(m.no_rope_freq, legal)
        )
        yield Finding("MT213", "model.no_rope_freq", rule, (*fixes, {"model.no_rope_freq": None}))


@rule(
    Code("MT241", example="model.no_rope_freq=2 model.mtp_num_layers=1"),
    reads="model.no_rope_freq model.mtp_num_layers model.num_layers",
)
def prediction_rotation(run: RunConfig) -> Iterator[Finding]:
    """megatron-core's list of layers without rotation ends with the model's own layers."""
    m = run.model
    if m.no_rope_freq is None or not m.mtp_num_layers:
        return
    rule = (
        f"says which of {m.num_layers} layers rotate, and not of the {m.mtp_num_layers} that"
        " predict further"
    )
    yield Finding(
        "MT241", "model.no_rope_freq", rule, ({"model.no_rope_freq": None}, NO_PREDICTIONS)
    )


@rule(
    Code(
        "MT268",
        example=(
            "model.num_layers=5 model.window_size=64 model.window_attn_skip_freq=2"
            " model.mtp_num_layers=1"
        ),
    ),
    reads="model.window_attn_skip_freq model.mtp_num_layers model.num_layers",
)
def prediction_window(run: RunConfig) -> Iterator[Finding]:
    """MTP layers have one window under both numberings: megatron-core counts them after the others,
    since 0.19 from 1.
    """
    m = run.model
    every = m.window_attn_skip_freq
    if every is None:
        return
    for number in range(1, (m.mtp_num_layers or 0) + 1):
        if (number % every == 0) != ((m.num_layers + number) % every == 0):
            rule = (
                f"layer {number} that predicts further is layer {m.num_layers + number} up to"
                f" megatron-core 0.16.1 and layer {number} since 0.19: one of them has a window,"
                " the other none"
            )
            yield Finding(
                "MT268",
                "model.window_attn_skip_freq",
                rule,
                ({"model.window_attn_skip_freq": None}, NO_PREDICTIONS),
            )
            return


@rule(
    Code("MT211", severity="warning", example="model.init_method_std=20"),
    reads="model.init_method_std",
)
def initial_weight_size(run: RunConfig) -> Iterator[Finding]:
    """Large initial weights start with a loss far above that of a uniform guess."""
    std = run.model.init_method_std
    if std > 0.2:
        rule = f"initial weights with a deviation of {std:g} are unusual: 0.002 to 0.05 is common"
        yield Finding("MT211", "model.init_method_std", rule, ({"model.init_method_std": 0.02},))


@rule(
    Code("MT217", example="precision=fp16 model.init_method_std=5"),
    reads=(
        "precision.dtype model.activation model.ffn_hidden_size model.hidden_size"
        " model.init_method_std model.num_layers"
    ),
)
def initial_activation_range(run: RunConfig) -> Iterator[Finding]:
    """fp16 ends at 65504, and initial weights must not exceed it in an MLP."""
    m = run.model
    if run.precision.dtype != "fp16":
        return
    up = m.init_method_std * math.sqrt(m.hidden_size)
    down = m.init_method_std * math.sqrt(m.ffn_hidden_size / (2 * m.num_layers))
    largest = up ** (2 if m.gated or m.activation == "squared_relu" else 1) * down
    if largest > FP16_MAX / 8:
        rule = (
            f"fp16 holds numbers up to {FP16_MAX}, and initial weights with a deviation of"
            f" {m.init_method_std:g} make about {largest:.2g} of a 1 in an MLP"
        )
        bf16: Change = {"precision.dtype": "bf16"}
        yield Finding(
            "MT217", "model.init_method_std", rule, ({"model.init_method_std": 0.02}, bf16)
        )


@rule(
    Code("MT219", severity="warning", example="model.layernorm_epsilon=0"),
    reads="model.layernorm_epsilon",
)
def norm_epsilon(run: RunConfig) -> Iterator[Finding]:
    """Epsilon prevents a division by zero in a norm, and is small against a variance of one."""
    eps = run.model.layernorm_epsilon
    if not 1e-12 <= eps <= 1e-2:
        if eps < 1e-12:
            danger = "divides 0 by 0 where all channels are equal"
        else:
            danger = "shrinks what it should scale"
        rule = f"a norm with epsilon {eps:g} {danger}: 1e-6 to 1e-5 is common, and 1e-12 in BERT"
        yield Finding(
            "MT219", "model.layernorm_epsilon", rule, ({"model.layernorm_epsilon": 1e-5},)
        )


@rule(
    Code(
        "MT267",
        example="model=deepseek_tiny model.mla.layernorm_epsilon=1e-5 kernels.norm=te",
    ),
    reads="model.mla.layernorm_epsilon model.layernorm_epsilon model.qk_layernorm kernels.norm",
)
def latent_norm_epsilon(run: RunConfig) -> Iterator[Finding]:
    """Only a model with MLA's low-rank norms sets an epsilon for them."""
    m = run.model
    if m.mla is None or m.mla.layernorm_epsilon in (None, m.layernorm_epsilon):
        return
    key = "model.mla.layernorm_epsilon"
    same = {"model.mla.layernorm_epsilon": None}
    if not m.qk_layernorm:
        rule = (
            "has no effect: model.qk_layernorm is false, so that there are no norms behind the"
            " low-rank projections"
        )
        yield Finding("MT267", key, rule, ({"model.qk_layernorm": True}, same))
    elif run.kernels.norm == "te" and (why := te_norm_obstacle(run)):
        fixes: tuple[Change, ...] = (
            {"kernels.norm": "triton"},
            {"kernels.norm": "reference"},
            same,
        )
        yield Finding("MT267", key, f"kernels.norm is te, and {why}", fixes)


RULES = (
    latent_norm_epsilon,
    initial_activation_range,
    norm_epsilon,
    head_width,
    query_group_divisibility,
    rotary_width,
    position_range,
    latent_attention,
    query_key_norms,
    unrotated_layer_period,
    prediction_rotation,
    prediction_window,
    initial_weight_size,
)
