"""Attention rules: linear attention, sparse attention, and scaled rotary positions."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.families import Limit
from mtrain.config.rules.families import beyond
from mtrain.config.rules.finding import Change, Finding, divisors, each, listed, multiples, nearest
from mtrain.config.rules.peft import OFF as NO_ADAPTERS
from mtrain.config.rules.pipeline import NO_PREDICTIONS
from mtrain.config.rules.precision import FORMATS, without_low_precision
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.sharding import (
    DYNAMIC,
    GRANULARITY,
    MODULES,
    NO_CONTEXT,
    NO_DYNAMIC,
    NO_FSDP,
    ZERO,
)
from mtrain.config.schema.run import RunConfig
from mtrain.units import number_of

LINEAR = "model.linear_attention"
NO_LINEAR: Change = {LINEAR: None}
VALUE_HEADS = f"{LINEAR}.num_value_heads"
KEY_HEADS = f"{LINEAR}.num_key_heads"
QWEN = "model=qwen3_next_tiny"
# Low-precision GEMMs take this many rows of a weight at a time.
LOW_PRECISION_ROWS = 16


@rule(
    Code("MT290", example=f"{QWEN} {VALUE_HEADS}=6"),
    reads=f"{VALUE_HEADS} {KEY_HEADS}",
)
def value_head_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot share heads of queries and keys because the number of value heads is not a multiple of
    theirs.
    """
    own = run.model.linear_attention
    if own is not None and own.num_value_heads % own.num_key_heads:
        fixes = each(VALUE_HEADS, multiples(own.num_value_heads, own.num_key_heads))
        detail = f"{own.num_value_heads} heads of values, {own.num_key_heads} of queries and keys"
        yield Finding("MT290", VALUE_HEADS, detail, fixes)


@rule(
    Code("MT291", example=f"{QWEN} {KEY_HEADS}=1 parallel=tp2"),
    reads=f"{VALUE_HEADS} {KEY_HEADS} parallel.tp",
)
def state_head_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split heads of linear attention over tensor-parallel ranks because tp does not divide
    them.
    """
    own = run.model.linear_attention
    tp = run.parallel.tp
    if own is None or own.num_key_heads % tp == 0:
        return
    legal = divisors(own.num_key_heads)
    heads = multiples(own.num_key_heads, tp)[0]
    # Value heads must stay a multiple of the others (MT290).
    fixes: list[Change] = [
        *each("parallel.tp", nearest(tp, legal)),
        {KEY_HEADS: heads, VALUE_HEADS: 2 * heads},
        {"parallel.tp": 1, "parallel.sequence_parallel": False, "parallel.ranks": None},
    ]
    detail = f"{own.num_key_heads} heads of queries and keys, tp {tp}; tp that divide:"
    yield Finding("MT291", "parallel.tp", f"{detail} {listed(legal)}", fixes)


@rule(
    Code("MT292", example=f"{QWEN} parallel=cp2"),
    reads=f"{LINEAR} parallel.cp {DYNAMIC}",
)
def state_sequence(run: RunConfig) -> Iterator[Finding]:
    """Cannot shard sequences of linear attention because its state passes from token to token, and
    ranks hold parts that are not adjacent.
    """
    p = run.parallel
    if run.model.linear_attention is None:
        return
    if p.cp > 1:
        fixes = [NO_CONTEXT, {**NO_CONTEXT, "parallel.ranks": None}, NO_LINEAR]
        yield Finding("MT292", "parallel.cp", f"cp {p.cp}", fixes)
    elif p.hybrid_context_parallel:
        yield Finding("MT292", DYNAMIC, "documents are sharded", [NO_DYNAMIC, NO_LINEAR])


@rule(
    Code(
        "MT293",
        example=(
            "model=deepseek_tiny model.mtp_num_layers=null model.mtp_loss_scaling_factor=null "
            f"{LINEAR}={{}}"
        ),
    ),
    Code(
        "MT294",
        "Cannot train MTP layers with linear attention because megatron-core's pattern of layers"
        " ends with the model's own.",
        example=f"{QWEN} model.mtp_num_layers=1",
    ),
    reads=f"{LINEAR} model.mla model.normalization model.mtp_num_layers",
)
def linear_attention_support(run: RunConfig) -> Iterator[Finding]:
    """Cannot use linear attention because it needs RMSNorm, and key/value heads in other layers."""
    m = run.model
    if m.linear_attention is None:
        return
    # The softmax layers between those of linear attention have key/value heads.
    if m.mla is not None:
        yield Finding("MT293", LINEAR, "model.mla has none", [NO_LINEAR])
    if m.normalization != "RMSNorm":
        fixes = [{"model.normalization": "RMSNorm"}, NO_LINEAR]
        yield Finding("MT293", LINEAR, f"model.normalization is {m.normalization}", fixes)
    # MTP layers always have softmax attention, whatever the pattern of the others is.
    if m.mtp_num_layers:
        fixes = [NO_PREDICTIONS, NO_LINEAR]
        detail = number_of(m.mtp_num_layers, "MTP layer")
        yield Finding("MT294", "model.mtp_num_layers", detail, fixes)


@rule(
    Code("MT297", example=f"{QWEN} parallel=dp2 parallel.fsdp=fsdp2"),
    reads=f"{LINEAR} parallel.fsdp",
)
def state_sharding(run: RunConfig) -> Iterator[Finding]:
    """Cannot shard the weights of linear attention because FSDP is not proven with them;
    parallel.distributed_optimizer shards the state of the optimizer.
    """
    if run.model.linear_attention is not None and run.parallel.fsdp != "none":
        fixes = [NO_FSDP, {**NO_FSDP, **ZERO}, NO_LINEAR]
        yield Finding("MT297", "parallel.fsdp", f"parallel.fsdp is {run.parallel.fsdp}", fixes)


@rule(
    Code("MT295", example=f"{QWEN} peft=lora"),
    reads=f"{LINEAR} model.attention_output_gate peft.kind",
)
def projection_adapters(run: RunConfig) -> Iterator[Finding]:
    """Cannot adapt this attention because adapters expect only queries, keys and values in one
    projection.
    """
    m = run.model
    if run.peft.kind is None or (m.linear_attention is None and not m.attention_output_gate):
        return
    # A gate, or decay and beta, make the fused projection wider than q, k and v.
    key = "model.attention_output_gate" if m.attention_output_gate else LINEAR
    yield Finding("MT295", "peft.kind", f"{key} adds more", NO_ADAPTERS)


@rule(
    Code("MT296", example=f"{QWEN} {VALUE_HEADS}=4 cluster=h100 precision=fp8_tensorwise"),
    reads=(
        f"{VALUE_HEADS} {KEY_HEADS} {LINEAR}.key_head_dim"
        f" {LINEAR}.value_head_dim precision.fp8 precision.fp4 precision.fp8_recipe"
        " precision.fp4_recipe parallel.tp"
    ),
)
def projection_blocks(run: RunConfig) -> Iterator[Finding]:
    """Cannot multiply the input projection of linear attention in low precision because its rows do
    not form whole blocks.
    """
    own = run.model.linear_attention
    tp = run.parallel.tp
    if own is None or run.precision.quantized is None:
        return
    rows = sum(own.sections)
    # Beta and decay add one row for each head, which need not fill a block.
    if rows % (LOW_PRECISION_ROWS * tp):
        plain: Change = {"precision.fp8": None, "precision.fp4": None}
        detail = f"{rows} rows over tp {tp}, with beta and decay of {own.num_value_heads} heads"
        detail += f"; blocks of {LOW_PRECISION_ROWS}"
        yield Finding("MT296", VALUE_HEADS, detail, [{VALUE_HEADS: 8 * tp}, plain])


DSA = "model.dsa"
NO_DSA: Change = {DSA: None}
CORE = "core_attn"
TINY = "model=deepseek_v3_2_tiny"
_CHOSEN = "not proven"
_ALL_PAIRS = "an indexer chooses keys by a mask of each pair in a sequence"
_ON_ONE_RANK = f"{_ALL_PAIRS} that one rank has whole"
SPARSE_ATTENTION: tuple[Limit, ...] = (
    Limit("model.add_bias_linear", (False,), "megatron-core has it without biases since 0.19"),
    Limit("model.softmax_type", ("vanilla",), _CHOSEN),
    Limit("model.attn_logit_softcapping", (None,), _CHOSEN),
    Limit("model.attention_dropout", (0.0,), _CHOSEN),
    Limit(
        "model.window_size",
        (None,),
        "an indexer chooses keys, not their distance",
        (("model.window_attn_skip_freq", None),),
    ),
    Limit("parallel.cp", (1,), _ON_ONE_RANK, (("parallel.ranks", None),)),
    Limit("parallel.hybrid_context_parallel", (False,), _ON_ONE_RANK),
    Limit(
        "parallel.fsdp",
        ("none",),
        "not proven with FSDP's weights; parallel.distributed_optimizer=true shards the state",
        (("parallel.fsdp_sharding", None), ("parallel.hsdp_replicas", 1)),
    ),
    Limit("data.packed", (False,), f"{_ALL_PAIRS}, and knows no documents in it"),
    Limit("trainer.cuda_graph_impl", ("none",), "not proven in CUDA graphs"),
    Limit("parallel.activation_offload.modules", (None,), "not proven in host memory"),
    Limit(
        "peft.kind",
        (None,),
        "an indexer would stay as it is, and the attention that taught it would change",
        tuple((f"peft.{key}", None) for key in ("r", "alpha", "target")),
    ),
)
"""Limits that `model.dsa` puts on other keys."""


@rule(
    Code("MT450", example=f"{DSA}={{}}"),
    Code(
        "MT451",
        "Cannot rotate the heads of the indexer because they are narrower than MLA's positions.",
        example=f"{TINY} {DSA}.indexer_head_dim=8",
    ),
    reads=f"{DSA}.indexer_head_dim model.mla.q_lora_rank model.mla.qk_pos_emb_head_dim",
)
def indexer_inputs(run: RunConfig) -> Iterator[Finding]:
    """Cannot choose keys by an indexer because it reads the latent queries of MLA."""
    dsa = run.model.dsa
    mla = run.model.mla
    if dsa is None:
        return
    if mla is None or mla.q_lora_rank is None:
        fixes = [NO_DSA, {"model.mla.q_lora_rank": 1536}]
        yield Finding("MT450", DSA, "it needs model.mla and model.mla.q_lora_rank", fixes)
    elif dsa.indexer_head_dim < mla.qk_pos_emb_head_dim:
        key = f"{DSA}.indexer_head_dim"
        width = mla.qk_pos_emb_head_dim
        detail = f"model.mla.qk_pos_emb_head_dim is {width}"
        yield Finding("MT451", key, detail, [{key: width}, NO_DSA])


@rule(
    Code(
        "MT452",
        help="Set it to a proven value, or remove model.dsa.",
        example=f"{TINY} data.packed=true",
    ),
    reads=" ".join((DSA, *(limit.key for limit in SPARSE_ATTENTION))),
)
def sparse_attention_support(run: RunConfig) -> Iterator[Finding]:
    """Cannot combine this with sparse attention because only some combinations are proven."""
    if run.model.dsa is not None:
        for limit, fixes in beyond(run, SPARSE_ATTENTION):
            detail = f"{DSA}: {limit.why}"
            yield Finding("MT452", limit.key, detail, [*fixes, NO_DSA], also=(DSA,))


@rule(
    Code("MT453", example=f"{TINY} {GRANULARITY}=selective"),
    reads=f"{DSA} {GRANULARITY} {MODULES}",
)
def sparse_recomputation(run: RunConfig) -> Iterator[Finding]:
    """Cannot recompute only the attention because it gets queries, keys and values, and an indexer
    reads what they are made of.
    """
    again = run.parallel.recompute
    modules = again.modules if again.modules is not None else (CORE,)
    if run.model.dsa is None or again.granularity != "selective" or CORE not in modules:
        return
    others = [name for name in modules if name != CORE]
    fixes: list[Change] = each(MODULES, [others] if others else [])
    # Only the whole layer can be recomputed, since the indexer reads its input.
    fixes += [{MODULES: ["layernorm"]}, {GRANULARITY: "none", MODULES: None}, NO_DSA]
    yield Finding("MT453", MODULES, f"{CORE}, {DSA}", fixes)


@rule(
    Code("MT454", example=f"{TINY} precision.dtype=bf16 precision.fp8=hybrid cluster=h100"),
    reads=f"{DSA} {FORMATS}",
)
def indexer_precision(run: RunConfig) -> Iterator[Finding]:
    """Cannot use low-precision GEMMs with an indexer because their rounding would choose among near
    keys.
    """
    if run.model.dsa is not None and run.precision.quantized is not None:
        key = "precision.fp8" if run.precision.fp8 is not None else "precision.fp4"
        yield Finding("MT454", key, f"{DSA} is set", [without_low_precision(run), NO_DSA])


SCALING = "model.rope_scaling"
KIND = f"{SCALING}.rope_type"
NO_SCALING: Change = {SCALING: None}
FACTOR = "model.rope_scaling_factor"
_ROTARY = (
    "model.rotary_percent",
    "model.kv_channels",
    "model.hidden_size",
    "model.num_attention_heads",
)
"""Keys that decide how many channels of a head rotate."""


@rule(
    Code("MT205", example=f"{FACTOR}=8 model.position_embedding_type=none"),
    Code(
        "MT206",
        "Cannot scale these frequencies because MLA makes its own rotary positions, scaled by"
        " model.mla.rope_type=yarn.",
        example=f"model=deepseek_tiny {FACTOR}=8",
    ),
    reads=f"{FACTOR} {SCALING} model.position_embedding_type model.mla",
)
def rotary_keys(run: RunConfig) -> Iterator[Finding]:
    """Cannot scale frequencies because the model has no rotary positions."""
    m = run.model
    kind = m.position_embedding_type
    # Two keys scale rotary positions: a plain factor, and a section with a kind.
    for key, path, value in (
        (FACTOR, FACTOR, m.rope_scaling_factor),
        (SCALING, KIND, m.rope_scaling),
    ):
        if value is not None and kind != "rope":
            fixes: list[Change] = [{key: None}, {"model.position_embedding_type": "rope"}]
            yield Finding("MT205", path, f"position_embedding_type is {kind}", fixes)
        elif value is not None and m.mla is not None:
            yield Finding("MT206", path, fixes=[{key: None}])


@rule(
    Code("MT260", example=f"{SCALING}={{rope_type:yarn,factor:4.0}} {FACTOR}=8"),
    reads=f"{SCALING} {FACTOR} model.rotary_seq_len_interpolation_factor",
)
def position_scaling(run: RunConfig) -> Iterator[Finding]:
    """Cannot scale rotary positions because another key scales them too."""
    m = run.model
    if m.rope_scaling is None:
        return
    for key in ("rope_scaling_factor", "rotary_seq_len_interpolation_factor"):
        if (value := getattr(m, key)) is not None:
            fixes = [{f"model.{key}": None}, NO_SCALING]
            yield Finding("MT260", KIND, f"model.{key} {value:g}", fixes)


@rule(
    Code("MT261", example=f"{SCALING}={{rope_type:llama3,factor:8.0,low_freq_factor:4.0}}"),
    reads=f"{KIND} {SCALING}.low_freq_factor {SCALING}.high_freq_factor",
)
def frequency_order(run: RunConfig) -> Iterator[Finding]:
    """Cannot interpolate between slow and fast frequencies because high_freq_factor is not above
    low_freq_factor.
    """
    scaling = run.model.rope_scaling
    if scaling is None or scaling.rope_type != "llama3":
        return
    # llama3's own defaults.
    low = scaling.low_freq_factor or 1.0
    high = scaling.high_freq_factor or 4.0
    key = f"{SCALING}.high_freq_factor"
    if low >= high:
        fixes: list[Change] = [{key: 4 * low}, {f"{SCALING}.low_freq_factor": None, key: None}]
        yield Finding("MT261", f"{SCALING}.low_freq_factor", f"{low:g} and {high:g}", fixes)


@rule(
    Code(
        "MT262",
        example=f"{SCALING}={{rope_type:longrope,factor:4.0,short_factor:[1.0,1.0]}}",
    ),
    reads=f"{KIND} {SCALING}.short_factor {SCALING}.long_factor {' '.join(_ROTARY)} model.mla",
)
def longrope_factors(run: RunConfig) -> Iterator[Finding]:
    """Cannot scale each frequency because longrope needs a factor for each rotated pair of
    channels.
    """
    m = run.model
    if m.rope_scaling is None or m.rope_scaling.rope_type != "longrope" or m.mla is not None:
        return
    # There is a factor for each frequency, and each frequency rotates a pair of channels.
    pairs = m.rotary_dim // 2
    for key in ("short_factor", "long_factor"):
        found = len(getattr(m.rope_scaling, key) or ())
        if found != pairs:
            detail = f"{found} factors, {pairs} pairs"
            yield Finding("MT262", f"{SCALING}.{key}", detail, [NO_SCALING], also=_ROTARY)


@rule(
    Code("MT263", example=f"{SCALING}={{rope_type:dynamic,factor:4.0}} model.kv_channels=2"),
    reads=f"{KIND} {' '.join(_ROTARY)} model.mla",
)
def dynamic_base(run: RunConfig) -> Iterator[Finding]:
    """Cannot change the base dynamically because the fastest frequency stays and there are no
    others.
    """
    m = run.model
    if m.rope_scaling is None or m.rope_scaling.rope_type != "dynamic" or m.mla is not None:
        return
    if m.rotary_dim < 4:
        detail = f"{m.rotary_dim} channels of a head rotate; 4 or more are needed"
        yield Finding("MT263", KIND, detail, [NO_SCALING], also=_ROTARY)


@rule(
    Code("MT264", example=f"{SCALING}={{rope_type:yarn,factor:4.0,mscale:1.0}}"),
    reads=f"{SCALING}.mscale {SCALING}.mscale_all_dim {SCALING}.attention_factor",
)
def attention_temperature(run: RunConfig) -> Iterator[Finding]:
    """Cannot set the temperature like this because it takes both mscale and mscale_all_dim, or
    attention_factor.
    """
    scaling = run.model.rope_scaling
    if scaling is None or (scaling.mscale is None and scaling.mscale_all_dim is None):
        return
    neither: Change = {f"{SCALING}.mscale": None, f"{SCALING}.mscale_all_dim": None}
    if scaling.attention_factor is not None:
        key = "mscale" if scaling.mscale is not None else "mscale_all_dim"
        fixes = [neither, {f"{SCALING}.attention_factor": None}]
        detail = f"attention_factor {scaling.attention_factor:g}"
        yield Finding("MT264", f"{SCALING}.{key}", detail, fixes)
        return
    # yarn takes the ratio of the two, so one by itself would be ignored.
    for key, other in (("mscale", "mscale_all_dim"), ("mscale_all_dim", "mscale")):
        if getattr(scaling, other) is None:
            yield Finding("MT264", f"{SCALING}.{key}", f"{other} is null", [neither])


@rule(
    Code(
        "MT265",
        example=f"{SCALING}={{rope_type:dynamic,factor:4.0}} data.seq_length=2048 data.packed=true",
    ),
    reads=(
        f"{KIND} data.packed data.seq_length model.max_position_embeddings"
        f" {SCALING}.original_max_position_embeddings"
    ),
)
def length_dependent_frequencies(run: RunConfig) -> Iterator[Finding]:
    """Cannot pack documents because the frequencies depend on the length of each document."""
    m = run.model
    seq = run.data.length
    scaling = m.rope_scaling
    if scaling is None or not run.data.packed or scaling.rope_type not in ("dynamic", "longrope"):
        return
    key = "model.max_position_embeddings"
    before = m.max_position_embeddings
    # longrope switches from its short to its long factors at the original length.
    if scaling.rope_type == "longrope" and scaling.original_max_position_embeddings:
        key = f"{SCALING}.original_max_position_embeddings"
        before = scaling.original_max_position_embeddings
    if seq > before:
        fixes: list[Change] = [{"data.packed": False}, {"data.seq_length": before}, NO_SCALING]
        detail = f"{scaling.rope_type} changes beyond {before} tokens ({key}), documents have up to"
        yield Finding("MT265", "data.packed", f"{detail} {seq}", fixes)


@rule(
    Code("MT266", example=f"model=gemma_tiny {SCALING}={{rope_type:yarn,factor:4.0}}"),
    reads=f"{SCALING} model.rotary_base_local",
)
def window_scaling(run: RunConfig) -> Iterator[Finding]:
    """Cannot leave the base of windowed layers unchanged because only linear scaling does."""
    m = run.model
    if m.rope_scaling is not None and m.rotary_base_local is not None:
        # Models with two bases (Gemma 3) scale the global one linearly, and leave the other.
        fixes = [NO_SCALING, {"model.rotary_base_local": None}]
        detail = f"model.rotary_base_local {m.rotary_base_local:g}"
        yield Finding("MT266", KIND, detail, fixes)
