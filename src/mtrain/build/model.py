"""This rank's model chunks, wrapped for training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from mtrain.build import weights
from mtrain.build.transformer import transformer_config
from mtrain.config.run import RunConfig
from mtrain.mcore import api as mcore
from mtrain.mcore import backend
from mtrain.mcore.boxes import boxes_of
from mtrain.mcore.fsdp2 import FullySharded
from mtrain.mcore.kept import unwrap
from mtrain.mcore.megatron_fsdp import FullyShardedBuffers, communication_elements
from mtrain.world.init import World


def build_model(run: RunConfig, world: World, *, wrap: bool = True) -> list[Any]:
    """This rank's chunks of the model: one per virtual pipeline stage, with weights from `trainer.seed`.

    With `wrap`, each is inside megatron-core's DistributedDataParallel or what `parallel.fsdp` names; without, it can
    only run forward. Weights that FSDP spreads have no memory before that: a rank never holds all of them.
    """
    config = transformer_config(run, world.device)
    with weights.deferred() if wrap and _may_defer(run) else nullcontext():
        chunks = _chunks(run, config)
    for chunk in chunks:
        chunk._apply(lambda t: t if t.is_meta else t.to(world.torch_device))
        boxes_of(chunk)  # while it can still say where its parameters lie in the whole model
    if run.precision.dtype != "fp32":
        chunks = [_half(config, chunk) for chunk in chunks]
    if wrap and run.parallel.fsdp != "none":
        chunks = [_fully_shard(run, config, chunk, world.torch_device) for chunk in chunks]
    weights.initialize(chunks, run.trainer.seed)
    if wrap and run.parallel.fsdp == "none":
        chunks = [_wrap(run, config, chunk, first=i == 0) for i, chunk in enumerate(chunks)]
    return chunks


def _half(config: Any, chunk: Any) -> Any:
    """The chunk in half precision, but for the routers' balancing biases, which a checkpoint holds in full."""
    wrapped = mcore.Float16Module(config, chunk)
    for router in (module for module in wrapped.modules() if isinstance(module, mcore.TopKRouter)):
        router._maintain_float32_expert_bias()
    return wrapped


def _may_defer(run: RunConfig) -> bool:
    """Whether weights may stay without memory until they are cut; pipeline stages add tied embeddings up before."""
    tied_stages = run.parallel.pp > 1 and run.model.tie_word_embeddings
    return run.parallel.fsdp != "none" and not tied_stages


def blank_model(run: RunConfig, world: World) -> list[Any]:
    """This rank's chunks in a `pretended` world: every layer and shape, no memory; portable layers."""
    words = {key: "reference" for key, value in run.kernels if isinstance(value, str)}
    off = {"gradient_accumulation_fusion": False}
    run = run.model_copy(update={"kernels": run.kernels.model_copy(update={**words, **off})})
    return _chunks(run, transformer_config(run, world.device))


def _chunks(run: RunConfig, config: Any) -> list[Any]:
    stages = range(run.parallel.vpp) if run.parallel.vpp > 1 else [None]
    return [_chunk(run, config, stage) for stage in stages]


def _chunk(run: RunConfig, config: Any, stage: int | None) -> Any:
    ps, model = mcore.parallel_state, run.model
    provider = backend.provider(run.kernels)
    scaling = model.rope_scaling_factor
    return mcore.GPTModel(
        config=config,
        transformer_layer_spec=backend.layer_spec(config, provider, vp_stage=stage),
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling or 8.0,
        mtp_block_spec=backend.mtp_spec(config, provider, vp_stage=stage),
        vp_stage=stage,
    )


def _wrap(run: RunConfig, config: Any, chunk: Any, *, first: bool) -> Any:
    p = run.parallel
    ddp = mcore.DistributedDataParallelConfig(
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        use_distributed_optimizer=p.distributed_optimizer,
        **_common(run),
    )
    # Only the first chunk may wait for its buckets one by one; see DistributedDataParallel's own use in training.
    return mcore.DistributedDataParallel(
        config, ddp, chunk, disable_bucketing=not first and not p.overlap_grad_reduce
    )


def _fully_shard(run: RunConfig, config: Any, chunk: Any, device: torch.device) -> Any:
    p = run.parallel
    if p.fsdp == "fsdp2":
        return FullySharded(config, mcore.TorchFullyShardedDataParallelConfig(**_common(run)), chunk, device)
    ddp = mcore.DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=p.fsdp_sharding,
        # fp32 weights need no second copy as main weights
        preserve_fp32_weights=run.precision.dtype != "fp32",
        # a division fused into the sum is NCCL's alone
        gradient_reduce_div_fusion=False,
        suggested_communication_unit_size=communication_elements(unwrap(chunk)),
        **_common(run),
    )
    return FullyShardedBuffers(config, ddp, chunk, device)


def _common(run: RunConfig) -> dict[str, Any]:
    return {
        "grad_reduce_in_fp32": run.precision.grad_reduce_in_fp32,
        "num_distributed_optimizer_instances": run.parallel.hsdp_replicas,
        # A NaN is found by the trainer, which can say which step; this check would only kill one rank.
        "check_for_nan_in_grad": False,
    }
