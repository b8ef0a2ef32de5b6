"""Linear-attention rules: heads that fit each other and the layout, and features that exclude a
state.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.finding import Change, Finding, divisors, listed, multiples, nearest
from mtrain.config.rules.peft import OFF as NO_ADAPTERS
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.sharding import NO_CONTEXT
from mtrain.config.schema.run import RunConfig

SECTION = "model.linear_attention"
NONE: Change = {SECTION: None}
LOW_PRECISION_ROWS = 16
"""Rows of a weight that products in eight bits or fewer take at a time."""


@rule(
    Code(
        "MT290",
        "As many heads of values share each head of queries and keys.",
        example="model=qwen3_next_tiny model.linear_attention.num_value_heads=6",
    ),
    reads=f"{SECTION}.num_value_heads {SECTION}.num_key_heads",
)
def value_head_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Every head of queries and keys serves the same number of value heads."""
    own = run.model.linear_attention
    if own is None or own.num_value_heads % own.num_key_heads == 0:
        return
    rule = (
        f"{own.num_value_heads} heads of values are no multiple of {own.num_key_heads} heads of"
        " queries and keys"
    )
    near: tuple[Change, ...] = tuple(
        {f"{SECTION}.num_value_heads": n} for n in multiples(own.num_value_heads, own.num_key_heads)
    )
    yield Finding("MT290", f"{SECTION}.num_value_heads", rule, near)


@rule(
    Code(
        "MT291",
        "Every tensor-parallel rank has as many heads of linear attention.",
        example="model=qwen3_next_tiny model.linear_attention.num_key_heads=1 parallel=tp2",
    ),
    reads=f"{SECTION}.num_value_heads {SECTION}.num_key_heads parallel.tp",
)
def state_head_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Every tensor-parallel rank holds the same number of linear-attention heads."""
    own = run.model.linear_attention
    tp = run.parallel.tp
    if own is None or own.num_key_heads % tp == 0:
        return
    legal = divisors(own.num_key_heads)
    rule = (
        f"{own.num_key_heads} heads of queries and keys of linear attention do not divide by tp"
        f" {tp}; tp that divide: {listed(legal)}"
    )
    fewer: tuple[Change, ...] = tuple({"parallel.tp": n} for n in nearest(tp, legal))
    alone: Change = {"parallel.tp": 1, "parallel.sequence_parallel": False, "parallel.ranks": None}
    heads = next(iter(multiples(own.num_key_heads, tp)))
    more: Change = {f"{SECTION}.num_key_heads": heads, f"{SECTION}.num_value_heads": 2 * heads}
    yield Finding("MT291", "parallel.tp", rule, (*fewer, more, alone))


@rule(
    Code(
        "MT292",
        "A state is handed on from token to token, and ranks have parts of a sequence that are"
        " apart.",
        example="model=qwen3_next_tiny parallel=cp2",
    ),
    reads=f"{SECTION} parallel.cp parallel.hybrid_context_parallel",
)
def state_sequence(run: RunConfig) -> Iterator[Finding]:
    """A state passes from token to token, and context-parallel ranks hold parts that are not
    adjacent.
    """
    p = run.parallel
    if run.model.linear_attention is None:
        return
    why = "a state of linear attention is handed on from token to token"
    if p.cp > 1:
        rule = (
            f"{why}; cp {p.cp} shards the sequence, in all releases of megatron-core as they are"
            " adapted here"
        )
        yield Finding(
            "MT292", "parallel.cp", rule, (NO_CONTEXT, {**NO_CONTEXT, "parallel.ranks": None}, NONE)
        )
    elif p.hybrid_context_parallel:
        off: Change = {
            "parallel.hybrid_context_parallel": False,
            "parallel.max_seqlen_per_dp_cp_rank": None,
        }
        yield Finding(
            "MT292",
            "parallel.hybrid_context_parallel",
            f"{why}, and documents are sharded",
            (off, NONE),
        )


@rule(
    Code(
        "MT293",
        "Linear attention needs softmax attention with heads of its own in other layers, and"
        " RMSNorm.",
        example=(
            "model=deepseek_tiny model.mtp_num_layers=null model.mtp_loss_scaling_factor=null "
            "model.linear_attention={}"
        ),
    ),
    Code(
        "MT294",
        "Layers that predict further have softmax attention, whatever the pattern says of them.",
        example="model=qwen3_next_tiny model.mtp_num_layers=1",
    ),
    reads=f"{SECTION} model.mla model.normalization model.mtp_num_layers",
)
def linear_attention_support(run: RunConfig) -> Iterator[Finding]:
    """Linear attention combines with softmax attention, in a model with RMSNorm and without MTP
    layers.
    """
    m = run.model
    if m.linear_attention is None:
        return
    if m.mla is not None:
        rule = "needs attention with key/value heads in the other layers, and model.mla has none"
        yield Finding("MT293", SECTION, rule, (NONE,))
    if m.normalization != "RMSNorm":
        rule = f"norms its outputs with RMSNorm, and model.normalization is {m.normalization}"
        yield Finding("MT293", SECTION, rule, ({"model.normalization": "RMSNorm"}, NONE))
    if m.mtp_num_layers:
        none: Change = {"model.mtp_num_layers": None, "model.mtp_loss_scaling_factor": None}
        rule = (
            "is not trained with linear attention: megatron-core's pattern of layers ends with"
            " the model's own"
        )
        yield Finding("MT294", "model.mtp_num_layers", rule, (none, NONE))


@rule(
    Code(
        "MT297",
        "Weights of linear attention are not sharded over data-parallel ranks.",
        example="model=qwen3_next_tiny parallel=dp2 parallel.fsdp=fsdp2",
    ),
    reads=f"{SECTION} parallel.fsdp",
)
def state_sharding(run: RunConfig) -> Iterator[Finding]:
    """FSDP does not shard the weights of linear attention; the optimizer state may be sharded."""
    if run.model.linear_attention is None or run.parallel.fsdp == "none":
        return
    rule = (
        f"{run.parallel.fsdp} has not been proven with weights of linear attention;"
        " parallel.distributed_optimizer shards the state of the optimizer"
    )
    off: Change = {
        "parallel.fsdp": "none",
        "parallel.fsdp_sharding": None,
        "parallel.hsdp_replicas": 1,
    }
    yield Finding(
        "MT297", "parallel.fsdp", rule, (off, {**off, "parallel.distributed_optimizer": True}, NONE)
    )


@rule(
    Code(
        "MT295",
        "Adapters know neither gates of attention nor the projections of linear attention.",
        example="model=qwen3_next_tiny peft=lora",
    ),
    reads=f"{SECTION} model.attention_output_gate peft.kind",
)
def projection_adapters(run: RunConfig) -> Iterator[Finding]:
    """Adapters support neither attention gates nor the projections of linear attention."""
    m = run.model
    if run.peft.kind is None or (m.linear_attention is None and not m.attention_output_gate):
        return
    key = "model.attention_output_gate" if m.attention_output_gate else SECTION
    rule = f"knows queries, keys and values in one projection, and with {key} there is more in it"
    yield Finding("MT295", "peft.kind", rule, NO_ADAPTERS)


@rule(
    Code(
        "MT296",
        "Products in low precision take whole blocks of rows.",
        example=(
            "model=qwen3_next_tiny model.linear_attention.num_value_heads=4 cluster=h100 "
            "precision=fp8_tensorwise"
        ),
    ),
    reads=(
        f"{SECTION}.num_value_heads {SECTION}.num_key_heads {SECTION}.key_head_dim"
        f" {SECTION}.value_head_dim precision.fp8 precision.fp4 precision.fp8_recipe"
        " precision.fp4_recipe parallel.tp"
    ),
)
def projection_blocks(run: RunConfig) -> Iterator[Finding]:
    """Low-precision products take whole blocks of rows."""
    own = run.model.linear_attention
    tp = run.parallel.tp
    if (
        own is None
        or run.precision.quantized is None
        or sum(own.sections) % (LOW_PRECISION_ROWS * tp) == 0
    ):
        return
    rule = (
        f"the input projection of linear attention has {sum(own.sections)} rows over tp {tp}, with"
        f" beta and decay of each of {own.num_value_heads} heads, and products in low precision"
        f" take {LOW_PRECISION_ROWS} at a time"
    )
    low = {"precision.fp8": None, "precision.fp4": None}
    yield Finding(
        "MT296", f"{SECTION}.num_value_heads", rule, ({f"{SECTION}.num_value_heads": 8 * tp}, low)
    )


RULES = (
    value_head_divisibility,
    state_head_divisibility,
    state_sequence,
    linear_attention_support,
    state_sharding,
    projection_adapters,
    projection_blocks,
)
