"""Rules of CUDA graphs and of activations in host memory: what each of the two can take."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.precision import BF16
from mtrain.config.rules.rule import Code, rule
from mtrain.config.rules.sharding import GRANULARITY, NO_RECOMPUTE
from mtrain.config.schema.moe import room_of
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import DELTA, MAMBA, MLP, SOFTMAX

IMPL = "trainer.cuda_graph_impl"
MODULES = "trainer.cuda_graph_modules"
NONE: Change = {IMPL: "none", MODULES: None, "trainer.cuda_graph_warmup_steps": None}
_H100 = "cluster=h100 cluster.devices_per_node=1 parallel=single"
_EXPERTS = f"model=mixtral_tiny {_H100}"
_PADDED = (
    "model=mixtral_tiny cluster=h100 cluster.devices_per_node=2 parallel=ep2"
    " model.moe.pad_alltoall=true"
)
_LAYERS = f"{IMPL}=local {MODULES}"
_OF_KINDS = {"attn": (*SOFTMAX, DELTA), "mlp": (MLP,), "mamba": (MAMBA,)}
"""Part of a layer -> the letters of a hybrid's pattern whose layers have it."""


def captured(run: RunConfig) -> frozenset[str]:
    """Return the captured parts of a layer in words of `trainer.cuda_graph_modules`; all of them
    for whole layers and steps.
    """
    t = run.trainer
    if t.cuda_graph_impl == "none":
        return frozenset()
    # Without a list, megatron-core captures whole layers.
    everything = ("attn", "mlp", "moe", "mamba")
    return frozenset((t.cuda_graph_impl != "full_iteration" and t.cuda_graph_modules) or everything)


@rule(
    Code("MT373", example=f"{IMPL}=local log.statistics.interval=10 {_H100}"),
    reads=f"{IMPL} log.statistics.interval log.statistics.kinds",
)
def described_activations(run: RunConfig) -> Iterator[Finding]:
    """Cannot describe activations, losses, attention or experts because a replayed graph runs no
    hooks of modules.
    """
    s = run.log.statistics
    hooks = ("activations", "losses", "attention", "experts")
    kinds = [kind for kind in s.described if kind not in hooks]
    hooked = len(kinds) < len(s.described)
    if s.interval is None or not hooked or run.trainer.cuda_graph_impl == "none":
        return
    without: Change = (
        {"log.statistics.kinds": kinds} if kinds else {"log.statistics.interval": None}
    )
    yield Finding("MT373", "log.statistics.kinds", "", [without, NONE])


@rule(
    Code("MT410", example=f"{IMPL}=local"),
    Code(
        "MT411",
        "Cannot let TransformerEngine capture graphs because it captures only its own layers.",
        example=f"{IMPL}=transformer_engine kernels.linear=triton {_H100}",
    ),
    reads=f"{IMPL} cluster.device kernels.linear",
)
def graph_device(run: RunConfig) -> Iterator[Finding]:
    """Cannot capture CUDA graphs because the device has no CUDA."""
    impl = run.trainer.cuda_graph_impl
    device = run.cluster.device
    linear = run.kernels.linear
    if impl == "none":
        return
    if not facts_of(device).cuda_kernels:
        detail = f"they need {with_cuda_kernels()}, and the device is {device}"
        yield Finding("MT410", IMPL, detail, [NONE], lacks="device")
    elif impl == "transformer_engine" and linear not in ("te", "auto", None):
        fixes = [{"kernels.linear": "te"}, {IMPL: "local"}, NONE]
        yield Finding("MT411", IMPL, f"kernels.linear is {linear}", fixes)


@rule(
    Code(
        "MT412",
        help=(
            "Name modules that the layers have; moe stands for all of an MLP with experts,"
            " moe_router and moe_preprocess for its first parts."
        ),
        example=f"{_LAYERS}=[moe_router] {_H100}",
    ),
    reads=(
        f"{MODULES} {IMPL} model.family model.moe model.hybrid model.parallel_residual"
        " model.num_layers model.moe.first_dense_layers model.hybrid.pattern"
    ),
)
def captured_modules(run: RunConfig) -> Iterator[Finding]:
    """Cannot capture these modules because each must exist in the layers and be captured once."""
    chosen = run.trainer.cuda_graph_modules
    m = run.model
    if run.trainer.cuda_graph_impl not in ("local", "transformer_engine") or not chosen:
        return
    possible = _possible(run)
    local = run.trainer.cuda_graph_impl == "local"
    if (experts := {"moe", "moe_router", "moe_preprocess"} & set(chosen)) and m.moe is None:
        why = f"{', '.join(sorted(experts))}: the model has no experts"
    elif "mamba" in chosen and m.family != "hybrid":
        why = f"mamba: the family {m.family} has no Mamba-2 layers"
    elif "mlp" in chosen and m.moe is not None and "mlp" not in possible:
        why = "mlp: every MLP of the model has experts"
    elif local and (halves := experts - {"moe"}):
        why = f"{', '.join(sorted(halves))}: local captures experts whole, TransformerEngine halves"
    elif local and "mlp" in chosen and m.parallel_residual:
        why = "mlp: it is added to what attention returns, which is another graph"
    elif absent := {"attn", "mlp", "mamba"} & set(chosen) - possible:
        why = f"{', '.join(sorted(absent))}: no layer of the model has it"
    # The two would capture the router twice.
    elif {"moe", "moe_router"} <= set(chosen):
        why = "moe contains moe_router"
    elif "moe_preprocess" in chosen and "moe_router" not in chosen:
        why = "moe_preprocess follows moe_router, which is not captured"
    else:
        return
    left = tuple(word for word in chosen if word in possible)
    yield Finding("MT412", MODULES, why, [{MODULES: left or None}, NONE], unset=not left)


def _possible(run: RunConfig) -> set[str]:
    m = run.model
    if m.hybrid is not None:
        has = {word for word, kinds in _OF_KINDS.items() if set(kinds) & set(m.hybrid.pattern)}
    else:
        has = {"attn"} | ({"mlp"} if m.moe is None or m.moe.first_dense_layers else set())
    if run.trainer.cuda_graph_impl == "local":
        return has - ({"mlp"} if m.parallel_residual else set())
    return has | ({"moe_router", "moe_preprocess"} if m.moe is not None else set())


@rule(
    Code(
        "MT413",
        help=(
            "Pad experts to a capacity, which always gives one shape; else capture only what comes"
            " before tokens are exchanged."
        ),
        example=f"{IMPL}=local {_EXPERTS}",
    ),
    Code(
        "MT414",
        "Cannot capture the counts of a token exchange because the alltoall dispatcher copies the"
        " number of dropped or padded tokens to the host.",
        example=(
            f"{IMPL}=transformer_engine kernels.linear=te {MODULES}=[moe_router,moe_preprocess]"
            f" {_EXPERTS} model.moe.expert_capacity_factor=1.0"
        ),
    ),
    reads=(
        f"{IMPL} {MODULES} model.moe"
        " model.moe.expert_capacity_factor model.moe.pad_expert_input_to_capacity"
        " model.moe.token_dispatcher_type model.moe.pad_alltoall"
        " model.moe.router_padding_for_quantization kernels.experts kernels.default"
    ),
)
def captured_experts(run: RunConfig) -> Iterator[Finding]:
    """Cannot capture experts because a graph has fixed shapes, and the host cannot read token
    counts during capture.
    """
    moe = run.model.moe
    held = captured(run)
    if moe is None or (moe.expert_capacity_factor is not None and moe.pad_expert_input_to_capacity):
        return
    modules = run.trainer.cuda_graph_modules or ()
    padded: Change = {
        "model.moe.expert_capacity_factor": moe.expert_capacity_factor or 1.25,
        "model.moe.pad_expert_input_to_capacity": True,
    }
    waits = (run.kernels.experts or run.kernels.default) == "reference"
    # megatron-core captures moe as a part of a layer only if experts have a capacity.
    if "moe" in held and (not moe.padded or "moe" in modules or waits):
        if not moe.padded:
            detail = "they get another number of tokens in each step"
        elif waits:
            detail = "those of the reference wait for counts of rows"
        else:
            detail = "as a part of a layer they need a capacity"
        attn: Change = {IMPL: "local", MODULES: ("attn",)}
        yield Finding("MT413", IMPL, detail, [attn, padded, NONE])
    counts = moe.expert_capacity_factor is not None or moe.router_padding_for_quantization
    if "moe_preprocess" in held and moe.token_dispatcher_type == "alltoall" and counts:
        less: Change = {MODULES: tuple(word for word in modules if word != "moe_preprocess")}
        yield Finding("MT414", MODULES, "moe_preprocess", [less, padded, NONE])


@rule(
    Code(
        "MT417",
        help="Set trainer.eval_iters=0, or leave the capacity out.",
        severity="warning",
        example=f"{_PADDED} model.moe.alltoall_capacity_factor=1.5 {IMPL}=full_iteration",
    ),
    reads=(
        f"{IMPL} trainer.eval_iters trainer.micro_batch_size data.seq_length"
        " parallel.ep parallel.etp parallel.tp parallel.cp model.moe model.moe.pad_alltoall"
        " model.moe.token_dispatcher_type model.moe.router_topk model.moe.alltoall_capacity_factor"
        " model.moe.num_experts"
    ),
)
def captured_evaluations(run: RunConfig) -> Iterator[Finding]:
    """Cannot evaluate within the planned memory because an evaluation in one graph has room for all
    rows of a padded exchange.
    """
    t = run.trainer
    p = run.parallel
    moe = run.model.moe
    key = "model.moe.alltoall_capacity_factor"
    # Outside of graphs an evaluation sends exactly the rows that it has.
    if t.cuda_graph_impl != "full_iteration" or p.ep == 1 or not t.eval_iters:
        return
    if moe is None or not moe.padded:
        return
    tokens = t.micro * run.data.length // (p.cp * p.tp)
    ranks = (p.etp or p.tp) * p.ep
    experts = moe.num_experts // p.ep
    # An evaluation has no capacity, so its graph needs room for every row.
    planned, needed = (
        ranks * room_of(tokens, moe.router_topk, experts, p.ep, factor)
        for factor in (moe.alltoall_capacity_factor, None)
    )
    if planned < needed:
        detail = f"{needed} rows in a layer, planned {planned}"
        fixes: list[Change] = [{"trainer.eval_iters": 0}, {key: None}]
        yield Finding("MT417", key, detail, fixes, also=(IMPL,))


@rule(
    Code("MT415", example=f"{IMPL}=local {GRANULARITY}=full {_H100}"),
    reads=(
        f"{IMPL} {MODULES} {GRANULARITY} parallel.recompute.modules model.attention_dropout"
        " model.hidden_dropout model.moe model.moe.input_jitter_eps"
    ),
)
def captured_recomputation(run: RunConfig) -> Iterator[Finding]:
    """Cannot recompute this with CUDA graphs because a recomputed part must lie wholly inside or
    outside of a graph that can hold it, and draw no random numbers inside.
    """
    impl = run.trainer.cuda_graph_impl
    again = run.parallel.recompute
    held = captured(run)
    if impl == "none" or again.granularity == "none":
        return
    modules = set(again.modules or ())
    both = held & modules
    m = run.model
    if again.granularity == "full" and impl != "full_iteration":
        why = "whole layers, and the graph is not of the whole step"
    # megatron-core captures with `torch.autograd.grad`, in which no checkpoint may run.
    elif impl == "local":
        why = "parts of layers, and the graph of a layer's backward computes nothing again"
    # A region that is recomputed cannot contain a graph.
    elif impl == "transformer_engine" and "moe" in modules and "moe_router" in held:
        why = "moe contains moe_router, which TransformerEngine captures"
    # Recomputation repeats the random numbers of the forward, which a replay cannot.
    elif m.attention_dropout and "attn" in held and "core_attn" in modules:
        why = "attention has dropout"
    elif m.hidden_dropout and both & {"mlp", "moe"}:
        why = "MLPs have dropout"
    elif m.moe is not None and m.moe.input_jitter_eps and "moe" in both:
        why = "the router's input is random"
    else:
        return
    none: Change = {
        **NO_RECOMPUTE,
        "parallel.recompute.method": None,
        "parallel.recompute.num_layers": None,
    }
    yield Finding("MT415", GRANULARITY, why, [none, NONE])


_ALONE: tuple[tuple[str, object, str], ...] = (
    ("data.packed", False, "documents of packed samples begin elsewhere in each of them"),
    (
        "parallel.hybrid_context_parallel",
        False,
        "documents of different lengths have different shapes",
    ),
    ("parallel.fsdp", "none", "FSDP gathers weights into other memory in each step"),
    ("trainer.rampup_batch_size", None, "steps have different numbers of micro-batches"),
    ("trainer.batch_size_schedule", None, "steps have different numbers of micro-batches"),
    ("trainer.sample_tokens", 0, "text of growing length has no shape that was captured"),
    ("peft.kind", None, "layers with frozen weights are captured without a backward"),
)
"""Key, its value for CUDA graphs, and why others fail."""


@rule(
    Code("MT416", example=f"{IMPL}=local data=packed {_H100}"),
    reads=(
        f"{IMPL} {MODULES} model.family model.moe"
        " trainer.loss_average data.kind model.attention_dropout precision.dtype"
        f" model.hidden_dropout trainer.eval_iters {' '.join(key for key, _, _ in _ALONE)}"
    ),
)
def replay_invariants(run: RunConfig) -> Iterator[Finding]:
    """Cannot replay a CUDA graph because it keeps the shapes, memory and numbers of the captured
    step, and they change.
    """
    impl = run.trainer.cuda_graph_impl
    m = run.model
    t = run.trainer
    if impl == "none":
        return
    if m.family not in ("gpt", "hybrid"):
        detail = f"layers of the family {m.family} get more than hidden states"
        yield Finding("MT416", IMPL, detail, [NONE], also=("model.family",))
    held = {
        "data.packed": run.data.packed,
        "parallel.hybrid_context_parallel": run.parallel.hybrid_context_parallel,
        "parallel.fsdp": run.parallel.fsdp,
        "trainer.rampup_batch_size": t.rampup_batch_size,
        "trainer.batch_size_schedule": t.batch_size_schedule,
        "trainer.sample_tokens": t.sample_tokens,
        "peft.kind": run.peft.kind,
    }
    for key, goes, why in _ALONE:
        if held[key] != goes:
            yield Finding("MT416", key, why, [{key: goes}, NONE], also=(IMPL,))
    whole = impl == "full_iteration"
    # The weight of the router's loss is another number in each step, and a graph keeps the first.
    routed = m.moe is not None and bool({"moe", "moe_router"} & captured(run))
    if routed and (run.data.kind == "sft" or (whole and t.loss_average != "token")):
        detail = "the weight of the router's loss"
        yield Finding("MT416", IMPL, detail, [NONE], also=("data.kind", "trainer.loss_average"))
    # The scaler changes the scale on the host when gradients overflow.
    if whole and run.precision.format == "fp16":
        detail = "the loss scale of fp16"
        yield Finding("MT416", "precision.dtype", detail, [BF16, NONE], also=(IMPL,))
    # megatron-core's local graphs are also replayed in evaluation.
    if impl == "local" and (m.attention_dropout or m.hidden_dropout) and t.eval_iters:
        key = "trainer.eval_iters"
        detail = "an evaluation would run the graphs of training, with their dropout"
        yield Finding("MT416", key, detail, [{key: 0}, NONE], also=(IMPL,))


OFFLOAD = "parallel.activation_offload.modules"
NO_OFFLOAD: Change = {
    OFFLOAD: None,
    "parallel.activation_offload.min_tensor_elements": None,
    "parallel.activation_offload.fraction": None,
    "parallel.activation_offload.delta_bytes_across_stages": None,
}
OF_EXPERTS = ("expert_fc1", "moe_act")


@rule(
    Code("MT174", example=f"{OFFLOAD}=[core_attn]"),
    Code(
        "MT175",
        "Cannot copy activations to the host because megatron-core copies those of"
        " TransformerEngine's layers and experts.",
        example=f"{OFFLOAD}=[core_attn] kernels.linear=triton {_H100}",
    ),
    reads=f"{OFFLOAD} cluster.device kernels.linear kernels.experts kernels.default model.moe",
)
def offload_device(run: RunConfig) -> Iterator[Finding]:
    """Cannot copy activations to the host because that takes streams of CUDA."""
    chosen = run.parallel.activation_offload.modules
    if not chosen:
        return
    k = run.kernels
    device = run.cluster.device
    if not facts_of(device).cuda_kernels:
        detail = f"it needs {with_cuda_kernels()}, and the device is {device}"
        yield Finding("MT174", OFFLOAD, detail, [NO_OFFLOAD], unset=True, lacks="device")
        return
    if k.linear not in ("te", "auto", None):
        fixes = [{"kernels.linear": "te"}, NO_OFFLOAD]
        yield Finding("MT175", OFFLOAD, f"kernels.linear is {k.linear}", fixes)
        return
    # `auto` might choose others than TransformerEngine's experts.
    word = k.experts or k.default
    parts = [module for module in chosen if module in OF_EXPERTS]
    if run.model.moe is not None and parts and word != "te":
        fixes = [{"kernels.experts": "te"}, NO_OFFLOAD]
        detail = f"{' and '.join(parts)}, and kernels.experts is {word}"
        yield Finding("MT175", OFFLOAD, detail, fixes)


@rule(
    Code("MT176", example=f"{OFFLOAD}=[attn_proj] {_H100}"),
    reads=(
        f"{OFFLOAD} model.family model.builder model.moe {GRANULARITY}"
        f" parallel.recompute.modules parallel.hybrid_context_parallel {IMPL}"
    ),
)
def offloaded_modules(run: RunConfig) -> Iterator[Finding]:
    """Cannot copy these activations to the host because each must exist, wait for the backward, and
    come in a fixed order.
    """
    chosen = run.parallel.activation_offload.modules
    again = run.parallel.recompute
    m = run.model
    if not chosen:
        return
    rest = tuple(word for word in chosen if word not in OF_EXPERTS)
    named = ", ".join(word for word in chosen if word in OF_EXPERTS)
    without_experts: Change = {OFFLOAD: rest} if rest else NO_OFFLOAD

    def refused(detail: str, *also: str, instead: Change | None = None) -> Finding:
        fixes = [NO_OFFLOAD] if instead is None else [instead, NO_OFFLOAD]
        return Finding("MT176", OFFLOAD, detail, fixes, also=also)

    if m.family != "gpt":
        yield refused(f"layers of the family {m.family} copy none")
    elif m.builder != "gpt":
        detail = "megatron-core 0.16.1 copies only those of a GPTModel"
        yield refused(detail, "model.builder", instead={"model.builder": "gpt"})
    # Two modules save the same tensor, so it stays on the device unless both let it go.
    if "attn_proj" in chosen and "core_attn" not in chosen:
        detail = "core_attn keeps the input of attn_proj for its own backward"
        yield refused(detail, instead={OFFLOAD: (*chosen, "core_attn")})
    if named and m.moe is None:
        yield Finding("MT176", OFFLOAD, f"{named}: the model has no experts", [without_experts])
    # A layer that is recomputed keeps only its input.
    if again.granularity == "full":
        yield refused("recomputed layers keep none", GRANULARITY)
    if named and again.granularity == "selective" and "moe" in (again.modules or ()):
        yield Finding("MT176", OFFLOAD, f"moe is recomputed, with {named}", [without_experts])
    if run.parallel.hybrid_context_parallel:
        yield refused("documents of different lengths", "parallel.hybrid_context_parallel")
    if run.trainer.cuda_graph_impl != "none":
        fixes = [NO_OFFLOAD, NONE]
        yield Finding("MT176", OFFLOAD, "CUDA graphs are not proven with it", fixes, also=(IMPL,))
