"""Muon (Jordan et al. 2024): momentum whose matrices are orthogonalised; AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from mtrain.config.base import Beta, PositiveFloat, Section
from mtrain.config.formats import MainFormat
from mtrain.config.optimizer import Flag, Optimizer, ParamGroup, Run, only
from mtrain.config.optimizers import adamw


class MuonConfig(Section):
    """`optim.muon`: momentum whose matrices are orthogonalised (Jordan et al. 2024); the rest is updated by adamw."""

    momentum: Beta | None = None
    """Decay of the average of gradients; null: 0.95."""
    use_nesterov: bool | None = None
    """The newest gradient counts once more; null: true."""
    num_ns_steps: Annotated[int, Field(ge=1, le=100)] | None = None
    """Newton-Schulz steps that bring singular values near 1; null: 5."""
    ns_dtype: MainFormat | None = None
    """Format that those steps multiply in; null: fp32 for fp32 weights, else bf16."""
    scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] | None = None
    """What an orthogonal matrix of r rows and c columns is multiplied by. spectral: sqrt(max(r, c)); shape_scaling:
    sqrt(max(1, r / c)); unit_rms_norm: sqrt(r / c); null: spectral."""
    extra_scale_factor: PositiveFloat | None = None
    """And by this; null: 0.2, with which spectral steps are about as large as those of adamw (Liu et al. 2025)."""
    split_qkv: bool | None = None
    """Queries, keys and values are matrices of their own; null: true."""
    tp_mode: Literal["duplicated", "blockwise"] | None = None
    """A matrix that is cut over tensor-parallel ranks. duplicated: each gathers and orthogonalises it whole;
    blockwise: each its own block, which is another update for each tp; null: duplicated."""
    adamw_lr: PositiveFloat | None = None
    """Largest learning rate of what is no matrix, and of embedding and output layer; null: optim.lr."""


def is_matrix(param: Any, name: str) -> bool:
    """Whether Muon takes a parameter: a matrix, but for embeddings and the output layer."""
    return param.ndim == 2 and "embedding" not in name and "output_layer" not in name


def _is_qkv(name: str) -> bool:
    return "linear_qkv." in name


def _groups(run: Run) -> tuple[ParamGroup, ...]:
    """Matrices, those of them that are three, and the rest with its own rate."""
    o = run.optim
    groups = (
        ParamGroup("matrix", lambda p, name: is_matrix(p, name) and not _is_qkv(name), {"matrix": "whole"}),
        ParamGroup("qkv", lambda p, name: is_matrix(p, name) and _is_qkv(name), {"matrix": "qkv"}),
    )
    if o.muon.adamw_lr in (None, o.rate):
        return groups
    share = (o.min_lr or 0.0) / o.rate
    rates = {"max_lr": o.muon.adamw_lr, "min_lr": share * o.muon.adamw_lr}
    return (*groups, ParamGroup("no matrix", lambda p, name: not is_matrix(p, name), rates))


FIELDS: dict[str, Callable[[Run], Any]] = {
    "muon_momentum": lambda r: r.optim.muon.momentum,
    "muon_use_nesterov": lambda r: r.optim.muon.use_nesterov,
    "muon_num_ns_steps": lambda r: r.optim.muon.num_ns_steps,
    "muon_scale_mode": lambda r: r.optim.muon.scale_mode,
    "muon_extra_scale_factor": lambda r: r.optim.muon.extra_scale_factor,
    "muon_split_qkv": lambda r: r.optim.muon.split_qkv,
    "muon_tp_mode": lambda r: r.optim.muon.tp_mode,
}
"""Of OptimizerConfig; those of our Muon have no `muon_` before them."""


def _build(run: Run) -> tuple[type, dict[str, Any]]:
    from mtrain.devices.dtypes import torch_dtype
    from mtrain.mcore.muon import ParallelMuon

    m, muon = run.model, run.optim.muon
    rows = (m.num_attention_heads // m.query_groups * m.head_dim, m.head_dim, m.head_dim)
    kept = {key.removeprefix("muon_"): get(run) for key, get in FIELDS.items() if key != "muon_split_qkv"}
    kept |= {"ns_dtype": torch_dtype(muon.ns_dtype), "qkv_rows": rows if muon.split_qkv else None}
    return ParallelMuon, {**adamw.arguments(run), **kept}


OPTIMIZER = Optimizer(
    name="muon",
    states=lambda r: {"momentum_buffer": "fp32"},
    build=_build,
    obstacle=only(("reference", "triton"), "muon for matrices that are cut over ranks"),
    keys=frozenset({"beta1", "beta2", "eps"}),
    section=MuonConfig,
    section_doc="muon: what it does beside adamw's keys.",
    defaults={
        "momentum": lambda r: 0.95,
        "use_nesterov": lambda r: True,
        "num_ns_steps": lambda r: 5,
        "ns_dtype": lambda r: "fp32" if r.precision.format == "fp32" else "bf16",
        "scale_mode": lambda r: "spectral",
        "extra_scale_factor": lambda r: 0.2,
        "split_qkv": lambda r: True,
        "tp_mode": lambda r: "duplicated",
        "adamw_lr": lambda r: r.optim.rate,
    },
    fields=FIELDS,
    groups=_groups,
    cannot={
        "distributed_optimizer": "it orthogonalises whole matrices, and those are cut up",
        "megatron_fsdp": "it knows the two moments of adamw",
        "fsdp2": "it orthogonalises whole matrices, and fsdp2 leaves some rows of each to a rank",
        "cpu_offload": "the processor would take long for its matrix products",
    },
    megatron_name="muon",
    flags=(
        Flag("--muon-momentum", "momentum", 0.9),
        Flag("--muon-use-nesterov", "use_nesterov", False),
        Flag("--muon-no-split-qkv", "split_qkv", True),
        Flag("--muon-scale-mode", "scale_mode", "spectral"),
        Flag("--muon-num-ns-steps", "num_ns_steps", 5),
        Flag("--muon-tp-mode", "tp_mode", "blockwise"),
        Flag("--muon-extra-scale-factor", "extra_scale_factor", 1.0),
    ),
)
