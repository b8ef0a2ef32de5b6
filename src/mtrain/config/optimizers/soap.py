"""SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo's factors; AdamW for the rest."""

from typing import Annotated, Any, Literal

from pydantic import Field

from mtrain.config.optimizers import adamw
from mtrain.config.optimizers.muon import is_matrix, takes
from mtrain.config.schema.base import SAME, Beta, Key, Section, Width
from mtrain.config.schema.optimizer import Optimizer, ParamGroup, Rotated, Run, only


class SoapConfig(Section):
    """`optim.soap`: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024, arXiv
    2409.11321) for matrices between layers; the rest is updated by adamw.
    """

    core_prefix = "soap_"

    shampoo_beta: Annotated[Beta | None, Key(feeds=SAME, null=0.95)] = None
    """Decay of the averages of G G^T and G^T G; null: 0.95."""
    precondition_frequency: Annotated[
        Annotated[int, Field(ge=1, le=10**6)] | None, Key(feeds=SAME, null=10, unit="steps")
    ] = None
    """Steps from one power iteration of the eigenbases, with its QR decomposition, to the next;
    null: 10.
    """
    max_precond_dim: Annotated[Width | None, Key(null=10000)] = None
    """Sides of a matrix that are longer have no eigenbasis; null: 10000."""
    tp_mode: Annotated[Literal["duplicated", "blockwise"] | None, Key(null="duplicated")] = None
    """A matrix that is sharded over tensor-parallel ranks.

    duplicated: each gathers and rotates it whole, and keeps its factors; blockwise: each its own
    block, which is another update for each tp; null: duplicated.
    """


def _matrices(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return ((shape[0], shape[1]),) if takes(name, len(shape)) else ()


def _rotated(run: Run) -> Rotated:
    o = run.optim.soap
    return Rotated(_matrices, o.max_precond_dim, o.precondition_frequency, o.tp_mode != "blockwise")


def _build(run: Run) -> tuple[type, dict[str, Any]]:
    from mtrain.mcore.state.whole_matrices import ParallelSoap

    return ParallelSoap, {
        **adamw.arguments(run),
        **run.optim.soap.model_dump(),
        "work": _rotated(run).work,
    }


OPTIMIZER = Optimizer(
    name="soap",
    states=lambda r: {"exp_avg": "fp32", "exp_avg_sq": "fp32"},
    build=_build,
    obstacle=only(("reference", "triton"), "soap"),
    keys=frozenset({"beta1", "beta2", "eps"}),
    section=SoapConfig,
    section_doc="soap: its keys in addition to adamw's.",
    groups=lambda run: (ParamGroup("matrix", is_matrix, {"matrix": "whole"}),),
    cannot={
        "megatron_fsdp": "megatron-core's FSDP knows only the two moments of adamw",
        "fsdp2": "it rotates whole matrices, and fsdp2 leaves some rows of each to a rank",
        "adapters": "it rotates whole matrices, and those of a fused layer are several in one",
        "cpu_offload": "the processor would take long for its matrix products",
    },
    whole_matrices=_rotated,
)
