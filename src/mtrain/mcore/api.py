# ruff: noqa: E402, F401
"""Every megatron-core name that mtrain uses, in one flat module; needs an installed adapter."""

from __future__ import annotations

from typing import Any

from mtrain.config.engine import release
from mtrain.mcore.adapter.installed import require_installed

require_installed()  # nothing of megatron may be imported before this line

# Process groups, random state, tensor parallelism
from megatron.core import parallel_state, tensor_parallel

# Checkpoints: where a local tensor lies in the whole one
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
)

# Data parallelism
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import (
    FullyShardedDataParallel as MegatronFSDP,
)

# Models and layers
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec_for_backend,
    get_mlp_module_spec_for_backend,
)

# Steps and optimizers
from megatron.core.optimizer import (
    DistributedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    OptimizerConfig,
    ParamKey,
    ParamWithNamePredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_batch_on_this_cp_rank as _part_of_context

# Generation of text
from mtrain.mcore.layers.cache import Cache, decoding_obstacle, places_obstacle, whole_sequences
from mtrain.mcore.layers.cache import obstacle as cache_obstacle
from mtrain.mcore.layers.portable import gelu_tanh

# How experts are routed to
from mtrain.mcore.layers.router import Sparse

# Which class those optimizers are built of
from mtrain.mcore.state.optimizers import OwnOptimizerConfig, use_own, use_te, use_torch


def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: Any = None) -> Any:
    """Return this rank's part of unpacked sequences, over context-parallel ranks or `cp_group`."""
    new = {"is_hybrid_cp": False} if release.at_least(0, 19) else {}
    # Without a group, releases fall back to different ranks, so one is always passed.
    return _part_of_context(
        batch, cp_group=cp_group or parallel_state.get_context_parallel_group(), **new
    )
