"""Model rules: heads, widths and positions that fit each other, and models that muP scales."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mtrain.config.engine.formats import FORMATS
from mtrain.config.engine.kernels import te_norm_obstacle
from mtrain.config.rules.finding import Change, Finding, divisors, each, listed, multiples, nearest
from mtrain.config.rules.pipeline import NO_PREDICTIONS
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig
from mtrain.units import number_of

FP16_MAX = int(FORMATS["fp16"].largest)
STD = "model.init_method_std"
MLA_EPSILON = "model.mla.layernorm_epsilon"
NO_MUP: Change = {"model.mup": None}
OPTIMIZERS_BY_WIDTH = ("adamw", "lion", "sgd")


@rule(
    Code("MT267", example=f"model=deepseek_tiny {MLA_EPSILON}=1e-5 kernels.norm=te"),
    reads=f"{MLA_EPSILON} model.layernorm_epsilon model.qk_layernorm kernels.norm",
)
def latent_norm_epsilon(run: RunConfig) -> Iterator[Finding]:
    """Cannot give MLA's low-rank norms an epsilon of their own because they do not exist, or their
    kernel has one for all norms.
    """
    m = run.model
    if m.mla is None or m.mla.layernorm_epsilon in (None, m.layernorm_epsilon):
        return
    same: Change = {MLA_EPSILON: None}
    # qk_layernorm builds the norms after MLA's low-rank projections.
    if not m.qk_layernorm:
        fixes = [{"model.qk_layernorm": True}, same]
        yield Finding("MT267", MLA_EPSILON, "model.qk_layernorm is false", fixes)
    elif run.kernels.norm == "te" and (why := te_norm_obstacle(run)):
        fixes = [*each("kernels.norm", ["triton", "reference"]), same]
        yield Finding("MT267", MLA_EPSILON, f"kernels.norm is te, and {why}", fixes)


@rule(
    Code("MT217", example=f"precision=fp16 {STD}=5"),
    reads=(
        "precision.dtype model.activation model.ffn_hidden_size model.hidden_size"
        f" {STD} model.num_layers"
    ),
)
def initial_activation_range(run: RunConfig) -> Iterator[Finding]:
    """Cannot begin in fp16 because the output of an MLP with such initial weights overflows."""
    m = run.model
    if run.precision.dtype != "fp16":
        return
    # A sum over n products of deviation std grows by std * sqrt(n).
    up = m.init_method_std * math.sqrt(m.hidden_size)
    down = m.init_method_std * math.sqrt(m.ffn_hidden_size / (2 * m.num_layers))
    # A gate or a square multiplies two outputs of the first layer.
    largest = up ** (2 if m.gated or m.activation == "squared_relu" else 1) * down
    # Single values exceed the deviation, so leave a factor of eight.
    if largest > FP16_MAX / 8:
        detail = (
            f"a deviation of {m.init_method_std:g} makes about {largest:.2g} of a 1, and fp16 ends"
            f" at {FP16_MAX}"
        )
        yield Finding("MT217", STD, detail, [{STD: 0.02}, {"precision.dtype": "bf16"}])


@rule(
    Code("MT219", severity="warning", example="model.layernorm_epsilon=0"),
    reads="model.layernorm_epsilon",
)
def norm_epsilon(run: RunConfig) -> Iterator[Finding]:
    """Cannot normalise accurately because epsilon must prevent a division by zero and stay small
    against a variance of one.
    """
    eps = run.model.layernorm_epsilon
    if not 1e-12 <= eps <= 1e-2:
        detail = f"epsilon {eps:g}; 1e-6 to 1e-5 is common, and 1e-12 in BERT"
        fixes = each("model.layernorm_epsilon", [1e-5])
        yield Finding("MT219", "model.layernorm_epsilon", detail, fixes)


@rule(
    Code("MT201", example="model.hidden_size=250"),
    reads="model.kv_channels model.mla model.hidden_size model.num_attention_heads",
)
def head_width(run: RunConfig) -> Iterator[Finding]:
    """Cannot split the hidden size into heads because a head would have no whole width."""
    m = run.model
    heads = m.num_attention_heads
    if m.mla is None and m.kv_channels is None and m.hidden_size % heads:
        # Even widths, because rotary positions rotate pairs of channels.
        near = each("model.hidden_size", multiples(m.hidden_size, 2 * heads))
        own = {"model.kv_channels": max(2, m.hidden_size // heads // 2 * 2)}
        detail = f"hidden_size {m.hidden_size} / {heads} heads = {m.hidden_size / heads:.4g}"
        yield Finding("MT201", "model.hidden_size", detail, [*near, own])


@rule(
    Code("MT202", example="model.num_query_groups=3"),
    reads="model.mla model.num_query_groups model.num_attention_heads",
)
def query_group_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot give each key/value head as many query heads because the groups do not divide them."""
    m = run.model
    groups = m.num_query_groups
    heads = m.num_attention_heads
    if m.mla is None and groups is not None and heads % groups:
        legal = divisors(heads)
        detail = f"{groups} groups, {heads} heads; groups that divide: {listed(legal)}"
        fixes = each("model.num_query_groups", nearest(groups, legal))
        yield Finding("MT202", "model.num_query_groups", detail, fixes)


@rule(
    Code("MT203", example="model.kv_channels=15"),
    reads=(
        "model.position_embedding_type model.rotary_percent model.kv_channels model.hidden_size "
        "model.num_attention_heads model.mla.qk_pos_emb_head_dim"
    ),
)
def rotary_width(run: RunConfig) -> Iterator[Finding]:
    """Cannot rotate these channels of a head because rotary positions rotate pairs."""
    m = run.model
    if m.position_embedding_type != "rope":
        return
    # MLA rotates a separate part with its own width.
    whole = m.mla.qk_pos_emb_head_dim if m.mla is not None else m.head_dim
    width = int(whole * m.rotary_percent)
    if width >= 2 and width % 2 == 0:
        return
    key = "model.mla.qk_pos_emb_head_dim" if m.mla is not None else "model.kv_channels"
    percent = "model.rotary_percent"
    even: Change = {key: max(2, whole // 2 * 2)}
    yield Finding(
        "MT203",
        key if m.mla is not None and m.rotary_percent == 1 else percent,
        f"{width} channels; an even number, at least 2",
        [*each(percent, [1.0, 0.5]), even, {**even, percent: 1.0}],
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
    """Cannot place every token of a sample because it is longer than the model's positions."""
    m = run.model
    seq = run.data.length
    positions = m.max_position_embeddings
    # Neither needs a table that ends: `relative` puts all long distances into one group.
    if m.position_embedding_type in ("none", "relative") or seq <= positions:
        return
    # Dynamic scaling stretches the frequencies to any length.
    if m.rope_scaling is None or m.rope_scaling.rope_type != "dynamic":
        detail = f"{seq} tokens, model.max_position_embeddings {positions}"
        fixes = [{"data.seq_length": positions}, {"model.max_position_embeddings": seq}]
        yield Finding("MT204", "data.seq_length", detail, fixes)


@rule(
    Code("MT207", example="model=deepseek_tiny model.position_embedding_type=none"),
    Code(
        "MT208",
        "Cannot group the key/value heads of MLA because it has none.",
        example="model=deepseek_tiny model.num_query_groups=1",
    ),
    Code(
        "MT209",
        "Cannot set the width of MLA's heads here because model.mla has its widths.",
        example="model=deepseek_tiny model.kv_channels=16",
    ),
    Code(
        "MT210",
        "Cannot add biases to MLA because its projections have none.",
        example="model=deepseek_tiny model.add_qkv_bias=true",
    ),
    Code(
        "MT218",
        "Cannot rotate neighbouring channels because MLA rotates the halves of a head.",
        example="model=deepseek_tiny model.rotary_interleaved=true",
    ),
    reads=(
        "model.mla model.add_qkv_bias model.kv_channels model.num_attention_heads"
        " model.num_query_groups model.position_embedding_type model.rotary_interleaved"
    ),
)
def latent_attention(run: RunConfig) -> Iterator[Finding]:
    """Cannot use these positions because MLA carries its own in rope."""
    m = run.model
    # Three of these keys have no effect on MLA, and megatron-core refuses the last one.
    if m.mla is None:
        return
    for code, key, wrong, instead in (
        ("MT207", "position_embedding_type", m.position_embedding_type != "rope", "rope"),
        (
            "MT208",
            "num_query_groups",
            m.num_query_groups not in (None, m.num_attention_heads),
            None,
        ),
        ("MT209", "kv_channels", m.kv_channels is not None, None),
        ("MT210", "add_qkv_bias", m.add_qkv_bias, False),
        ("MT218", "rotary_interleaved", m.rotary_interleaved, False),
    ):
        if wrong:
            yield Finding(code, f"model.{key}", fixes=[{f"model.{key}": instead}])


@rule(
    Code("MT212", example="model.qk_l2_norm=true model.qk_layernorm=true"),
    reads="model.qk_l2_norm model.mla model.qk_layernorm",
)
def query_key_norms(run: RunConfig) -> Iterator[Finding]:
    """Cannot add an L2 norm of queries and keys because they have another norm."""
    m = run.model
    off: Change = {"model.qk_l2_norm": False}
    if m.qk_l2_norm and m.mla is not None:
        yield Finding("MT212", "model.qk_l2_norm", "that of MLA", [off])
    elif m.qk_l2_norm and m.qk_layernorm:
        fixes = [off, {"model.qk_layernorm": False}]
        yield Finding("MT212", "model.qk_l2_norm", "model.qk_layernorm is true", fixes)


@rule(Code("MT213", example="model.no_rope_freq=3"), reads="model.no_rope_freq model.num_layers")
def unrotated_layer_period(run: RunConfig) -> Iterator[Finding]:
    """Cannot repeat layers without rotary positions because the layers are no whole periods."""
    m = run.model
    if m.no_rope_freq is not None and m.num_layers % m.no_rope_freq:
        # A period of one layer would leave no layer with rotation.
        legal = [n for n in divisors(m.num_layers) if n > 1]
        detail = f"{m.num_layers} layers, every {m.no_rope_freq}; that divide: {listed(legal)}"
        fixes = each("model.no_rope_freq", [*nearest(m.no_rope_freq, legal), None])
        yield Finding("MT213", "model.no_rope_freq", detail, fixes)


@rule(
    Code("MT241", example="model.no_rope_freq=2 model.mtp_num_layers=1"),
    reads="model.no_rope_freq model.mtp_num_layers model.num_layers",
)
def prediction_rotation(run: RunConfig) -> Iterator[Finding]:
    """Cannot choose the rotation of MTP layers because megatron-core's list of layers without it
    ends with the model's own.
    """
    m = run.model
    if m.no_rope_freq is not None and m.mtp_num_layers:
        fixes = [{"model.no_rope_freq": None}, NO_PREDICTIONS]
        detail = f"{m.num_layers} layers, {number_of(m.mtp_num_layers, 'MTP layer')}"
        yield Finding("MT241", "model.no_rope_freq", detail, fixes)


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
    """Cannot give an MTP layer one window because megatron-core 0.16.1 counts it after the model's
    layers and 0.19 from 1.
    """
    m = run.model
    key = "model.window_attn_skip_freq"
    every = m.window_attn_skip_freq
    if every is None:
        return
    for number in range(1, (m.mtp_num_layers or 0) + 1):
        # A checkpoint would change its meaning with the release of megatron-core.
        if (number % every == 0) != ((m.num_layers + number) % every == 0):
            detail = f"layer {m.num_layers + number} or {number}: only one of them has a window"
            yield Finding("MT268", key, detail, [{key: None}, NO_PREDICTIONS])
            return


@rule(Code("MT211", severity="warning", example=f"{STD}=20"), reads=STD)
def initial_weight_size(run: RunConfig) -> Iterator[Finding]:
    """Cannot begin near a uniform guess because the initial weights are large."""
    std = run.model.init_method_std
    if std > 0.2:
        detail = f"a deviation of {std:g}; 0.002 to 0.05 is common"
        yield Finding("MT211", STD, detail, [{STD: 0.02}])


@rule(
    Code("MT278", example="model=deepseek_tiny model.mup={}"),
    reads="model.mup model.mla model.linear_attention peft.kind",
)
def mup_layers(run: RunConfig) -> Iterator[Finding]:
    """Cannot scale this model by muP because it is defined for softmax attention with heads of one
    width, and for all weights.
    """
    m = run.model
    if m.mup is None:
        return
    # MLA scales logits by the widths of two parts of a head, gates of linear attention follow no
    # width, and adapters are as wide as their rank.
    for key, held in (
        ("model.mla", m.mla),
        ("model.linear_attention", m.linear_attention),
        ("peft.kind", run.peft.kind),
    ):
        if held is not None:
            yield Finding("MT278", "model.mup", f"{key} is set", [NO_MUP], also=(key,))


@rule(
    Code("MT468", example="model.mup={base_hidden_size:128} optim=muon"),
    reads="optim.name model.mup",
)
def mup_optimizer(run: RunConfig) -> Iterator[Finding]:
    """Cannot scale the rate of this optimizer by muP because its rule is unknown."""
    if run.model.mup is not None and run.optim.name not in OPTIMIZERS_BY_WIDTH:
        detail = f"known for {', '.join(OPTIMIZERS_BY_WIDTH)}"
        fixes = [{"optim.name": "adamw"}, NO_MUP]
        yield Finding("MT468", "optim.name", detail, fixes, also=("model.mup",))
