"""Defects of megatron-core that configuration cannot avoid, each patched once when the adapter is
installed.

Each has a test in `tests/distributed/test_adapter_patches.py` that fails without it, on every
release that it is for. At an upgrade of megatron-core every entry is to be looked up again: the
reason says what to look for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from mtrain.config.engine import release as engine
from mtrain.config.engine.release import Release
from mtrain.devices.base import Device
from mtrain.mcore.patches import (
    attention,
    experts,
    fsdp,
    linear_attention,
    optimizer,
    prediction,
    recompute,
    tensor_parallel,
)
from mtrain.mcore.patches.patch import Patch, Where


def apply_patches(device: Device, without: frozenset[str] = frozenset()) -> None:
    """Apply every patch that this device and installation need, but those in `without`; `install`
    calls this once.

    Raises `ValueError` for an unknown name.
    """
    unknown = without - {patch.name for patch in PATCHES}
    if unknown:
        raise ValueError(f"no such patches: {', '.join(sorted(unknown))}")
    for patch, why_not in standing(device, engine.release()):
        if not why_not and patch.name not in without:
            patch.apply()


def standing(device: Device, release: Release | None) -> Iterator[tuple[Patch, str]]:
    """Yield each patch, and why this device and release need none of it; empty: they need it."""
    has_te = importlib.util.find_spec("transformer_engine") is not None
    spared: dict[Where, str] = {
        "everywhere": "",
        "without TransformerEngine": "TransformerEngine is installed" if has_te else "",
        "off CUDA": "" if device.adapts_megatron else f"the device is {device.name}",
    }
    for patch in PATCHES:
        absent = release is not None and release not in patch.versions
        yield patch, f"for {patch.versions} alone" if absent else spared[patch.applies]


PATCHES: tuple[Patch, ...] = (
    experts.router_gemm,
    attention.mla_flag,
    attention.mla_down_projection,
    attention.mla_query_projection,
    attention.mla_query_norm,
    experts.moe_loss_tokens,
    # After `moe_loss_tokens`, whose wrapper multiplies the count that this one sets.
    experts.sequence_loss_batch,
    experts.routed_padding,
    experts.expert_gradients,
    experts.expert_norm,
    attention.gate_slices,
    prediction.mtp_tied_output,
    prediction.mtp_without_labels,
    prediction.mtp_names,
    tensor_parallel.reduce_result,
    tensor_parallel.uneven_splits,
    tensor_parallel.gathered_pieces,
    tensor_parallel.host_weights,
    optimizer.gradient_norm,
    optimizer.optimizer_state_before_first_step,
    optimizer.optimizer_state_loading,
    optimizer.optimizer_step_counters,
    optimizer.te_version,
    recompute.checkpoint_without_fp8,
    recompute.recomputed_bias,
    recompute.recomputed_padding,
    recompute.captured_inputs,
    recompute.short_groups,
    recompute.refilled_outputs,
    recompute.evaluated_offload,
    optimizer.offloaded_shards,
    optimizer.offloaded_main_weights,
    optimizer.offloaded_copies,
    fsdp.norm_groups,
    fsdp.fsdp_te_linear,
    fsdp.fsdp_optim_replicas,
    fsdp.fsdp_lone_rank,
    fsdp.fsdp_division,
    fsdp.fsdp_meshes,
    fsdp.fsdp_checks,
    fsdp.fsdp_tied_stages,
    fsdp.fsdp_unscaling,
    attention.torch_norm,
    linear_attention.gated_delta_without_fla,
    linear_attention.gated_delta_norm,
    tensor_parallel.rng_remark,
)
"""All patches, in the order in which they are applied."""
