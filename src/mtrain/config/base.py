"""The base of every schema, and what changing a key does to a run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Effect(StrEnum):
    """What changing a key changes. Used to validate a resume and to compare two recipes."""

    NUMBERS = "numbers"
    """The weights that come out."""
    SHAPE = "shape"
    """What the weights are: a checkpoint of the other value cannot be continued."""
    LAYOUT = "layout"
    """How the work is cut: the same numbers up to the order of summation."""
    OPERATION = "operation"
    """Speed, output and storage: no effect on the weights."""


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
"""Over how many ranks something is cut, or how many machines or devices there are."""
Width = Annotated[int, Field(ge=1, le=1 << 27)]
"""Channels, heads, layers, experts or rows of a table: no weight matrix has a larger side."""
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
"""Share of an average that each step leaves of it."""
Probability = Annotated[float, Field(ge=0, lt=1)]
