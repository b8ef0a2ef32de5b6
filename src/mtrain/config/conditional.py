"""Keys that mean something only beside another: what they are by default then, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtrain.config.groups import OptimConfig
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


def _attends_with_te(run: RunConfig) -> bool:
    return run.kernels.attention == "te"


def chunks_of_a_document(run: RunConfig) -> int:
    """Chunks that a document may be cut into, so that each is whole."""
    p = run.parallel
    if p.hybrid_context_parallel:
        return 2 * max(1, (p.ranks or 1) // p.model_ranks) * (p.tp if p.sequence_parallel else 1)
    return 2 * p.cp if p.cp > 1 else 1


MUON: dict[str, Callable[[RunConfig], Any]] = {
    "momentum": lambda r: 0.95,
    "use_nesterov": lambda r: True,
    "num_ns_steps": lambda r: 5,
    "ns_dtype": lambda r: "fp32" if r.precision.dtype == "fp32" else "bf16",
    "scale_mode": lambda r: "spectral",
    "extra_scale_factor": lambda r: 0.2,
    "split_qkv": lambda r: True,
    "tp_mode": lambda r: "duplicated",
    "adamw_lr": lambda r: r.optim.lr,
}
"""What null means for muon."""

CONDITIONAL = (
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
        lambda r: "p2p" if _attends_with_te(r) else "all_gather",
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
        lambda r: max(1, r.data.seq_length // max(1, (r.parallel.ranks or 1) // r.parallel.model_ranks)),
    ),
    Conditional(
        "parallel.fsdp_sharding",
        lambda r: r.parallel.fsdp == "megatron",
        "parallel.fsdp=megatron",
        lambda r: "optim_grads_params",
    ),
    Conditional(
        "data.packed_multiple",
        lambda r: r.data.packed,
        "data.packed=true",
        chunks_of_a_document,
    ),
    *(
        Conditional(f"optim.muon.{key}", lambda r: r.optim.name == "muon", "optim.name=muon", default)
        for key, default in MUON.items()
    ),
    *(
        Conditional(f"optim.{key}", active, needs, off=OptimConfig.model_fields[key].default)
        for key, active, needs in (
            ("beta1", lambda r: r.optim.name != "sgd", "optim.name=adamw"),
            ("beta2", lambda r: r.optim.name != "sgd", "optim.name=adamw"),
            ("eps", lambda r: r.optim.name != "sgd", "optim.name=adamw"),
            ("momentum", lambda r: r.optim.name == "sgd", "optim.name=sgd"),
            ("wsd_decay_style", lambda r: r.optim.schedule == "wsd", "optim.schedule=wsd"),
        )
    ),
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
        }.items()
    ),
)
"""All of them; `resolve` fills their defaults in, and a rule refuses one that is set and reaches nothing."""
