"""The software behind published throughput: for each, the parts that it overlaps, fuses and
launches, as its pages, recipes and sources state them. Rates are fitted by plan_time.py, and shared
by everything of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["cudnn", "flash2", "triton"]


@dataclass(frozen=True)
class Software:
    """A software and its releases."""

    family: str
    """Its releases share one remaining factor on the speed of the device."""
    attention: Attention
    """Kernels of attention: cuDNN's or FlashAttention 3, which use what Hopper and later have;
    FlashAttention 2, made for Ampere; or a Triton kernel of the time of FlashAttention 1.
    """
    fused_routing: bool = True
    """The router, and the permutation of tokens, are one kernel each."""
    gradient_bytes: int | None = None
    """Bytes of an element of a gradient that data-parallel ranks send; None: as in the row."""
    flushed_batch: int | None = None
    """Samples of a data-parallel rank after which the pipeline is empty; None: those of a step."""
    gathers_once: bool = False
    """True if weights sharded by FSDP stay whole for a step, in pipelines."""
    source: str = ""
    """Source of these facts."""


BRIDGE = "scripts/performance of Megatron-Bridge per release, in data/bridge_recipes.csv"
KNOWN = {
    "bridge 25": Software("bridge", "cudnn", fused_routing=False, source=BRIDGE),
    "bridge 26": Software("bridge", "cudnn", source=BRIDGE),
    "nemo 24": Software(
        "nemo 24",
        "flash2",
        source="NeMo 24.07's container: TransformerEngine 1.8 with FlashAttention 2",
    ),
    "core 0.8": Software(
        "core 0.8",
        "flash2",
        gradient_bytes=2,
        source="README of Megatron-LM: tensor, data and pipeline communication overlap;"
        " gradients sent in bf16 are assumed",
    ),
    "torchtitan 24": Software(
        "torchtitan",
        "flash2",
        gathers_once=True,
        source="torchtitan's FSDP2 keeps weights whole in pipelines (fsdp_reshard_after_forward)",
    ),
    "torchtitan 25": Software("torchtitan", "flash2", gathers_once=True, source="as 24"),
    "automodel": Software(
        "automodel",
        "cudnn",
        flushed_batch=8,
        source="its performance summary: LBS 8 of every row with a pipeline, GA schedules a step",
    ),
    "llm-foundry": Software(
        "llm-foundry",
        "triton",
        source="its mpt-*.yaml and submit_benchmarks.py at 5e85bd6, when the table was measured:"
        " attn_impl triton",
    ),
}


def described(software: str) -> Software:
    """Return the description of a software and release, such as `bridge 26.04`."""
    return KNOWN.get(software) or KNOWN[software.partition(".")[0]]
