"""Precision and kernels: formats and implementations that the device has."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.kernels import torch_experts_obstacle
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.run import RunConfig


def fp16_needs_a_gpu(run: RunConfig) -> Iterator[Finding]:
    """On a CPU, fp16 gradients of several ranks cannot be reduced in range."""
    if run.precision.dtype == "fp16" and run.cluster.device == "cpu":
        fixes: tuple[Change, ...] = ({"precision.dtype": "bf16"}, {"precision.dtype": "fp32"})
        yield Finding("MT401", "precision.dtype", "fp16 does not train on a CPU; bf16 and fp32 do", fixes)


def loss_scale_range(run: RunConfig) -> Iterator[Finding]:
    """The dynamic loss scale starts at or above its floor."""
    p = run.precision
    if p.dtype == "fp16" and p.min_loss_scale > p.initial_loss_scale:
        rule = f"the smallest loss scale {p.min_loss_scale:g} is above the first one {p.initial_loss_scale:g}"
        fixes: tuple[Change, ...] = ({"precision.min_loss_scale": min(1.0, p.initial_loss_scale)},)
        yield Finding("MT402", "precision.min_loss_scale", rule, fixes)


def kernels_run_on_the_device(run: RunConfig) -> Iterator[Finding]:
    """A named implementation that cannot run is an error; only `auto` may choose."""
    device, everywhere = run.cluster.device, run.kernels.default == "te"
    for key, choice in run.kernels:
        if choice == "te" and device != "cuda" and (key == "default" or not everywhere):
            fixes: tuple[Change, ...] = ({f"kernels.{key}": "auto"}, {f"kernels.{key}": "reference"})
            yield Finding(
                "MT403", f"kernels.{key}", f"TransformerEngine runs on cuda, and the device is {device}", fixes
            )


def grouped_products_fit(run: RunConfig) -> Iterator[Finding]:
    """torch's grouped product takes bf16, and rows of a multiple of 16 bytes."""
    why = torch_experts_obstacle(run) if run.kernels.experts == "torch" else None
    if why is not None:
        fixes: tuple[Change, ...] = ({"kernels.experts": "auto"}, {"kernels.experts": "reference"})
        yield Finding("MT442", "kernels.experts", why, fixes)


RULES = (fp16_needs_a_gpu, loss_scale_range, kernels_run_on_the_device, grouped_products_fit)
