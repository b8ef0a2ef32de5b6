"""The base class of every section, and the annotation of keys.

Schema modules do without `from __future__ import annotations`: pydantic would have to evaluate the
text of every annotation at each start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field


class Effect(StrEnum):
    """The effect of changing a key, gravest first. Resumes are validated, and recipes compared, by
    it.
    """

    ARCHITECTURE = "architecture"
    """The weights themselves: a checkpoint with another value cannot be continued."""
    NUMERICS = "numerics"
    """The resulting weights."""
    CONTENTS = "contents"
    """The resulting weights, by the contents of the named place: a resume compares contents, not
    names.
    """
    PARALLELISM = "parallelism"
    """The sharding of the work: equal numbers up to the order of summation."""
    RUNTIME = "runtime"
    """Speed, output and storage: no effect on the weights."""


# Marks a flag whose absence means the schema's default.
SCHEMA_DEFAULT: Any = object()
# Stands for megatron-core's name of a key: the name here, after the `core_prefix` of its section.
SAME = "."


@dataclass(frozen=True, eq=False, slots=True)
class Flag:
    """A flag of Megatron-LM that sets one key."""

    name: str
    absent: Any = SCHEMA_DEFAULT
    """The meaning of its absence there."""
    also: tuple[str, ...] = ()
    """Its other spellings."""
    none: tuple[Any, ...] = ()
    """Its values that stand for null."""
    off: bool = False
    """The switch that sets the key to false."""
    always: bool = False
    """True if exports write the flag even if leaving it out means the same."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Key:
    """The annotation of a key: what it feeds, when it has an effect, and its names elsewhere.

    The tables of `core_fields`, `conditional`, `keys` and of `recipes` are derived from it. What
    must be computed is a function there.
    """

    feeds: str = ""
    """The fields of megatron-core that get its value unchanged, separated by spaces: of
    TransformerConfig, or of `gpt.`, `mla.`, `ddp.`, `wrap.`, `fsdp.`, `optimizer.`, `scheduler.`.
    SAME and `OWNER.` are fields with megatron-core's name of the key. If a key with `when` is null,
    megatron-core's default stays.
    """
    when: str = ""
    """The condition under which the key has an effect, as `parallel.vpp>1 and parallel.fsdp=none`;
    see `condition`.
    """
    null: Any = None
    """The value of null if the key has an effect."""
    effect: Effect | None = None
    """The effect of changing it; None: that of its section."""
    flag: str | Flag = ""
    """Its flag in Megatron-LM; SAME: that of the field that it feeds."""
    hf: str = ""
    """Its names in `config.json` of Hugging Face models, separated by spaces, Llama's first."""
    aka: str = ""
    """Names in other systems, separated by spaces, that only messages use."""
    unit: str = ""
    """The unit of a number, if neither type nor name state it."""

    def named(self, own: str) -> Self:
        """Return the annotation of the key that megatron-core calls `own`, with every SAME
        replaced by a name.
        """
        feeds = [
            f"{word.removeprefix(SAME)}{own}" if word.endswith(SAME) else word
            for word in self.feeds.split()
        ]
        flag = Flag(self.flag) if isinstance(self.flag, str) and self.flag else self.flag
        if isinstance(flag, Flag) and flag.name == SAME:
            field = feeds[0].rpartition(".")[2] if feeds else own
            flag = replace(flag, name=f"--{field.replace('_', '-')}")
        return replace(self, feeds=" ".join(feeds), flag=flag)


class Section(BaseModel):
    """A frozen, strict group of keys: no unknown key, no silent conversion, documented fields."""

    core_prefix: ClassVar[str] = ""
    """Beginning of its keys' names in megatron-core, which the names here leave out."""
    model_config = ConfigDict(
        frozen=True,
        strict=True,
        defer_build=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


# A name that becomes part of a path or of a line.
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
# A bound that no run exceeds: a trillion steps, tokens of a sample or samples of a step.
MOST = 1 << 40
# A bound that no cluster exceeds.
MOST_RANKS = 1 << 20
PositiveInt = Annotated[int, Field(ge=1, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
# A number of ranks that share something, of machines or of devices.
Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
# A number of channels, heads, layers, experts or table rows: no weight matrix has a larger side.
Width = Annotated[int, Field(ge=1, le=1 << 27)]
PositiveFloat = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=10**8)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# The weight of a loss of squares; usual ones are 1e-4 to 1e-2, and some thousands underflow in
# fp16.
SquareWeight = Annotated[float, Field(ge=0, le=1000)]
# The share of an average that remains after each step.
Beta = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
