"""This rank's model chunks, wrapped for training."""

from __future__ import annotations

from typing import Any

from mtrain.build import weights
from mtrain.build.transformer import transformer_config
from mtrain.config.core_fields import DDP_FIELDS, GPT_FIELDS, values
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
    ps = mcore.parallel_state
    provider = backend.provider(run.kernels)
    return mcore.GPTModel(
        config=config,
        transformer_layer_spec=backend.layer_spec(config, provider, vp_stage=stage),
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        mtp_block_spec=backend.mtp_spec(config, provider, vp_stage=stage),
        vp_stage=stage,
        **values(GPT_FIELDS, run),
    )


def _wrap(run: RunConfig, config: Any, chunk: Any, *, first: bool) -> Any:
    ddp = mcore.DistributedDataParallelConfig(**values(DDP_FIELDS, run))
    # Only the first chunk may wait for its buckets one by one; see DistributedDataParallel's own use in training.
    return mcore.DistributedDataParallel(
        config, ddp, chunk, disable_bucketing=not first and not run.parallel.overlap_grad_reduce
    )
