"""The weights of a stage on one rank, tensor by tensor, in the builder's order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig

Kind = Literal[
    "embedding",
    "attention",
    "mlp",
    "experts",
    "router",
    "norm",
    "output",
    "vision",
    "adapters",
    "mamba",
]


@dataclass(frozen=True)
class Weight:
    """One parameter, or the part of it that a rank has."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    expert: bool = False
    """Expert-parallel ranks have others: it is reduced over the ranks of the expert grid."""
    shared: bool = False
    """The embedding, which another stage has too."""
    frozen: bool = False
    """True if it has neither gradient nor optimizer state."""
    whole: bool = False
    """Every tensor-parallel rank has all of it."""

    @property
    def numel(self) -> int:
        """Return the number of elements on a rank."""
        return prod(self.shape)


def norm(m: ModelConfig, name: str, width: int) -> Iterator[Weight]:
    """Yield the weight, and the bias of a LayerNorm."""
    yield Weight(f"{name}.weight", (width,), "norm", whole=True)
    if m.normalization == "LayerNorm":
        yield Weight(f"{name}.bias", (width,), "norm", whole=True)


def column(
    name: str, kind: Kind, outputs: int, inputs: int, tp: int, *, bias: bool = False
) -> Iterator[Weight]:
    """Yield a linear layer split by outputs."""
    yield Weight(f"{name}.weight", (outputs // tp, inputs), kind)
    if bias:
        yield Weight(f"{name}.bias", (outputs // tp,), kind)


def row(
    name: str, kind: Kind, outputs: int, inputs: int, tp: int, *, bias: bool = False
) -> Iterator[Weight]:
    """Yield a linear layer split by inputs."""
    yield Weight(f"{name}.weight", (outputs, inputs // tp), kind)
    if bias:
        # It is added once, to the sum over the ranks, so it is not split.
        yield Weight(f"{name}.bias", (outputs,), kind, whole=True)


def square(name: str, kind: Kind, width: int) -> Iterator[Weight]:
    """Yield a linear layer from a width to itself with a bias, whole on every rank."""
    yield Weight(f"{name}.weight", (width, width), kind, whole=True)
    yield Weight(f"{name}.bias", (width,), kind, whole=True)


def mlp(m: ModelConfig, name: str, width: int, tp: int, *, bias: bool) -> Iterator[Weight]:
    """Yield its two linear layers."""
    # Gate and up projection are one layer, so that one GEMM makes both.
    up = (2 if m.gated else 1) * width
    yield from column(f"{name}.linear_fc1", "mlp", up, m.hidden_size, tp, bias=bias)
    yield from row(f"{name}.linear_fc2", "mlp", m.hidden_size, width, tp, bias=bias)


def expert_tensors(p: ParallelConfig) -> int:
    """Return the number of tensor-parallel ranks of an expert."""
    return p.etp or p.tp
