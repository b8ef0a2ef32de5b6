"""RunConfig -> megatron-core's TransformerConfig, by the tables of `config.core_fields`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from mtrain.assembly.weights import Normal
from mtrain.config.engine.core_fields import transformer_values
from mtrain.config.engine.kernels import routes_by_lists
from mtrain.config.schema.run import RunConfig
from mtrain.devices.base import Device
from mtrain.devices.dtypes import torch_dtype
from mtrain.mcore import api as mcore


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0)^2, elementwise (So et al. 2021, Primer)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": mcore.gelu_tanh,
    "quick_geglu": mcore.quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": mcore.gelu_tanh,
    "relu": F.relu,
    "squared_relu": squared_relu,
}

MADE: dict[str, Callable[[Any], Any]] = {
    "activation_func": ACTIVATIONS.__getitem__,
    "init_method": Normal,
    "embedding_init_method": Normal,
    "output_layer_init_method": Normal,
    "params_dtype": torch_dtype,
    "pipeline_dtype": torch_dtype,
}
"""Fields that the tables name by a word or a number, and what makes the object of it."""

# Fusions that are CUDA kernels, or that torch.compile would have to make first: off unless a table
# says otherwise.
FUSIONS = (
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "moe_permute_fusion",
    "cross_entropy_loss_fusion",
)


def transformer_config(run: RunConfig, device: Device) -> Any:
    """Return the TransformerConfig (MLATransformerConfig for MLA) of a resolved configuration."""
    values = dict.fromkeys(FUSIONS, False) | transformer_values(run)
    values |= {name: made(values[name]) for name, made in MADE.items()}
    values |= {"use_cpu_initialization": False, "perform_initialization": True}
    kind = mcore.TransformerConfig if run.model.mla is None else mcore.MLATransformerConfig
    config = kind(**values)
    # megatron-core then asks a layer for the activation, and wrongly believes that it can only be
    # TransformerEngine's
    config.use_te_activation_func = run.kernels.activation == "triton"
    config.parallel_residual = run.model.parallel_residual
    config.sparse_experts = None
    if run.model.moe is not None and routes_by_lists(run):
        moe = run.model.moe
        words = (str(run.kernels.moe_router), str(run.kernels.moe_permute))
        config.sparse_experts = mcore.Sparse(
            *words,
            moe.group_score_topk,
            padded=moe.padded,
            capacity_factor=moe.alltoall_capacity_factor,
            one_graph=run.trainer.cuda_graph_impl == "full_iteration",
        )
    if run.peft.kind is not None:  # the biases that balance routers are frozen with them
        config.moe_router_bias_update_rate = 0.0
    config.latent_layernorm_epsilon = run.model.mla.layernorm_epsilon if run.model.mla else None
    return config
