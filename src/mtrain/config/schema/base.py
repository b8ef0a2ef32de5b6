"""The base of every schema, and what a schema says of a key beside its type and its text.

Modules of schemas do without `from __future__ import annotations`: pydantic would evaluate the text
of every annotation in every start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Effect(StrEnum):
    """What changing a key changes, the gravest first.

    Used to validate a resume and to compare two recipes.
    """

    ARCHITECTURE = "architecture"
    """What the weights are: a checkpoint of the other value cannot be continued."""
    NUMERICS = "numerics"
    """The weights that come out."""
    CONTENTS = "contents"
    """The weights that come out, by what lies at the place that it names: a resume compares that,
    not the name.
    """
    PARALLELISM = "parallelism"
    """How the work is sharded: the same numbers up to the order of summation."""
    RUNTIME = "runtime"
    """Speed, output and storage: no effect on the weights."""


SCHEMA_DEFAULT: Any = object()
"""Leaving a flag out means what the schema's default is."""


@dataclass(frozen=True, eq=False, slots=True)
class Flag:
    """A flag of Megatron-LM that says one key."""

    name: str
    absent: Any = SCHEMA_DEFAULT
    """What leaving it out means there."""
    also: tuple[str, ...] = ()
    """Other spellings of it."""
    none: tuple[Any, ...] = ()
    """Values of it that stand for null."""
    off: bool = False
    """A switch that makes the key false."""
    always: bool = False
    """Written even where leaving it out says the same."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Key:
    """What a schema says of a key in its annotation: what it reaches, when, and what others call
    it.

    The tables of `core_fields`, `conditional`, `keys` and of `recipes` are derived from it. What
    must be computed stands there as a function.
    """

    feeds: str = ""
    """The fields of megatron-core that get its value as it is, by spaces: of TransformerConfig, or
    of `gpt.`, `mla.`, `ddp.`, `wrap.`, `fsdp.`, `optimizer.`, `scheduler.`. Where a key with `when`
    is null, megatron-core's default stays.
    """
    when: str = ""
    """What must hold for the key to have an effect, as `parallel.vpp>1 and parallel.fsdp=none`; see
    `condition`.
    """
    null: Any = None
    """The value that null stands for where the key has an effect."""
    effect: Effect | None = None
    """What changing it changes; None: as its section."""
    flag: str | Flag = ""
    """Its flag in Megatron-LM."""
    hf: str = ""
    """Its names in `config.json` of Hugging Face models, by spaces, that of Llama first."""
    aka: str = ""
    """Names of other systems, by spaces, that stand for it in messages alone."""
    unit: str = ""
    """What a number counts, where neither type nor name say so."""


class Section(BaseModel):
    """A frozen, strict group of keys: no unknown key, no silent conversion, documented fields."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        defer_build=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
"""What a name is that becomes part of a path or of a line."""
MOST = 1 << 40
"""No run counts more of anything: a trillion steps, tokens of a sample or samples of a step."""
MOST_RANKS = 1 << 20
"""No cluster has more devices."""
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
"""Over how many ranks something is sharded, or how many machines or devices there are."""
Width = Annotated[int, Field(ge=1, le=1 << 27)]
"""Channels, heads, layers, experts or rows of a table: no weight matrix has a larger side."""
PositiveFloat = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=10**8)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
SquareWeight = Annotated[float, Field(ge=0, le=1000)]
"""Weight of a loss of squares; those in use are 1e-4 to 1e-2, and from some thousands on fp16 has
no gradient.
"""
Beta = Annotated[float, Field(ge=0, lt=1)]
"""Share of an average that each step leaves of it."""
Probability = Annotated[float, Field(ge=0, lt=1)]
