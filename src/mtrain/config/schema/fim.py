"""The keys of `data.fim`."""

from typing import Annotated

from pydantic import Field

from mtrain.config.schema.base import Key, NonNegativeInt, Section


class FimConfig(Section):
    """`data.fim`: documents whose middle is read behind their end, so that a model learns to fill
    it in.
    """

    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the documents of a sample that are read so; 0: none."""
    spm_rate: Annotated[Annotated[float, Field(ge=0, le=1)], Key(when="data.fim.rate")] = 0.5
    """Share of those in which the suffix stands before the prefix (SPM), not behind it (PSM)."""
    ids: Annotated[
        tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] | None, Key(when="data.fim.rate")
    ] = Field(default=None, strict=False)
    """Ids of the tokens that mark prefix, suffix and middle."""
