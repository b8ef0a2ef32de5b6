"""Sparse-attention rules: the inputs of an indexer, and combinations that are not proven."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.families import Limit
from mtrain.config.rules.families import beyond
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.quantized import FORMATS, without_low_precision
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

SECTION = "model.dsa"
NONE: Change = {SECTION: None}
CORE = "core_attn"
TINY = "model=deepseek_v3_2_tiny"
_CHOSEN = "sparse attention is not proven with it"
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
        "an indexer is not proven with FSDP's weights; parallel.distributed_optimizer=true shards"
        " the state",
        (("parallel.fsdp_sharding", None), ("parallel.hsdp_replicas", 1)),
    ),
    Limit("data.packed", (False,), f"{_ALL_PAIRS}, and knows no documents in it"),
    Limit(
        "trainer.cuda_graph_impl", ("none",), "what an indexer chooses is not tried in CUDA graphs"
    ),
    Limit(
        "parallel.activation_offload.modules",
        (None,),
        "what an indexer keeps is not tried in host memory",
    ),
    Limit(
        "peft.kind",
        (None,),
        "an indexer would stay as it is, and the attention that it was taught would not",
        tuple((f"peft.{key}", None) for key in ("r", "alpha", "target")),
    ),
)
"""What `model.dsa` is limited to."""


@rule(
    Code("MT450", "An indexer reads what MLA makes its queries of.", example="model.dsa={}"),
    Code(
        "MT451",
        "An indexer turns as many channels as a head of MLA.",
        example=f"{TINY} model.dsa.indexer_head_dim=8",
    ),
    reads=f"{SECTION}.indexer_head_dim model.mla.q_lora_rank model.mla.qk_pos_emb_head_dim",
)
def indexer_inputs(run: RunConfig) -> Iterator[Finding]:
    """An indexer reads the latent queries of MLA, and its heads have room for their rotary
    positions.
    """
    dsa = run.model.dsa
    mla = run.model.mla
    if dsa is None:
        return
    if mla is None or mla.q_lora_rank is None:
        rule = "an indexer reads latent queries, which need model.mla and model.mla.q_lora_rank"
        yield Finding("MT450", SECTION, rule, (NONE, {"model.mla.q_lora_rank": 1536}))
    elif dsa.indexer_head_dim < mla.qk_pos_emb_head_dim:
        turned = mla.qk_pos_emb_head_dim
        rule = (
            f"{turned} channels of a head are turned (model.mla.qk_pos_emb_head_dim), and it has"
            " fewer"
        )
        yield Finding(
            "MT451",
            f"{SECTION}.indexer_head_dim",
            rule,
            ({f"{SECTION}.indexer_head_dim": turned}, NONE),
        )


@rule(
    Code(
        "MT452",
        "A key says something that sparse attention is not proven with.",
        "Set it to what is proven, or take model.dsa away.",
        example=f"{TINY} data.packed=true",
    ),
    reads=" ".join((SECTION, *(limit.key for limit in SPARSE_ATTENTION))),
)
def sparse_attention_support(run: RunConfig) -> Iterator[Finding]:
    """Sparse attention is limited to the combinations that are proven."""
    if run.model.dsa is not None:
        for limit, fixes in beyond(run, SPARSE_ATTENTION):
            yield Finding(
                "MT452", limit.key, f"{SECTION}: {limit.why}", (*fixes, NONE), also=(SECTION,)
            )


@rule(
    Code(
        "MT453",
        "What an indexer reads is not handed to attention that is computed again by itself.",
        example=f"{TINY} parallel.recompute.granularity=selective",
    ),
    reads=f"{SECTION} parallel.recompute.granularity parallel.recompute.modules",
)
def sparse_recomputation(run: RunConfig) -> Iterator[Finding]:
    """Sparse attention is recomputed with its whole layer, or not at all."""
    again = run.parallel.recompute
    modules = again.modules if again.modules is not None else (CORE,)
    if run.model.dsa is None or again.granularity != "selective" or CORE not in modules:
        return
    rule = (
        f"{CORE} is computed again from queries, keys and values, and an indexer reads what they"
        " are made of"
    )
    path = "parallel.recompute.modules"
    others = [name for name in modules if name != CORE]
    fixes: list[Change] = [{path: others}] if others else []
    fixes += [{path: ["layernorm"]}, {"parallel.recompute.granularity": "none", path: None}, NONE]
    yield Finding("MT453", path, rule, tuple(fixes))


@rule(
    Code(
        "MT454",
        "GEMMs of a model with an indexer are not in 8 or 4 bits.",
        example=f"{TINY} precision.dtype=bf16 precision.fp8=hybrid cluster=h100",
    ),
    reads=f"{SECTION} {FORMATS}",
)
def indexer_precision(run: RunConfig) -> Iterator[Finding]:
    """The inputs of an indexer come from full-precision products: rounding would decide between
    near keys.
    """
    if run.model.dsa is not None and run.precision.quantized is not None:
        key = "precision.fp8" if run.precision.fp8 is not None else "precision.fp4"
        rule = (
            f"{SECTION} is not proven with products in low precision, whose rounding would choose"
            " among near keys"
        )
        yield Finding("MT454", key, rule, (without_low_precision(run), NONE))


RULES = (
    indexer_inputs,
    sparse_attention_support,
    sparse_recomputation,
    indexer_precision,
)
