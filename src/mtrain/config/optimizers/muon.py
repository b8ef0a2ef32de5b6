"""Muon (Jordan et al. 2024): momentum whose matrices are orthogonalised; AdamW for the rest."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from mtrain.config.engine.formats import MainFormat
from mtrain.config.optimizers import adamw
from mtrain.config.schema.base import SAME, Beta, Flag, Key, PositiveFloat, Section
from mtrain.config.schema.optimizer import (
    NO_MATRICES,
    Optimizer,
    Orthogonal,
    ParamGroup,
    Run,
    only,
)


class MuonConfig(Section):
    """`optim.muon`: momentum whose matrices are orthogonalised (Jordan et al. 2024); the rest is
    updated by adamw.
    """

    core_prefix = "muon_"

    momentum: Annotated[Beta | None, Key(feeds=SAME, null=0.95, flag=Flag(SAME, absent=0.9))] = None
    """Decay of the average of gradients; null: 0.95."""
    use_nesterov: Annotated[
        bool | None, Key(feeds="muon_use_nesterov muon_nesterov", null=True, flag=SAME)
    ] = None
    """The newest gradient counts once more; null: true."""
    num_ns_steps: Annotated[
        Annotated[int, Field(ge=1, le=100)] | None,
        Key(feeds=SAME, null=5, flag=Flag(SAME, absent=5)),
    ] = None
    """Newton-Schulz steps that bring singular values near 1; null: 5."""
    ns_dtype: MainFormat | None = None
    """Format that those steps multiply in; null: fp32 for fp32 weights, else bf16."""
    scale_mode: Annotated[
        Literal["spectral", "shape_scaling", "unit_rms_norm"] | None,
        Key(feeds=SAME, null="spectral", flag=Flag(SAME, absent="spectral")),
    ] = None
    """Factor of an orthogonal matrix with r rows and c columns.

    spectral: sqrt(max(r, c)); shape_scaling: sqrt(max(1, r / c)); unit_rms_norm: sqrt(r / c); null:
    spectral.
    """
    extra_scale_factor: Annotated[
        PositiveFloat | None, Key(feeds=SAME, null=0.2, flag=Flag(SAME, absent=1.0))
    ] = None
    """And by this; null: 0.2, with which spectral steps are about as large as those of adamw (Liu
    et al. 2025).
    """
    split_qkv: Annotated[
        bool | None, Key(feeds=SAME, null=True, flag=Flag("--muon-no-split-qkv", off=True))
    ] = None
    """Queries, keys and values are matrices of their own; null: true."""
    tp_mode: Annotated[
        Literal["duplicated", "blockwise"] | None,
        Key(feeds=SAME, null="duplicated", flag=Flag(SAME, absent="blockwise")),
    ] = None
    """A matrix that is sharded over tensor-parallel ranks.

    duplicated: each gathers and orthogonalises it whole; blockwise: each its own block, which is
    another update for each tp; null: duplicated.
    """
    adamw_lr: PositiveFloat | None = None
    """Largest learning rate of what is no matrix, and of embedding and output layer; null:
    optim.lr.
    """


def is_matrix(param: Any, name: str) -> bool:
    """Return whether Muon updates a parameter: a matrix, but no embedding table and no output
    layer.
    """
    return takes(name, param.ndim)


def takes(name: str, axes: int) -> bool:
    """Return whether Muon updates a parameter with this name and number of axes."""
    return axes == 2 and not any(word in name for word in NO_MATRICES)


def _states(run: Run, name: str, axes: int) -> Mapping[str, str]:
    """Return the state of a parameter: momentum for a matrix, the moments of adamw for everything
    else.
    """
    return OPTIMIZER.states(run) if takes(name, axes) else adamw.OPTIMIZER.states(run)


def _is_qkv(name: str) -> bool:
    return "linear_qkv." in name


def _is_qkv_of_tower(name: str) -> bool:
    return _is_qkv(name) and "vision." in name


def _groups(run: Run) -> tuple[ParamGroup, ...]:
    """Return the parameter groups: matrices, fused qkv matrices, those of a vision tower, and the
    rest with its own rate.
    """
    o = run.optim
    own = run.model.llava
    groups: tuple[ParamGroup, ...] = (
        ParamGroup(
            "matrix", lambda p, name: is_matrix(p, name) and not _is_qkv(name), {"matrix": "whole"}
        ),
        ParamGroup("qkv", lambda p, name: is_matrix(p, name) and _is_qkv(name), {"matrix": "qkv"}),
    )
    if own is not None:
        rows = {"qkv_rows": _qkv_rows(run, "vision.linear_qkv.")}
        groups += (
            ParamGroup(
                "vision tower", lambda p, name: is_matrix(p, name) and _is_qkv_of_tower(name), rows
            ),
        )
    if o.muon.adamw_lr in (None, o.rate):
        return groups
    # Both rates fall by the same schedule, so they keep their ratio.
    share = o.min_lr / o.rate
    rates = {"max_lr": o.muon.adamw_lr, "min_lr": share * o.muon.adamw_lr}
    return (*groups, ParamGroup("no matrix", lambda p, name: not is_matrix(p, name), rates))


def _qkv_rows(run: Run, name: str) -> tuple[int, ...]:
    """Return the rows of queries, keys, values and gates of a group of heads."""
    m = run.model
    if m.llava is not None and _is_qkv_of_tower(name):
        return (m.llava.head_dim,) * 3
    queries = m.num_attention_heads // m.query_groups * m.head_dim
    return (queries, *((queries,) if m.attention_output_gate else ()), m.head_dim, m.head_dim)


def _matrices(run: Run, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    if not takes(name, len(shape)):
        return ()
    rows, columns = shape
    if not (_is_qkv(name) and run.optim.muon.split_qkv):
        return ((rows, columns),)
    each = _qkv_rows(run, name)
    return tuple((rows // sum(each) * part, columns) for part in each)


def _orthogonal(run: Run) -> Orthogonal:
    muon = run.optim.muon
    return Orthogonal(
        partial(_matrices, run), muon.num_ns_steps, muon.ns_dtype, muon.tp_mode != "blockwise"
    )


def _build(run: Run) -> tuple[type, dict[str, Any]]:
    from mtrain.devices.dtypes import torch_dtype
    from mtrain.mcore.state.whole_matrices import ParallelMuon

    muon = run.optim.muon
    # The optimizer's own arguments; the excluded keys became groups of parameters.
    kept = muon.model_dump(exclude={"split_qkv", "adamw_lr"})
    kept |= {
        "ns_dtype": torch_dtype(muon.ns_dtype),
        "qkv_rows": _qkv_rows(run, "") if muon.split_qkv else None,
    }
    kept["work"] = _orthogonal(run).work
    return ParallelMuon, {**adamw.arguments(run), **kept}


OPTIMIZER = Optimizer(
    name="muon",
    states=lambda r: {"momentum_buffer": "fp32"},
    states_by_name=_states,
    build=_build,
    obstacle=only(("reference", "triton"), "muon for matrices that are sharded over ranks"),
    keys=frozenset({"beta1", "beta2", "eps"}),
    section=MuonConfig,
    section_doc="muon: its keys in addition to adamw's.",
    defaults={
        "ns_dtype": lambda r: "fp32" if r.precision.format == "fp32" else "bf16",
        "adamw_lr": lambda r: r.optim.rate,
    },
    groups=_groups,
    cannot={
        "megatron_fsdp": "megatron-core's FSDP knows only the two moments of adamw",
        "fsdp2": "it orthogonalises whole matrices, and fsdp2 leaves some rows of each to a rank",
        "adapters": (
            "it orthogonalises whole matrices, and those of a fused layer are several in one"
        ),
        "cpu_offload": "the processor would take long for its matrix products",
    },
    whole_matrices=_orthogonal,
    megatron_name="muon",
)
