"""What mtrain asks of an optimizer: everything outside its own module reads it from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from mtrain.config.schema.base import Section

Run = Any
"""A RunConfig: its `optim` is made of what is said here, so this module cannot import it."""
Feature = Literal["distributed_optimizer", "fsdp2", "megatron_fsdp", "cpu_offload", "adapters"]


NO_MATRICES = ("embedding", "relative_attention_bias", "output_layer")
"""In names of tables that are looked up in and of output layers, which are no maps from width to
width.
"""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that an optimizer updates in a way of their own."""

    name: str
    contains: Callable[[Any, str], bool]
    """Whether a parameter, with its name in the model, belongs to it."""
    settings: Mapping[str, Any]
    """Keys of the torch optimizer's parameter group."""


@dataclass(frozen=True)
class Orthogonal:
    """Matrices that an update orthogonalises by Newton-Schulz steps."""

    matrices: Callable[[str, tuple[int, ...]], tuple[tuple[int, int], ...]]
    """Rows and columns of those of a parameter with this name and shape."""
    steps: int
    format: str
    """They are multiplied in."""
    whole: bool
    """Gathered from tensor-parallel ranks before."""
    sent: tuple[int, int] = (1, 1)
    """Numbers of each element that go to the rank that computes it, and back."""

    def work(self, shape: tuple[int, ...]) -> int:
        """What data-parallel ranks share the matrix of a rank by."""
        return prod(shape) * min(shape)

    def factor_bytes(self, rows: int, columns: int) -> int:
        """Of what is kept of a whole matrix beside its elements' state."""
        return 0


@dataclass(frozen=True)
class Rotated:
    """Matrices that an update rotates into the eigenbases of their factors."""

    matrices: Callable[[str, tuple[int, ...]], tuple[tuple[int, int], ...]]
    """Rows and columns of a parameter with this name and shape; none of what is updated as it
    stands.
    """
    longest: int
    """Side that has factors."""
    frequency: int
    """Steps from one update of the bases to the next."""
    whole: bool
    """Gathered from tensor-parallel ranks before."""
    format: str = "fp32"
    """They are multiplied in."""
    sent: tuple[int, int] = (3, 2)
    """Numbers of each element that go to the rank that computes it, and back."""

    def sides(self, *shape: int) -> tuple[int, ...]:
        """Return lengths of the sides that have factors."""
        return tuple(n for n in shape if n <= self.longest)

    def work(self, shape: tuple[int, ...]) -> int:
        """What data-parallel ranks share the matrix of a rank by."""
        return prod(shape) * sum(self.sides(*shape))

    def factor_bytes(self, rows: int, columns: int) -> int:
        """Of the factors of a whole matrix: an average and a basis of each side, in fp32."""
        return sum(2 * 4 * n * n for n in self.sides(rows, columns))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The specification of an optimizer: one module of `mtrain.config.optimizers` holds it as
    `OPTIMIZER`.
    """

    name: str
    states: Callable[[Run], Mapping[str, str]]
    """State tensors beside a weight and its main weight -> number format.

    Where parameters have different ones, the smallest.
    """
    states_by_name: Callable[[Run, str, int], Mapping[str, str]] | None = None
    """Those of a parameter with this name and so many axes, where not all have the same."""
    build: Callable[[Run], tuple[type, dict[str, Any]]] | None
    """The torch class of `kernels.optimizer` reference and triton, and its arguments beside those
    that megatron-core passes. What it needs of torch it imports itself. None: there is none, the
    update is torch's.
    """
    obstacle: Callable[[str, Run], str | None]
    """Why a word of `kernels.optimizer` cannot update it, or None."""
    keys: frozenset[str] = frozenset()
    """Those keys of `optim` that it reads and not every optimizer does."""
    section: type[Section] | None = None
    """Its own keys: `optim.<name>`.

    Their `Key` says what null means, their flags, and which fields of megatron-core's
    OptimizerConfig they feed.
    """
    section_doc: str = ""
    defaults: Mapping[str, Callable[[Run], Any]] = field(default_factory=dict)
    """Key of the section -> what null means, where that follows from other keys."""
    core_name: Literal["adam", "sgd"] = "adam"
    """What megatron-core builds it as: `adam` is any class of ours, too."""
    groups: Callable[[Run], tuple[ParamGroup, ...]] = lambda run: ()
    cannot: Mapping[Feature, str] = field(default_factory=dict)
    """What it cannot be combined with, and why: the clause after a sentence that says so."""
    whole_matrices: Callable[[Run], Orthogonal | Rotated] | None = None
    """What its update makes of whole matrices; None: it knows elements alone."""
    of_adamw_lr: float = 1.0
    """Its rate where adamw takes 1, as published rates are those of adamw."""
    usual_lr: tuple[float, float] | None = None
    """Between which rates it is mostly used; None: nothing is said of a rate."""
    megatron_name: str | None = None
    """Megatron-LM's word after `--optimizer`; None: it has no such optimizer."""

    def states_of(self, run: Run, name: str, axes: int) -> Mapping[str, str]:
        """Return state tensors of the parameter `name` of so many axes -> number format."""
        if self.states_by_name is None:
            return self.states(run)
        return self.states_by_name(run, name, axes)


def only(words: tuple[str, ...], name: str) -> Callable[[str, Run], str | None]:
    """Return the obstacle of an optimizer that some words of `kernels.optimizer` can always update,
    and others never.
    """

    def obstacle(word: str, run: Run) -> str | None:
        return None if word in words else f"{word} has no {name}, but {' and '.join(words)} have"

    return obstacle
