"""CUDA-graph rules: devices, what a graph may capture, and what must not change between two
launches.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.moe import room_of
from mtrain.config.schema.run import RunConfig
from mtrain.models.hybrid.config import DELTA, MAMBA, MLP, SOFTMAX

NONE: Change = {
    "trainer.cuda_graph_impl": "none",
    "trainer.cuda_graph_modules": None,
    "trainer.cuda_graph_warmup_steps": None,
}
IMPL = "trainer.cuda_graph_impl"
_H100 = "cluster=h100 cluster.devices_per_node=1 parallel=single"
_EXPERTS = f"model=mixtral_tiny {_H100}"
_PADDED = (
    "model=mixtral_tiny cluster=h100 cluster.devices_per_node=2 parallel=ep2"
    " model.moe.pad_alltoall=true"
)
_LAYERS = "trainer.cuda_graph_impl=local trainer.cuda_graph_modules"


def captured(run: RunConfig) -> frozenset[str]:
    """Return the captured parts of a layer in words of `trainer.cuda_graph_modules`; all of them
    for whole layers and steps.
    """
    t = run.trainer
    if t.cuda_graph_impl == "none":
        return frozenset()
    everything = ("attn", "mlp", "moe", "mamba")
    return frozenset((t.cuda_graph_impl != "full_iteration" and t.cuda_graph_modules) or everything)


@rule(
    Code("MT410", "CUDA graphs are captured on CUDA.", example="trainer.cuda_graph_impl=local"),
    Code(
        "MT411",
        "TransformerEngine captures layers of its own.",
        example=f"trainer.cuda_graph_impl=transformer_engine kernels.linear=triton {_H100}",
    ),
    reads="trainer.cuda_graph_impl cluster.device kernels.linear",
)
def graph_device(run: RunConfig) -> Iterator[Finding]:
    """CUDA graphs need CUDA, and TransformerEngine's graphs its layers."""
    impl = run.trainer.cuda_graph_impl
    device = run.cluster.device
    linear = run.kernels.linear
    if impl == "none":
        return
    if not facts_of(device).cuda_kernels:
        rule = f"CUDA graphs are captured on {with_cuda_kernels()}, and the device is {device}"
        yield Finding("MT410", "trainer.cuda_graph_impl", rule, (NONE,), lacks="device")
    elif impl == "transformer_engine" and linear not in ("te", "auto", None):
        rule = f"TransformerEngine captures layers of its own, and kernels.linear is {linear}"
        local: Change = {"trainer.cuda_graph_impl": "local"}
        yield Finding(
            "MT411", "trainer.cuda_graph_impl", rule, ({"kernels.linear": "te"}, local, NONE)
        )


@rule(
    Code(
        "MT412",
        "What is captured is in the model, and once.",
        "Name modules that the layers have; moe stands for all of an MLP with experts, moe_router"
        " and moe_preprocess for its first parts.",
        example=f"{_LAYERS}=[moe_router] {_H100}",
    ),
    reads=(
        "trainer.cuda_graph_modules trainer.cuda_graph_impl model.family model.moe model.hybrid"
        " model.num_layers model.moe.first_dense_layers model.hybrid.pattern"
    ),
)
def captured_modules(run: RunConfig) -> Iterator[Finding]:
    """Captured modules exist in the layers, and no part is captured twice."""
    chosen = run.trainer.cuda_graph_modules
    m = run.model
    if run.trainer.cuda_graph_impl not in ("local", "transformer_engine") or not chosen:
        return
    why = None
    experts = {"moe", "moe_router", "moe_preprocess"} & set(chosen)
    if experts and m.moe is None:
        why = f"{', '.join(sorted(experts))}: the model has no experts"
    elif "mamba" in chosen and m.family != "hybrid":
        why = f"mamba: the family {m.family} has no Mamba-2 layers"
    elif "mlp" in chosen and m.moe is not None and "mlp" not in _possible(run):
        why = "mlp: every MLP of the model has experts"
    elif absent := {"attn", "mlp", "mamba"} & set(chosen) - _possible(run):
        why = f"{', '.join(sorted(absent))}: no layer of the model has it"
    elif {"moe", "moe_router"} <= set(chosen):
        why = "moe has moe_router in it"
    elif "moe_preprocess" in chosen and "moe_router" not in chosen:
        why = "moe_preprocess comes after moe_router, which is not captured"
    if why is not None:
        left = tuple(word for word in chosen if word in _possible(run))
        some: Change = {"trainer.cuda_graph_modules": left or None}
        yield Finding("MT412", "trainer.cuda_graph_modules", why, (some, NONE), unset=not left)


def _possible(run: RunConfig) -> set[str]:
    m = run.model
    experts = ("moe_router", "moe_preprocess")
    if m.hybrid is not None:
        has = {word for word, kinds in _OF_KINDS.items() if set(kinds) & set(m.hybrid.pattern)}
    else:
        has = {"attn"} | ({"mlp"} if m.moe is None or m.moe.first_dense_layers else set())
    return has | (set(experts) if m.moe is not None else set())


_OF_KINDS = {"attn": (*SOFTMAX, DELTA), "mlp": (MLP,), "mamba": (MAMBA,)}
"""Part of a layer -> the letters of a hybrid's pattern whose layers have it."""


@rule(
    Code(
        "MT413",
        "Experts that are captured compute as many tokens in every step.",
        "Experts with a capacity that they are padded to always get one shape; else capture what"
        " comes before tokens are exchanged.",
        example=f"trainer.cuda_graph_impl=local {_EXPERTS}",
    ),
    Code(
        "MT414",
        "Counting for the exchange of tokens is captured where the host waits for no number.",
        example=(
            f"{_LAYERS}=[moe_router,moe_preprocess] {_EXPERTS} model.moe.expert_capacity_factor=1.0"
        ),
    ),
    reads=(
        "trainer.cuda_graph_impl trainer.cuda_graph_modules model.moe"
        " model.moe.expert_capacity_factor model.moe.pad_expert_input_to_capacity"
        " model.moe.token_dispatcher_type model.moe.pad_alltoall"
        " model.moe.router_padding_for_quantization kernels.experts kernels.default"
    ),
)
def captured_experts(run: RunConfig) -> Iterator[Finding]:
    """A graph has fixed shapes, and the host reads nothing during its capture."""
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
    # moe can only be captured as a part of a layer if experts have a capacity
    whole = moe.padded and "moe" not in modules and not waits
    if "moe" in held and not whole:
        rule = "experts get another number of tokens in each step, and a CUDA graph has one shape"
        if moe.padded and waits:
            rule = (
                "experts of the reference wait for counts of rows, and the host reads nothing while"
                " it is captured"
            )
        elif moe.padded:
            rule = (
                "megatron-core captures moe as a part of a layer where experts are padded to a"
                " capacity"
            )
        attn: Change = {"trainer.cuda_graph_impl": "local", "trainer.cuda_graph_modules": ("attn",)}
        yield Finding("MT413", "trainer.cuda_graph_impl", rule, (attn, padded, NONE))
    counts = moe.expert_capacity_factor is not None or moe.router_padding_for_quantization
    if "moe_preprocess" in held and moe.token_dispatcher_type == "alltoall" and counts:
        rule = (
            "the alltoall dispatcher tells the host how many tokens are left of what is dropped or"
            " padded"
        )
        less: Change = {
            "trainer.cuda_graph_modules": tuple(
                word for word in modules if word != "moe_preprocess"
            )
        }
        yield Finding("MT414", "trainer.cuda_graph_modules", rule, (less, padded, NONE))


@rule(
    Code(
        "MT417",
        "An evaluation in one graph has room for all rows of padded exchanges.",
        "It ends at no capacity, and the graph has one shape. Outside of graphs it sends exactly"
        " what there is.",
        severity="warning",
        example=(
            f"{_PADDED} model.moe.alltoall_capacity_factor=1.5"
            " trainer.cuda_graph_impl=full_iteration"
        ),
    ),
    reads=(
        "trainer.cuda_graph_impl trainer.eval_iters trainer.micro_batch_size data.seq_length"
        " parallel.ep parallel.etp parallel.tp parallel.cp model.moe model.moe.pad_alltoall"
        " model.moe.token_dispatcher_type model.moe.router_topk model.moe.alltoall_capacity_factor"
        " model.moe.num_experts"
    ),
)
def captured_evaluations(run: RunConfig) -> Iterator[Finding]:
    """Padded exchanges are planned for training steps, so evaluations are not captured
    with them.
    """
    t = run.trainer
    p = run.parallel
    moe = run.model.moe
    key = "model.moe.alltoall_capacity_factor"
    if (
        t.cuda_graph_impl != "full_iteration"
        or moe is None
        or not moe.padded
        or p.ep == 1
        or not t.eval_iters
    ):
        return
    tokens = t.micro * run.data.length // (p.cp * p.tp)
    held = [
        (p.etp or p.tp)
        * p.ep
        * room_of(tokens, moe.router_topk, moe.num_experts // p.ep, p.ep, factor)
        for factor in (moe.alltoall_capacity_factor, None)
    ]
    if held[0] < held[1]:
        rule = (
            f"an evaluation has room for {held[1]} rows in a layer, and what is planned is that of"
            f" {held[0]}"
        )
        yield Finding("MT417", key, rule, ({"trainer.eval_iters": 0}, {key: None}), also=(IMPL,))


@rule(
    Code(
        "MT415",
        "What is computed again lies in what is captured, or outside of it, and draws no random"
        " numbers there.",
        example=f"trainer.cuda_graph_impl=local parallel.recompute.granularity=full {_H100}",
    ),
    reads=(
        "trainer.cuda_graph_impl trainer.cuda_graph_modules parallel.recompute.granularity"
        " parallel.recompute.modules model.attention_dropout model.hidden_dropout model.moe"
        " model.moe.input_jitter_eps"
    ),
)
def captured_recomputation(run: RunConfig) -> Iterator[Finding]:
    """Recomputation and CUDA graphs combine within megatron-core's limits."""
    impl = run.trainer.cuda_graph_impl
    again = run.parallel.recompute
    held = captured(run)
    if impl == "none" or again.granularity == "none":
        return
    modules = set(again.modules or ())
    m = run.model
    why = None
    if again.granularity == "full" and impl != "full_iteration":
        why = "whole layers are computed again only where a graph is of the whole step"
    elif impl == "transformer_engine" and {"moe"} <= modules and "moe_router" in held:
        why = "moe is computed again, and TransformerEngine captures moe_router, which is in it"
    elif m.attention_dropout and "attn" in held and "core_attn" in modules:
        why = "attention is captured and computed again, and has dropout"
    elif m.hidden_dropout and (
        ("mlp" in held and "mlp" in modules) or ("moe" in held and "moe" in modules)
    ):
        why = "MLPs are captured and computed again, and have dropout"
    elif m.moe is not None and m.moe.input_jitter_eps and "moe" in held and "moe" in modules:
        why = "experts are captured and computed again, and their router's input is random"
    if why is not None:
        none: Change = {
            "parallel.recompute.granularity": "none",
            "parallel.recompute.modules": None,
            "parallel.recompute.method": None,
            "parallel.recompute.num_layers": None,
        }
        yield Finding("MT415", "parallel.recompute.granularity", why, (none, NONE))


_ALONE: tuple[tuple[str, object, str], ...] = (
    ("data.packed", False, "documents of packed samples begin elsewhere in each of them"),
    (
        "parallel.hybrid_context_parallel",
        False,
        "documents of different lengths have different shapes",
    ),
    ("parallel.fsdp", "none", "memory of weights that FSDP gathers is another in each step"),
    ("trainer.rampup_batch_size", None, "steps would have different numbers of micro-batches"),
    ("trainer.batch_size_schedule", None, "steps would have different numbers of micro-batches"),
    ("trainer.sample_tokens", 0, "text of growing length has no shape that was captured"),
    ("peft.kind", None, "layers with frozen weights are captured without a backward"),
)
"""Key, the value that goes with CUDA graphs, and why others do not."""


@rule(
    Code(
        "MT416",
        "A CUDA graph replays what was captured: shapes, memory and numbers of the host are those"
        " of that step.",
        example=f"trainer.cuda_graph_impl=local data=packed {_H100}",
    ),
    reads=(
        "trainer.cuda_graph_impl trainer.cuda_graph_modules model.family model.moe"
        " trainer.loss_average data.kind model.attention_dropout precision.dtype"
        f" model.hidden_dropout trainer.eval_iters {' '.join(key for key, _, _ in _ALONE)}"
    ),
)
def replay_invariants(run: RunConfig) -> Iterator[Finding]:
    """No captured value changes between steps."""
    impl = run.trainer.cuda_graph_impl
    m = run.model
    t = run.trainer
    if impl == "none":
        return
    if m.family not in ("gpt", "hybrid"):
        rule = (
            f"layers of the family {m.family} are given more than hidden states, which is not"
            " captured"
        )
        yield Finding("MT416", "trainer.cuda_graph_impl", rule, (NONE,), also=("model.family",))
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
            off: Change = {key: goes}
            yield Finding(
                "MT416", key, f"{why}, and CUDA graphs replay one", (off, NONE), also=(IMPL,)
            )
    routed = m.moe is not None and bool({"moe", "moe_router"} & captured(run))
    if routed and (
        run.data.kind == "sft" or (impl == "full_iteration" and t.loss_average != "token")
    ):
        rule = (
            "the weight of the router's loss is another in each step, and a graph of the router"
            " keeps one"
        )
        yield Finding(
            "MT416",
            "trainer.cuda_graph_impl",
            rule,
            (NONE,),
            also=("data.kind", "trainer.loss_average"),
        )
    if impl == "full_iteration" and run.precision.format == "fp16":
        rule = (
            "the loss scale of fp16 is another number in later steps, and a graph of the whole step"
            " keeps one"
        )
        bf16: Change = {"precision.dtype": "bf16"}
        yield Finding("MT416", "precision.dtype", rule, (bf16, NONE), also=(IMPL,))
    if impl == "local" and (m.attention_dropout or m.hidden_dropout) and t.eval_iters:
        rule = "an evaluation runs the same graphs as training, with their dropout"
        yield Finding(
            "MT416", "trainer.eval_iters", rule, ({"trainer.eval_iters": 0}, NONE), also=(IMPL,)
        )


RULES = (
    graph_device,
    captured_modules,
    captured_experts,
    captured_evaluations,
    captured_recomputation,
    replay_invariants,
)
