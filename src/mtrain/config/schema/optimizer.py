"""The specification of an optimizer: everything outside of its own module reads it from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from mtrain.config.schema.base import Section

# A RunConfig. Its `optim` is built from specifications, so this module cannot import it.
Run = Any
Feature = Literal["distributed_optimizer", "fsdp2", "megatron_fsdp", "cpu_offload", "adapters"]


# Parts of names of embedding tables and output layers, which do not map from width to width.
NO_MATRICES = ("embedding", "relative_attention_bias", "output_layer", "value_head")


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with an update of their own."""

    name: str
    contains: Callable[[Any, str], bool]
    """Predicate of a parameter and its name in the model: is it in the group?"""
    settings: Mapping[str, Any]
    """Keys of the torch optimizer's parameter group."""


@dataclass(frozen=True)
class Orthogonal:
    """Matrices that an update orthogonalises by Newton-Schulz steps."""

    matrices: Callable[[str, tuple[int, ...]], tuple[tuple[int, int], ...]]
    """Rows and columns of the matrices of a parameter with this name and shape."""
    steps: int
    format: str
    """The number format of their GEMMs."""
    whole: bool
    """True if tensor-parallel ranks gather the matrices first."""
    sent: tuple[int, int] = (1, 1)
    """Numbers per element that travel to the rank that computes it, and back."""

    def work(self, shape: tuple[int, ...]) -> int:
        """Return the weight by which data-parallel ranks share the matrices of a rank."""
        return prod(shape) * min(shape)

    def factor_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes kept per whole matrix in addition to its elements' state."""
        return 0


@dataclass(frozen=True)
class Rotated:
    """Matrices that an update rotates into the eigenbases of their factors."""

    matrices: Callable[[str, tuple[int, ...]], tuple[tuple[int, int], ...]]
    """Rows and columns of a parameter with this name and shape; empty if it is updated as it is."""
    longest: int
    """The longest side that has factors."""
    frequency: int
    """Steps between two updates of the bases."""
    whole: bool
    """True if tensor-parallel ranks gather the matrices first."""
    format: str = "fp32"
    """The number format of their GEMMs."""
    sent: tuple[int, int] = (3, 2)
    """Numbers per element that travel to the rank that computes it, and back."""

    def sides(self, *shape: int) -> tuple[int, ...]:
        """Return the lengths of the sides that have factors."""
        return tuple(n for n in shape if n <= self.longest)

    def work(self, shape: tuple[int, ...]) -> int:
        """Return the weight by which data-parallel ranks share the matrices of a rank."""
        return prod(shape) * sum(self.sides(*shape))

    def factor_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the factors of a whole matrix: an average and a basis for each side,
        in fp32.
        """
        return sum(2 * 4 * n * n for n in self.sides(rows, columns))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The specification of an optimizer; a module of `mtrain.config.optimizers` has it as
    `OPTIMIZER`.
    """

    name: str
    states: Callable[[Run], Mapping[str, str]]
    """State tensors of a weight, apart from its main weight -> number format. If parameters differ,
    the smallest.
    """
    states_by_name: Callable[[Run, str, int], Mapping[str, str]] | None = None
    """The states of a parameter with this name and number of axes, if parameters differ."""
    build: Callable[[Run], tuple[type, dict[str, Any]]] | None
    """The torch class for `kernels.optimizer` reference and triton, and its arguments in addition
    to megatron-core's. It imports torch itself. None: torch has the update.
    """
    obstacle: Callable[[str, Run], str | None]
    """Reason why an implementation of `kernels.optimizer` cannot run the optimizer, or None."""
    keys: frozenset[str] = frozenset()
    """The keys of `optim` that it reads and some other optimizer does not."""
    section: type[Section] | None = None
    """Its own keys: `optim.<name>`. Their `Key` has the meaning of null, flags and the fields of
    megatron-core's OptimizerConfig.
    """
    section_doc: str = ""
    defaults: Mapping[str, Callable[[Run], Any]] = field(default_factory=dict)
    """Key of the section -> the meaning of null, if it follows from other keys."""
    core_name: Literal["adam", "sgd"] = "adam"
    """Its name in megatron-core: `adam` stands for any class of ours too."""
    groups: Callable[[Run], tuple[ParamGroup, ...]] = lambda run: ()
    cannot: Mapping[Feature, str] = field(default_factory=dict)
    """Its incompatibilities, each with a reason as a clause."""
    whole_matrices: Callable[[Run], Orthogonal | Rotated] | None = None
    """Its work on whole matrices; None: it works element by element."""
    of_adamw_lr: float = 1.0
    """Its learning rate relative to adamw's, for which rates are published."""
    usual_lr: tuple[float, float] | None = None
    """The usual range of its learning rate; None: no advice."""
    megatron_name: str | None = None
    """Megatron-LM's word after `--optimizer`; None: Megatron-LM lacks it."""

    def states_of(self, run: Run, name: str, axes: int) -> Mapping[str, str]:
        """Return state tensor -> number format for the parameter `name` with so many axes."""
        if self.states_by_name is None:
            return self.states(run)
        return self.states_by_name(run, name, axes)


def only(words: tuple[str, ...], name: str) -> Callable[[str, Run], str | None]:
    """Return the obstacle of an optimizer that some implementations can always update, and others
    never.
    """

    def obstacle(word: str, run: Run) -> str | None:
        return None if word in words else f"{word} has no {name}, but {' and '.join(words)} have"

    return obstacle
