"""This rank's model chunks, wrapped for training, and the TransformerConfig that they are built
from.

The tables of `config.core_fields` give the fields of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from mtrain.assembly import weights
from mtrain.assembly.weights import Normal
from mtrain.config.engine.core_fields import (
    DDP_FIELDS,
    FSDP_FIELDS,
    WRAP_FIELDS,
    transformer_values,
    values,
)
from mtrain.config.engine.kernels import OPERATIONS, loss_is_whole, routes_by_lists
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.devices.base import Device
from mtrain.devices.dtypes import torch_dtype, with_dtypes
from mtrain.errors import ConfigError, Problem
from mtrain.mcore import api as mcore
from mtrain.mcore.layers import low_rank
from mtrain.mcore.models.language_model import AuxiliaryOutputs, SummedLosses
from mtrain.mcore.state.fsdp import (
    FullySharded,
    FullyShardedBuffers,
    communication_elements,
)
from mtrain.mcore.state.shard_specs import shard_specs_of
from mtrain.models.base import BuildChunk
from mtrain.models.registry import family_of, imported
from mtrain.plan.count import adapter_parameters
from mtrain.plan.rank import logits_at_once
from mtrain.world.init import World


def build_model(
    run: RunConfig, world: World, *, wrap: bool = True, drawn: bool = True
) -> list[Any]:
    """Return this rank's chunks of the model: one per virtual pipeline stage, with weights from
    `trainer.seed`.

    With `wrap`, each is inside megatron-core's DistributedDataParallel or what `parallel.fsdp`
    names; without, it can only run forward. Weights that FSDP shards have no memory before that: a
    rank never holds all of them. Unless `drawn`, weights have no values.
    """
    config = transformer_config(run, world.device)
    with weights.deferred() if wrap and _may_defer(run) else nullcontext():
        chunks = _chunks(run, config)
    for chunk in chunks:
        chunk._apply(lambda t: t if t.is_meta else t.to(world.torch_device))
        shard_specs_of(chunk)  # while it can still say where its parameters lie in the whole model
    if run.precision.dtype != "fp32":
        chunks = [_half(config, chunk) for chunk in chunks]
    if wrap and run.parallel.fsdp != "none":
        # the optimizer wants one for all
        size = max(communication_elements(chunk) for chunk in chunks)
        chunks = [_fully_shard(run, config, chunk, world.torch_device, size) for chunk in chunks]
    if drawn:
        weights.initialize(chunks, run.trainer.seed)
        low_rank.start_magnitudes(chunks)
    if wrap and run.parallel.fsdp == "none":
        with _stream_of_gradients(run, world.device):
            chunks = [_wrap(run, config, chunk, first=i == 0) for i, chunk in enumerate(chunks)]
    return chunks


def build_reference(run: RunConfig, world: World) -> list[Any]:
    """Return a frozen copy of this rank's chunks, without gradient buffers or weight values."""
    chunks = build_model(run, world, wrap=False, drawn=False)
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    return chunks


@contextmanager
def _stream_of_gradients(run: RunConfig, device: Device) -> Iterator[None]:
    """Use a separate stream if whole steps are captured: autograd adds gradients up on the stream
    on which DistributedDataParallel was made, and a capture excludes the default stream.
    """
    if run.trainer.cuda_graph_impl != "full_iteration":
        yield
        return
    streams = device.namespace
    stream = streams.Stream()
    stream.wait_stream(streams.current_stream())
    with streams.stream(stream):
        yield
    streams.current_stream().wait_stream(stream)


def _half(config: Any, chunk: Any) -> Any:
    """Return the chunk in half precision, except the routers' balancing biases, kept in full."""
    wrapped = mcore.Float16Module(config, chunk)
    for router in (module for module in wrapped.modules() if isinstance(module, mcore.TopKRouter)):
        router._maintain_float32_expert_bias()
    return wrapped


def _may_defer(run: RunConfig) -> bool:
    """Return whether weights may stay without memory until FSDP shards them; stages add tied
    embeddings up before.
    """
    tied_stages = run.parallel.pp > 1 and run.model.ties_output
    return run.parallel.fsdp != "none" and not tied_stages


def blank_model(run: RunConfig, world: World) -> list[Any]:
    """Return this rank's chunks in a `fake_world`: all layers and shapes, portable, no memory."""
    words = {op.name: "reference" for op in OPERATIONS} | {"default": "reference"}
    off = {"gradient_accumulation_fusion": False, "cpu_matmul": None}
    kernels = run.kernels.model_copy(update={**words, **off})
    run = run.on_any_device()
    run = run.model_copy(
        update={"kernels": kernels, "precision": run.precision.unquantized(run.precision.format)}
    )
    return _chunks(run, transformer_config(run, world.device))


def _chunks(run: RunConfig, config: Any) -> list[Any]:
    stages = range(run.parallel.vpp) if run.parallel.vpp > 1 else [None]
    build: BuildChunk = imported(family_of(run.model).builder)
    chunks = [build(run, config, stage) for stage in stages]
    for chunk in chunks:
        if isinstance(chunk, SummedLosses):
            chunk.auxiliary = auxiliary_outputs_of(run)
            chunk.is_whole_loss = loss_is_whole(run)
            chunk.per_token = run.objective.answers
            chunk.temperature = run.rollout.temperature if run.objective.judges else 1.0
    if run.peft.kind and not any(adapter_parameters(run)):
        rule = f"models of the family {run.model.family} have no adapters that are known here"
        raise ConfigError([Problem("MT521", "peft.kind", run.peft.kind, rule, "peft=none")])
    for chunk in chunks if run.peft.kind else ():
        low_rank.adapt(chunk, adapter_of(run.peft), run.peft.target or ())
    return chunks


def auxiliary_outputs_of(run: RunConfig) -> AuxiliaryOutputs:
    """Return the outputs that a resolved run requests of its loss next to cross entropy."""
    z_loss = run.trainer.z_loss_coeff or 0.0
    return AuxiliaryOutputs(z_loss, run.log.token_accuracy, logits_at_once(run))


def adapter_of(peft: PeftConfig) -> low_rank.Adapter:
    """Return the adapters that a resolved `peft` section describes."""
    assert peft.r is not None
    return low_rank.Adapter(peft.r, peft.scale, peft.dropout, has_magnitude=peft.kind == "dora")


def _wrap(run: RunConfig, config: Any, chunk: Any, *, first: bool) -> Any:
    ddp = mcore.DistributedDataParallelConfig(**values(DDP_FIELDS, run))
    # Only the first chunk may wait for its buckets one by one; see DistributedDataParallel's own
    # use in training.
    return mcore.DistributedDataParallel(
        config, ddp, chunk, disable_bucketing=not first and not run.parallel.overlap_grad_reduce
    )


def _fully_shard(run: RunConfig, config: Any, chunk: Any, device: torch.device, size: int) -> Any:
    if run.parallel.fsdp == "fsdp2":
        wrap = mcore.TorchFullyShardedDataParallelConfig(**values(WRAP_FIELDS, run))
        return FullySharded(config, wrap, chunk, device)
    fields = with_dtypes(values(FSDP_FIELDS, run))
    ddp = mcore.DistributedDataParallelConfig(**fields, suggested_communication_unit_size=size)
    return FullyShardedBuffers(config, ddp, chunk, device)


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
"""Fields whose value is an object that the tables name by a word or a number -> its factory."""

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
