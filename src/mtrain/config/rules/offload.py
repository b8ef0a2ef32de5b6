"""Activation-offload rules: who copies activations to host memory, and which inputs can
be copied.
"""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

MODULES = "parallel.activation_offload.modules"
NONE: Change = {
    MODULES: None,
    "parallel.activation_offload.min_tensor_elements": None,
    "parallel.activation_offload.fraction": None,
    "parallel.activation_offload.delta_bytes_across_stages": None,
}
OF_EXPERTS = ("expert_fc1", "moe_act")
_H100 = "cluster=h100 cluster.devices_per_node=1 parallel=single"


@rule(
    Code(
        "MT174",
        "Activations are copied to the host on streams of CUDA.",
        example=f"{MODULES}=[core_attn]",
    ),
    Code(
        "MT175",
        "megatron-core copies activations of TransformerEngine's layers, and of its experts.",
        example=f"{MODULES}=[core_attn] kernels.linear=triton {_H100}",
    ),
    reads=f"{MODULES} cluster.device kernels.linear kernels.experts kernels.default model.moe",
)
def offload_device(run: RunConfig) -> Iterator[Finding]:
    """Only CUDA devices offload activations, from TransformerEngine's layers."""
    if not run.parallel.activation_offload.modules:
        return
    device = run.cluster.device
    linear = run.kernels.linear
    if not facts_of(device).cuda_kernels:
        rule = (
            f"activations are copied to the host on {with_cuda_kernels()}, and the device is"
            f" {device}"
        )
        yield Finding("MT174", MODULES, rule, (NONE,), unset=True, lacks="device")
    elif linear not in ("te", "auto", None):
        rule = (
            "megatron-core copies activations of TransformerEngine's layers, and kernels.linear is"
            f" {linear}"
        )
        yield Finding("MT175", MODULES, rule, ({"kernels.linear": "te"}, NONE))
    elif run.model.moe is not None and (word := run.kernels.experts or run.kernels.default) != "te":
        chosen = [
            module for module in run.parallel.activation_offload.modules if module in OF_EXPERTS
        ]
        if chosen:  # `auto` might take others
            rule = (
                f"experts of ours copy no {' and '.join(chosen)} to the host, and kernels.experts"
                f" is {word}"
            )
            yield Finding("MT175", MODULES, rule, ({"kernels.experts": "te"}, NONE))


@rule(
    Code(
        "MT176",
        "What is copied to the host is an activation of the model that waits for the backward.",
        example=f"{MODULES}=[attn_proj] {_H100}",
    ),
    reads=(
        f"{MODULES} model.family model.builder model.moe parallel.recompute.granularity"
        " parallel.recompute.modules parallel.hybrid_context_parallel trainer.cuda_graph_impl"
    ),
)
def offloaded_modules(run: RunConfig) -> Iterator[Finding]:
    """Offloaded modules exist and save an input that no other module saves."""
    chosen = run.parallel.activation_offload.modules
    again = run.parallel.recompute
    m = run.model
    if not chosen:
        return
    experts = tuple(word for word in chosen if word in OF_EXPERTS)
    rest = tuple(word for word in chosen if word not in OF_EXPERTS)
    if m.family != "gpt":
        yield Finding(
            "MT176", MODULES, f"layers of the family {m.family} copy no activations", (NONE,)
        )
    elif m.builder != "gpt":
        rule = (
            "megatron-core 0.16.1 copies only activations of a GPTModel's layers, and"
            " model.builder is hybrid"
        )
        yield Finding(
            "MT176", MODULES, rule, ({"model.builder": "gpt"}, NONE), also=("model.builder",)
        )
    if "attn_proj" in chosen and "core_attn" not in chosen:
        rule = "the input of attn_proj is what core_attn gives, which keeps it for its own backward"
        both: Change = {MODULES: (*chosen, "core_attn")}
        yield Finding("MT176", MODULES, rule, (both, NONE))
    if experts and m.moe is None:
        change: Change = {MODULES: rest} if rest else NONE
        yield Finding(
            "MT176", MODULES, f"{', '.join(experts)}: the model has no experts", (change,)
        )
    if again.granularity == "full":
        rule = "whole layers are computed again, and keep no activations of their modules"
        yield Finding("MT176", MODULES, rule, (NONE,), also=("parallel.recompute.granularity",))
    if experts and again.granularity == "selective" and "moe" in (again.modules or ()):
        rule = f"moe is computed again, with {', '.join(experts)} in it"
        yield Finding("MT176", MODULES, rule, ({MODULES: rest} if rest else NONE,))
    if run.parallel.hybrid_context_parallel:
        rule = "documents of different lengths are no fixed order of activations"
        yield Finding("MT176", MODULES, rule, (NONE,), also=("parallel.hybrid_context_parallel",))
    if run.trainer.cuda_graph_impl != "none":
        rule = "CUDA graphs and copies to the host have not been tried together"
        off: Change = {f"trainer.cuda_graph_{key}": value for key, value in _GRAPHS}
        yield Finding("MT176", MODULES, rule, (NONE, off), also=("trainer.cuda_graph_impl",))


_GRAPHS = (("impl", "none"), ("modules", None), ("warmup_steps", None))
RULES = (offload_device, offloaded_modules)
