"""Precision and kernels: formats and implementations that the device has."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.devices import facts_of, with_cuda_kernels
from mtrain.config.kernels import KEYS, torch_experts_obstacle
from mtrain.config.rules.finding import Change, Finding, rule_for_each
from mtrain.config.run import RunConfig


def loss_scale_range(run: RunConfig) -> Iterator[Finding]:
    """The dynamic loss scale starts at or above its floor."""
    p = run.precision
    if p.dtype == "fp16" and p.min_loss_scale > p.initial_loss_scale:
        rule = f"the smallest loss scale {p.min_loss_scale:g} is above the first one {p.initial_loss_scale:g}"
        fixes: tuple[Change, ...] = ({"precision.min_loss_scale": min(1.0, p.initial_loss_scale)},)
        yield Finding("MT402", "precision.min_loss_scale", rule, fixes)


def kernel_runs_on_the_device(key: str, run: RunConfig) -> Iterator[Finding]:
    """A named implementation that cannot run is an error; only `auto` may choose."""
    device, named = facts_of(run.cluster.device), getattr(run.kernels, key)
    if named != "te" or device.cuda_kernels or (key != "default" and run.kernels.default == "te"):
        return
    fixes: tuple[Change, ...] = ({f"kernels.{key}": "auto"}, {f"kernels.{key}": "reference"})
    rule = f"TransformerEngine runs on {with_cuda_kernels()}, and the device is {device.name}"
    yield Finding("MT403", f"kernels.{key}", rule, fixes, lacks="device")


def accumulation_in_fp32(run: RunConfig) -> Iterator[Finding]:
    """Sums in fp32 of gradients that travel in less: for the distributed optimizer, one bucket at a time."""
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


def grouped_products_fit(run: RunConfig) -> Iterator[Finding]:
    """torch's grouped product takes bf16, and rows of a multiple of 16 bytes."""
    why = torch_experts_obstacle(run) if run.kernels.experts == "torch" else None
    if why is not None:
        fixes: tuple[Change, ...] = ({"kernels.experts": "auto"}, {"kernels.experts": "reference"})
        yield Finding("MT408", "kernels.experts", why, fixes)


RULES = (
    loss_scale_range,
    *rule_for_each(kernel_runs_on_the_device, KEYS),
    accumulation_in_fp32,
    grouped_products_fit,
)
