"""Keys that mean something only beside another: what they are by default then, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtrain.config.devices import facts_of
from mtrain.config.kernels import OPERATIONS
from mtrain.config.keys import field_of
from mtrain.config.optimizers import OPTIMIZERS, readers
from mtrain.config.run import RunConfig


@dataclass(frozen=True)
class Conditional:
    """A key that is off (null, false, its default) unless `active` says that it reaches something."""

    path: str
    active: Callable[[RunConfig], bool]
    needs: str
    """The condition as a user writes it."""
    default: Callable[[RunConfig], Any] = lambda run: None
    """The value that null stands for where the key is active."""
    off: Any = None

    def value(self, run: RunConfig) -> Any:
        """The key's value; `off` where its section is null."""
        node: Any = run
        for name in self.path.split("."):
            if node is None:
                return self.off
            node = getattr(node, name)
        return node


def _context_exchange(run: RunConfig) -> str | None:
    """TransformerEngine's attention has a ring; None where the machine that runs it will choose the attention."""
    attention = run.kernels.attention
    return {"te": "p2p", "auto": None, None: None}.get(attention, "all_gather")


def chunks_of_a_document(run: RunConfig) -> int:
    """Chunks that a document may be cut into, so that each is whole."""
    p = run.parallel
    if p.hybrid_context_parallel:
        return 2 * max(1, (p.ranks or 1) // p.model_ranks) * (p.tp if p.sequence_parallel else 1)
    return 2 * p.cp if p.cp > 1 else 1


def _turns(run: RunConfig) -> bool:
    """Whether queries and keys of plain attention are turned by their positions."""
    return run.model.position_embedding_type == "rope" and run.model.mla is None


def _delayed(run: RunConfig) -> bool:
    return run.precision.fp8 is not None and run.precision.fp8_recipe == "delayed"


def _layers_may_differ(run: RunConfig) -> bool:
    return run.precision.quantized is not None and not _delayed(run)


# fp8_recipe stands first: the others look at the value that null stands for
QUANTIZED = (
    Conditional(
        "precision.fp8_recipe",
        lambda r: r.precision.fp8 is not None,
        "a precision.fp8",
        lambda r: "tensorwise",
    ),
    Conditional("precision.fp4_recipe", lambda r: r.precision.fp4 is not None, "a precision.fp4", lambda r: "nvfp4"),
    *(
        Conditional(f"precision.{key}", _delayed, "precision.fp8_recipe=delayed", lambda r, v=value: v)  # type: ignore[misc]
        for key, value in {
            "fp8_margin": 0,
            "fp8_amax_history_len": 1024,
            "fp8_amax_compute_algo": "max",
        }.items()
    ),
    Conditional("precision.fp8_wgrad", _delayed, "precision.fp8_recipe=delayed", off=True),
    Conditional("precision.tp_only_amax_red", _delayed, "precision.fp8_recipe=delayed", off=False),
    Conditional(
        "precision.fp8_dot_product_attention",
        lambda r: r.precision.fp8 is not None and r.precision.quantized in ("delayed", "tensorwise"),
        "precision.fp8_recipe=delayed or tensorwise",
        off=False,
    ),
    Conditional(
        "precision.fp8_multi_head_attention",
        lambda r: _delayed(r) and r.precision.fp8_dot_product_attention,
        "precision.fp8_dot_product_attention=true and precision.fp8_recipe=delayed",
        off=False,
    ),
    *(
        Conditional(
            f"precision.num_layers_at_{end}_in_bf16",
            _layers_may_differ,
            "a precision.fp8 whose recipe is not delayed, or a precision.fp4",
            off=0,
        )
        for end in ("start", "end")
    ),
)

_BESIDE: tuple[tuple[tuple[str, ...], Callable[[RunConfig], bool], str], ...] = (
    (
        (
            "precision.initial_loss_scale",
            "precision.loss_scale_window",
            "precision.min_loss_scale",
            "precision.max_skipped_updates",
        ),
        lambda r: r.precision.format == "fp16",
        "precision.dtype=fp16",
    ),
    (
        ("model.rotary_base", "model.rotary_percent", "model.rotary_interleaved"),
        lambda r: r.model.position_embedding_type == "rope",
        "model.position_embedding_type=rope",
    ),
    (("optim.wsd_decay_style",), lambda r: r.optim.schedule == "wsd", "optim.schedule=wsd"),
)
"""Keys that have a value of their own by default, and what must be beside them for another one to reach anything."""


def _of_optimizers() -> Iterator[Conditional]:
    """Sections of optimizers, and keys of `optim` that not all of them read."""
    for name, spec in OPTIMIZERS.items():
        for key in spec.section.model_fields if spec.section is not None else ():
            default = spec.defaults.get(key, lambda run: None)
            yield Conditional(f"optim.{name}.{key}", partial(_optimized_by, (name,)), f"optim.name={name}", default)
    for key in sorted({key for spec in OPTIMIZERS.values() for key in spec.keys}):
        field = field_of(f"optim.{key}")
        assert field is not None, key
        needs = f"optim.name={' or '.join(readers(key))}"
        yield Conditional(f"optim.{key}", partial(_optimized_by, readers(key)), needs, off=field.default)


def _optimized_by(names: tuple[str, ...], run: RunConfig) -> bool:
    return run.optim.name in names


CONDITIONAL = (
    *QUANTIZED,
    Conditional(
        "parallel.recompute.modules",
        lambda r: r.parallel.recompute.granularity == "selective",
        "parallel.recompute.granularity=selective",
        lambda r: ("core_attn",),
    ),
    Conditional(
        "parallel.recompute.method",
        lambda r: r.parallel.recompute.granularity == "full",
        "parallel.recompute.granularity=full",
        lambda r: "uniform",
    ),
    Conditional(
        "parallel.recompute.num_layers",
        lambda r: r.parallel.recompute.granularity == "full",
        "parallel.recompute.granularity=full",
        lambda r: 1,
    ),
    Conditional(
        "parallel.cp_comm_type",
        lambda r: r.parallel.cp > 1 or r.parallel.hybrid_context_parallel,
        "parallel.cp above 1",
        _context_exchange,
    ),
    Conditional(
        "parallel.hierarchical_cp_sizes",
        lambda r: r.parallel.cp > 1 and r.parallel.cp_comm_type == "a2a+p2p",
        "parallel.cp_comm_type=a2a+p2p",
    ),
    Conditional(
        "parallel.max_seqlen_per_dp_cp_rank",
        lambda r: r.parallel.hybrid_context_parallel,
        "parallel.hybrid_context_parallel=true",
        lambda r: max(1, r.data.length // max(1, (r.parallel.ranks or 1) // r.parallel.model_ranks)),
    ),
    Conditional(
        "parallel.fsdp_sharding",
        lambda r: r.parallel.fsdp == "megatron",
        "parallel.fsdp=megatron",
        lambda r: "optim_grads_params",
    ),
    Conditional("data.blend", lambda r: r.data.kind == "indexed", "data.kind=indexed"),
    Conditional("data.blend_weights", lambda r: r.data.blend is not None, "a data.blend"),
    Conditional(
        "data.packed_multiple",
        lambda r: r.data.packed,
        "data.packed=true",
        chunks_of_a_document,
    ),
    Conditional(
        "parallel.recompute.distribute_saved_activations",
        lambda r: (
            r.parallel.recompute.granularity == "full" and r.parallel.tp > 1 and not r.parallel.sequence_parallel
        ),
        "parallel.recompute.granularity=full and a parallel.tp above 1 that sequence_parallel=false leaves whole",
        off=False,
    ),
    Conditional(
        "parallel.microbatch_group_size_per_vp_stage",
        lambda r: r.parallel.vpp > 1,
        "a parallel.vpp above 1",
        lambda r: r.parallel.pp,
    ),
    Conditional(
        "parallel.overlap_p2p_comm_warmup_flush", lambda r: r.parallel.vpp > 1, "a parallel.vpp above 1", off=False
    ),
    Conditional(
        "parallel.ddp_bucket_size",
        lambda r: bool(r.parallel.overlap_grad_reduce) and r.parallel.fsdp == "none",
        "parallel.overlap_grad_reduce=true",
    ),
    Conditional(
        "parallel.ddp_pad_buckets_for_high_nccl_busbw",
        lambda r: bool(r.parallel.distributed_optimizer),
        "parallel.distributed_optimizer=true",
        off=False,
    ),
    Conditional("model.glu_linear_offset", lambda r: r.model.gated, "a gated model.activation", off=0.0),
    Conditional("model.activation_func_clamp_value", lambda r: r.model.gated, "a gated model.activation"),
    Conditional(
        "model.rotary_seq_len_interpolation_factor",
        _turns,
        "model.position_embedding_type=rope and model.mla=null",
    ),
    Conditional("model.no_rope_freq", _turns, "model.position_embedding_type=rope and model.mla=null"),
    Conditional("model.softmax_scale", lambda r: r.model.mla is None, "model.mla=null"),
    Conditional(
        "model.moe.router_padding_for_quantization",
        lambda r: r.precision.quantized is not None,
        "a precision.fp8 or precision.fp4",
        off=False,
    ),
    Conditional(
        "model.moe.apply_probs_on_input",
        lambda r: bool(r.model.moe and r.model.moe.router_topk == 1),
        "model.moe.router_topk=1",
        off=False,
    ),
    Conditional(
        "model.moe.shared_expert_gate",
        lambda r: bool(r.model.moe and r.model.moe.shared_expert_intermediate_size),
        "a model.moe.shared_expert_intermediate_size",
        off=False,
    ),
    Conditional(
        "model.moe.flex_dispatcher_backend",
        lambda r: bool(r.model.moe and r.model.moe.token_dispatcher_type == "flex"),
        "model.moe.token_dispatcher_type=flex",
        lambda r: "deepep",
    ),
    *_of_optimizers(),
    Conditional("model.window_attn_skip_freq", lambda r: r.model.window_size is not None, "a model.window_size"),
    Conditional(
        "model.mtp_loss_scaling_factor",
        lambda r: r.model.mtp_num_layers is not None,
        "a number of model.mtp_num_layers",
        lambda r: 0.1,
    ),
    Conditional(
        "model.moe.router_bias_update_rate",
        lambda r: bool(r.model.moe and r.model.moe.router_enable_expert_bias),
        "model.moe.router_enable_expert_bias=true",
        lambda r: 1e-3,
    ),
    Conditional(
        "model.moe.router_group_score_topk",
        lambda r: bool(r.model.moe and r.model.moe.router_num_groups),
        "a model.moe.router_num_groups",
        lambda r: r.model.moe.group_score_topk if r.model.moe else None,
    ),
    Conditional(
        "model.moe.token_drop_policy",
        lambda r: bool(r.model.moe and r.model.moe.expert_capacity_factor),
        "a model.moe.expert_capacity_factor",
        lambda r: "probs",
    ),
    Conditional(
        "model.moe.pad_expert_input_to_capacity",
        lambda r: bool(r.model.moe and r.model.moe.expert_capacity_factor),
        "a model.moe.expert_capacity_factor",
        lambda r: False,
        off=False,
    ),
    Conditional(
        "model.moe.shared_expert_overlap",
        lambda r: bool(r.model.moe and r.model.moe.shared_expert_intermediate_size),
        "a model.moe.shared_expert_intermediate_size",
        lambda r: False,
        off=False,
    ),
    Conditional("kernels.cpu_matmul", lambda r: facts_of(r.cluster.device).on_host, "cluster.device=cpu"),
    *(Conditional(f"kernels.{op.name}", op.applies, op.needs) for op in OPERATIONS if op.needs),
    *(
        Conditional(path, active, needs, off=field_of(path).default)  # type: ignore[union-attr]
        for paths, active, needs in _BESIDE
        for path in paths
    ),
    *(
        Conditional(
            f"model.mla.{key}",
            lambda r: bool(r.model.mla and r.model.mla.rope_type == "yarn"),
            "model.mla.rope_type=yarn",
            lambda r, value=value: value,  # type: ignore[misc]
        )
        for key, value in {
            "rotary_scaling_factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }.items()
    ),
)
"""All of them; `resolve` fills their defaults in, and a rule refuses one that is set and has no effect."""
