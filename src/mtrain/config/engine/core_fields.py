"""The fields of megatron-core that each key feeds, and the tables that fill its configurations.

Most keys feed a field with their value unchanged, and state it in the schema (`feeds` of their
`Key`). This module has the computed fields. Values are plain: it names dtypes, activations and
initialisers, and `assembly` makes them. So `explain` and `plan` need no torch to read the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from mtrain.config.engine.release import is_there
from mtrain.config.messages.keys import key_of, schema_keys, when_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.stages import stages, uneven
from mtrain.config.resolve.watch import watched
from mtrain.config.schedules import SCHEDULES
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.run import RunConfig
from mtrain.config.schema.schedule import end_of_decay

Get = Callable[[RunConfig], Any]
Table = Mapping[str, Get]
# A marker of no value: megatron-core's default stays.
LEFT_OUT = object()
# Sections whose keys feed fields that only exist with them.
_OWNERS = {
    "model.moe.": "moe.",
    "model.mla.": "mla.",
    "model.dsa.": "dsa.",
    "model.linear_attention.": "linear.",
    "model.hybrid.": "hybrid.",
    **{f"optim.{name}.": f"{name}." for name in OPTIMIZERS},
}


def _fed(owner: str = "") -> dict[str, Get]:
    """Return the fields of an owner that get a key's value unchanged."""
    out = {}
    for path in schema_keys():
        # A feed without a prefix belongs to the section of its key: `model.moe` fills fields that
        # exist only with experts.
        section = next((words for prefix, words in _OWNERS.items() if path.startswith(prefix)), "")
        for feed in key_of(path).feeds.split():
            prefix, _, name = feed.rpartition(".")
            if (f"{prefix}." if prefix else section) == owner:
                out[name] = _reader(path)
    return out


def _reader(path: str) -> Get:
    """Return a reader of a key: a tuple as a list, and nothing for null without effect."""
    read = attrgetter(path)
    null = LEFT_OUT if when_of(path) else None

    def get(run: RunConfig) -> Any:
        value = read(run)
        if value is None:
            return null
        return list(value) if isinstance(value, tuple) else value

    return get


def _unless_none(word: str | None) -> str | None:
    return None if word == "none" else word


def frees_sent(run: RunConfig) -> bool:
    """Return whether a stage frees what it has sent: only its shape is still needed.

    Not if sends overlap, because they may still be reading it (Megatron-LM #4047), and not with
    megatron-core's FSDP, whose outputs are views.
    """
    return run.parallel.pp > 1 and run.parallel.vpp == 1 and run.parallel.fsdp != "megatron"


def _fuses_activation(run: RunConfig) -> bool:
    """Return whether megatron-core fuses the activation: plain swiglu, dense biased gelu_tanh."""
    m = run.model
    plain = m.glu_linear_offset == 0 and m.activation_func_clamp_value is None
    fused = m.activation == "swiglu" or (
        m.activation == "gelu_tanh" and m.add_bias_linear and m.moe is None
    )
    return run.kernels.linear == "te" and plain and fused and run.kernels.activation != "triton"


def _activation(run: RunConfig) -> str:
    """Return the function's name; for its fused tanh gelu, megatron-core expects `gelu`."""
    fused_gelu = run.model.activation == "gelu_tanh" and _fuses_activation(run)
    return "gelu" if fused_gelu else run.model.activation


def _output_init_std(run: RunConfig) -> float:
    """Return the initial deviation of residual outputs, smaller with depth unless normed."""
    m = run.model
    each = 1 if m.family == "hybrid" else 2  # a hybrid's layer is a mixer or an MLP
    return _init_std(run) / (
        1.0 if m.norm_placement == "post_residual" else math.sqrt(each * m.num_layers)
    )


def _init_std(run: RunConfig) -> float:
    """Return the initial deviation of hidden matrices; with muP it falls with width."""
    return run.model.init_method_std / math.sqrt(run.model.width_mult)


def _one_graph(run: RunConfig) -> bool:
    return run.trainer.cuda_graph_impl == "full_iteration"


def main_grads_format(run: RunConfig) -> str | None:
    """Return the format of the gradients that the optimizer reads."""
    if run.precision.grad_reduce_in_fp32 or not run.optim.holds_main_weights:
        return "fp32"
    return run.precision.format


def _graphs(run: RunConfig) -> str:
    """Return the scopes of CUDA graphs; up to 0.16 a whole step is one of them."""
    return (
        "local" if _one_graph(run) and is_there("cuda_graph_scope") else run.trainer.cuda_graph_impl
    )


def _graph_modules(run: RunConfig) -> list[str]:
    return list(run.trainer.cuda_graph_modules or ())


def _some_layers_in_bf16(run: RunConfig) -> bool:
    return run.precision.num_layers_at_start_in_bf16 + run.precision.num_layers_at_end_in_bf16 > 0


# Fields of every TransformerConfig.
FIELDS: dict[str, Get] = {
    **_fed(),
    "num_query_groups": lambda r: r.model.query_groups,
    "kv_channels": lambda r: r.model.head_dim,
    "gated_linear_unit": lambda r: r.model.gated,
    "activation_func": _activation,
    "init_method": _init_std,
    "softmax_scale": lambda r: r.model.attention_scale if r.model.mla is None else LEFT_OUT,
    "embedding_init_method_std": lambda r: (
        r.model.embedding_init_method_std or r.model.init_method_std
    ),
    "embedding_init_method": lambda r: r.model.embedding_init_method_std or r.model.init_method_std,
    "output_layer_init_method": _output_init_std,
    "virtual_pipeline_model_parallel_size": lambda r: (
        r.parallel.vpp if r.parallel.vpp > 1 else None
    ),
    "expert_tensor_parallel_size": lambda r: r.parallel.etp or r.parallel.tp,
    "pipeline_model_parallel_layout": lambda r: (
        [s.words() for s in stages(r)] if uneven(r) else None
    ),
    "recompute_granularity": lambda r: _unless_none(r.parallel.recompute.granularity),
    # A window of n keys, the token's own included, reaches n - 1 to the left.
    "window_size": lambda r: (r.model.window_size - 1, 0) if r.model.window_size else None,
    "bf16": lambda r: r.precision.format == "bf16",
    "fp16": lambda r: r.precision.format == "fp16",
    # megatron-core passes these only to TransformerEngine; our layers get them separately.
    "fp8": lambda r: None if r.kernels.linear in ("triton", "reference") else r.precision.fp8,
    "first_last_layers_bf16": _some_layers_in_bf16,
    # Interleaving between two stages is silently wrong with batched p2p: both neighbours are the
    # same rank.
    "overlap_p2p_comm": lambda r: r.parallel.vpp > 1,
    "batch_p2p_comm": lambda r: r.parallel.vpp == 1,
    # The host waits for the device after each exchange, which a CUDA graph of the step cannot hold.
    "batch_p2p_sync": lambda r: not _one_graph(r),
    "deallocate_pipeline_outputs": frees_sent,
    # The loss is a mean over the tokens of the global batch, so that no layout weighs a sample
    # differently.
    "calculate_per_token_loss": lambda r: True,
    "fine_grained_activation_offloading": lambda r: bool(r.parallel.activation_offload.modules),
    "offload_modules": lambda r: list(r.parallel.activation_offload.modules or ()),
    "cuda_graph_impl": _graphs,
    "cuda_graph_scope": lambda r: ["full_iteration"] if _one_graph(r) else _graph_modules(r),
    "cuda_graph_modules": _graph_modules,
    "transformer_impl": lambda r: "transformer_engine" if r.kernels.linear == "te" else "local",
    # Fusions of megatron-core need TransformerEngine; without it every one is off.
    # Its grouped experts refuse this one where layers have biases.
    "bias_dropout_fusion": lambda r: (
        r.kernels.linear == "te" and not (r.model.add_bias_linear and r.model.moe is not None)
    ),
    "bias_activation_fusion": _fuses_activation,
}


def _moe(run: RunConfig) -> MoEConfig:
    assert run.model.moe is not None
    return run.model.moe


def _layers_with_experts(run: RunConfig) -> list[int]:
    if run.model.family == "hybrid":
        assert run.model.hybrid is not None
        return [int(kind == "E") for kind in run.model.hybrid.pattern]
    return [int(i >= _moe(run).first_dense_layers) for i in range(run.model.num_layers)]


# Fields for models with experts.
MOE_FIELDS: dict[str, Get] = {
    **_fed("moe."),
    "moe_layer_freq": _layers_with_experts,
    "moe_aux_loss_coeff": lambda r: (
        0.0 if _moe(r).router_load_balancing_type == "none" else _moe(r).aux_loss_coeff
    ),
    "moe_router_dtype": lambda r: "fp32",
    "moe_grouped_gemm": lambda r: True,
}

# Fields for MLA, whose class is MLATransformerConfig.
MLA_FIELDS: dict[str, Get] = {
    **_fed("mla."),
    "multi_latent_attention": lambda r: True,
}


def _linear_layers(run: RunConfig) -> int | list[int]:
    m = run.model
    assert m.linear_attention is not None
    if m.hybrid is None:
        return m.linear_attention.freq
    return [int(m.is_linear(i)) for i in range(m.num_layers)]


# Fields for models with gated delta nets.
LINEAR_FIELDS: dict[str, Get] = {
    **_fed("linear."),
    "linear_attention_freq": _linear_layers,
    "experimental_attention_variant": lambda r: "gated_delta_net",
}

# Fields for sparse attention.
DSA_FIELDS: dict[str, Get] = {
    **_fed("dsa."),
    "experimental_attention_variant": lambda r: "dsa",
}

# Fields of the family hybrid.
HYBRID_FIELDS: dict[str, Get] = {
    **_fed("hybrid."),
    "is_hybrid_model": lambda r: True,
}

# Arguments of GPTModel.
GPT_FIELDS: dict[str, Get] = {
    **_fed("gpt."),
    "vocab_size": lambda r: r.model.padded_vocab_size,
    "rope_scaling_factor": lambda r: r.model.rope_scaling_factor or 8.0,
    "rope_scaling": lambda r: r.model.rope_scaling_factor is not None,
}

# Fields of every data-parallel wrapper; the only ones of TorchFullyShardedDataParallelConfig.
WRAP_FIELDS: dict[str, Get] = {
    **_fed("wrap."),
    # A NaN is found by the trainer, which can say which step; this check would only kill one rank.
    "check_for_nan_in_grad": lambda r: False,
}

# Fields of DistributedDataParallelConfig.
DDP_FIELDS: dict[str, Get] = {
    **WRAP_FIELDS,
    **_fed("ddp."),
}

# Fields of DistributedDataParallelConfig if megatron-core's FSDP shards the weights.
FSDP_FIELDS: dict[str, Get] = {
    **WRAP_FIELDS,
    **_fed("fsdp."),
    "use_megatron_fsdp": lambda r: r.parallel.fsdp == "megatron",
    "use_distributed_optimizer": lambda r: True,
    # fp32 weights need no second copy as main weights
    "preserve_fp32_weights": lambda r: r.precision.format != "fp32",
    "megatron_fsdp_main_params_dtype": lambda r: None if r.precision.format == "fp32" else "fp32",
    "megatron_fsdp_main_grads_dtype": lambda r: "fp32" if r.precision.grad_reduce_in_fp32 else None,
    # only NCCL fuses the division into the sum
    "gradient_reduce_div_fusion": lambda r: False,
}

# Fields of OptimizerConfig; dtypes are words.
OPTIMIZER_FIELDS: dict[str, Get] = {
    **_fed("optimizer."),
    "optimizer": lambda r: OPTIMIZERS[r.optim.name].core_name,
    "min_lr": lambda r: r.optim.min_lr,
    # Without clipping the norm is still wanted for the log: no norm exceeds infinity.
    "clip_grad": lambda r: r.optim.clip_grad if r.optim.clip_grad is not None else float("inf"),
    # megatron-core compares with a number: infinity skips nothing.
    "grad_norm_skip_threshold": lambda r: r.optim.skip_above_grad_norm or float("inf"),
    "bf16": lambda r: r.precision.format == "bf16",
    "fp16": lambda r: r.precision.format == "fp16",
    "use_distributed_optimizer": lambda r: (
        r.parallel.distributed_optimizer or r.parallel.fsdp == "megatron"
    ),
    "optimizer_cpu_offload": lambda r: r.optim.cpu_offload > 0,
    "use_precision_aware_optimizer": lambda r: r.optim.holds_main_weights,
    # An optimizer that holds the main weights reads gradients as they were reduced, any other an
    # fp32 copy of them.
    "main_grads_dtype": main_grads_format,
}

# Optimizer -> the fields of OptimizerConfig that its own keys feed.
OWN_FIELDS: dict[str, dict[str, Get]] = {
    name: _fed(f"{name}.") for name, spec in OPTIMIZERS.items() if spec.section is not None
}

# megatron-core's word for a curve that only mtrain computes: its scheduler checks the word, and
# `assembly.optim` replaces the rates.
OWN_CURVE = "constant"

# Fields of OptimizerParamScheduler, in steps.
SCHEDULE_FIELDS: dict[str, Get] = {
    **_fed("scheduler."),
    # The warmup starts at zero, as `optim.warmup_iters` documents.
    "init_lr": lambda r: 0.0,
    "min_lr": lambda r: r.optim.min_lr,
    "lr_warmup_steps": lambda r: r.optim.warmup_iters,
    "lr_decay_steps": end_of_decay,
    "lr_decay_style": lambda r: SCHEDULES[r.optim.schedule].megatron_name or OWN_CURVE,
    "wd_incr_steps": end_of_decay,
    "wd_incr_style": lambda r: "constant",
}


def values(table: Table, run: RunConfig) -> dict[str, Any]:
    """Return the values of a table for a run and the loaded release, without defaults."""
    return {
        name: value
        for name, get in table.items()
        if is_there(name) and (value := get(run)) is not LEFT_OUT
    }


def transformer_values(run: RunConfig) -> dict[str, Any]:
    """Return every field of a resolved run's TransformerConfig or MLATransformerConfig."""
    out = values(FIELDS, run)
    if run.model.moe is not None:
        out |= values(MOE_FIELDS, run)
    if run.model.hybrid is not None:
        out |= values(HYBRID_FIELDS, run)
    if run.model.mla is not None:
        out |= values(MLA_FIELDS, run)
        del out["num_query_groups"]
    if run.model.linear_attention is not None:
        out |= values(LINEAR_FIELDS, run)
    if run.model.dsa is not None:
        out |= values(DSA_FIELDS, run)
    return out


def feeds(run: RunConfig) -> dict[str, list[str]]:
    """Return key -> the fields of megatron-core that depend on it, as
    `TransformerConfig.hidden_size`.

    Fields of experts and of MLA only exist for models that have them.
    """
    out: dict[str, list[str]] = {}
    config = "TransformerConfig" if run.model.mla is None else "MLATransformerConfig"
    for owner, table in (
        (config, FIELDS),
        ("GPTModel", GPT_FIELDS),
        ("DistributedDataParallelConfig", DDP_FIELDS),
        ("DistributedDataParallelConfig", FSDP_FIELDS),
        ("OptimizerConfig", OPTIMIZER_FIELDS),
        *(("OptimizerConfig", table) for table in OWN_FIELDS.values()),
        ("OptimizerParamScheduler", SCHEDULE_FIELDS),
        (config, MOE_FIELDS if run.model.moe is not None else {}),
        (config, MLA_FIELDS if run.model.mla is not None else {}),
        (config, LINEAR_FIELDS if run.model.linear_attention is not None else {}),
        (config, DSA_FIELDS if run.model.dsa is not None else {}),
        (config, HYBRID_FIELDS if run.model.hybrid is not None else {}),
    ):
        for name, get in table.items():
            for key in sorted(_keys_read(get, run)):
                fields = out.setdefault(key, [])
                fields += [f"{owner}.{name}"] if f"{owner}.{name}" not in fields else []
    return out


def _keys_read(get: Get, run: RunConfig) -> set[str]:
    reads: set[str] = set()
    # The reader itself reports what it reads, so this table cannot differ from the fields.
    get(watched(run, reads))
    return reads & schema_keys().keys()
