"""This rank's model chunks, wrapped for training."""

from __future__ import annotations

from typing import Any

from mtrain.build import weights
from mtrain.build.transformer import transformer_config
from mtrain.config.run import RunConfig
from mtrain.mcore import api as mcore
from mtrain.mcore import backend
from mtrain.world.init import World


def build_model(run: RunConfig, world: World, *, wrap: bool = True) -> list[Any]:
    """This rank's chunks of the model: one per virtual pipeline stage, with weights from `trainer.seed`.

    With `wrap`, each is inside megatron-core's DistributedDataParallel; without, it can only run forward.
    """
    config = transformer_config(run, world.device)
    chunks = _chunks(run, config)
    for chunk in chunks:
        chunk.to(world.torch_device)
    weights.initialize(chunks, run.trainer.seed)
    if run.precision.dtype != "fp32":
        chunks = [mcore.Float16Module(config, chunk) for chunk in chunks]
    return [_wrap(run, config, chunk, first=i == 0) for i, chunk in enumerate(chunks)] if wrap else chunks


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
        grad_reduce_in_fp32=run.precision.grad_reduce_in_fp32,
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        use_distributed_optimizer=p.distributed_optimizer,
        # A NaN is found by the trainer, which can say which step; this check would only kill one rank.
        check_for_nan_in_grad=False,
    )
    # Only the first chunk may wait for its buckets one by one; see DistributedDataParallel's own use in training.
    return mcore.DistributedDataParallel(
        config, ddp, chunk, disable_bucketing=not first and not p.overlap_grad_reduce
    )
