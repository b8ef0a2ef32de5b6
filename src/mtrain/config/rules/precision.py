"""Precision and kernel rules: formats and implementations that the device supports."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.engine.kernels import KEYS, lacks, torch_experts_obstacle
from mtrain.config.machine.devices import facts_of, with_cuda_kernels
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, Rule, rule
from mtrain.config.schema.run import RunConfig

NAMED = Code(
    "MT403",
    "A kernel is named that the device cannot run.",
    "Take a reference kernel or auto, or train on a GPU; only auto chooses.",
    example="kernels.attention=te",
)


@rule(
    Code(
        "MT402",
        example="precision=fp16 precision.min_loss_scale=4096 precision.initial_loss_scale=1024",
    ),
    reads="precision.dtype precision.initial_loss_scale precision.min_loss_scale",
)
def loss_scale_range(run: RunConfig) -> Iterator[Finding]:
    """The dynamic loss scale starts at or above its floor."""
    p = run.precision
    if p.dtype == "fp16" and p.min_loss_scale > p.initial_loss_scale:
        rule = (
            f"the smallest loss scale {p.min_loss_scale:g} is above the first one"
            f" {p.initial_loss_scale:g}"
        )
        fixes: tuple[Change, ...] = ({"precision.min_loss_scale": min(1.0, p.initial_loss_scale)},)
        yield Finding("MT402", "precision.min_loss_scale", rule, fixes)


def kernel_runs_on_the_device(key: str) -> Rule:
    """Return the rule that an implementation named for an operation can run; only `auto` may choose
    another.
    """

    @rule(NAMED, reads=f"kernels.{key} kernels.default cluster.device")
    def named_kernel_runs(run: RunConfig) -> Iterator[Finding]:
        device = facts_of(run.cluster.device)
        named = getattr(run.kernels, key)
        if (
            named != "te"
            or device.cuda_kernels
            or (key != "default" and run.kernels.default == "te")
        ):
            return
        fixes: tuple[Change, ...] = ({f"kernels.{key}": "auto"}, {f"kernels.{key}": "reference"})
        rule = f"TransformerEngine runs on {with_cuda_kernels()}, and the device is {device.name}"
        yield Finding("MT403", f"kernels.{key}", rule, fixes, lacks="device")

    return named_kernel_runs


@rule(
    Code(
        "MT409",
        example=(
            "model.attn_logit_softcapping=50 kernels.attention=te cluster=h100x8 parallel=single"
        ),
    ),
    reads=(
        "kernels.attention model.attn_logit_softcapping model.position_embedding_type"
        " model.attention_dropout model.mla model.kv_channels model.hidden_size"
        " model.num_attention_heads model.mla.qk_head_dim model.mla.qk_pos_emb_head_dim"
        " model.mla.v_head_dim model.dsa"
    ),
)
def attention_cap(run: RunConfig) -> Iterator[Finding]:
    """A named attention implementation supports what the model requires."""
    why = lacks("attention", run.kernels.attention or "", run)
    if why is not None:
        fixes: tuple[Change, ...] = (
            {"kernels.attention": "torch"},
            {"kernels.attention": "reference"},
        )
        yield Finding("MT409", "kernels.attention", why, fixes)


@rule(
    Code(
        "MT405",
        "Sums in fp32 are for gradients that travel in less.",
        example="parallel.ddp_reduce_scatter_with_fp32_accumulation=true",
    ),
    Code(
        "MT406",
        "Sums in fp32 need the distributed optimizer, one bucket at a time, without replicas.",
        example=(
            "precision=bf16 precision.grad_reduce_in_fp32=false "
            "parallel.ddp_reduce_scatter_with_fp32_accumulation=true"
        ),
    ),
    reads=(
        "parallel.ddp_reduce_scatter_with_fp32_accumulation parallel.distributed_optimizer"
        " precision.dtype precision.grad_reduce_in_fp32 parallel.overlap_grad_reduce"
        " parallel.hsdp_replicas"
    ),
)
def fp32_accumulation(run: RunConfig) -> Iterator[Finding]:
    """Summing half-precision gradients in fp32 needs the distributed optimizer, one bucket at a
    time.
    """
    p = run.parallel
    if not p.ddp_reduce_scatter_with_fp32_accumulation:
        return
    key = "parallel.ddp_reduce_scatter_with_fp32_accumulation"
    off: Change = {key: False}
    if run.precision.dtype == "fp32" or run.precision.grad_reduce_in_fp32:
        rule = "gradients travel in fp32 already"
        less: Change = {"precision.grad_reduce_in_fp32": False}
        yield Finding("MT405", key, rule, (less, {**less, "precision.dtype": "bf16"}, off))
    if not (p.distributed_optimizer and p.overlap_grad_reduce) or p.hsdp_replicas > 1:
        rule = "needs distributed_optimizer and overlap_grad_reduce, and hsdp_replicas 1"
        need: Change = {
            "parallel.distributed_optimizer": True,
            "parallel.overlap_grad_reduce": True,
            "parallel.hsdp_replicas": 1,
        }
        yield Finding("MT406", key, rule, (need, off))


@rule(
    Code(
        "MT408",
        "torch's grouped product does not take these experts.",
        help="Leave kernels.experts to auto, or make sizes and format such as the sentence says.",
        example="model=mixtral_tiny kernels.experts=torch",
    ),
    reads=(
        "kernels.experts precision.dtype model.hidden_size model.moe.ffn_hidden_size parallel.etp"
        " parallel.tp"
    ),
)
def grouped_product_shapes(run: RunConfig) -> Iterator[Finding]:
    """torch's grouped GEMM takes bf16, and rows of a multiple of 16 bytes."""
    why = torch_experts_obstacle(run) if run.kernels.experts == "torch" else None
    if why is not None:
        fixes: tuple[Change, ...] = ({"kernels.experts": "auto"}, {"kernels.experts": "reference"})
        yield Finding("MT408", "kernels.experts", why, fixes)


RULES = (
    loss_scale_range,
    *map(kernel_runs_on_the_device, KEYS),
    attention_cap,
    fp32_accumulation,
    grouped_product_shapes,
)
