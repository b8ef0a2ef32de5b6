"""`model.ngram`: the keys of the family, and its limits."""

from typing import Annotated, ClassVar

from pydantic import Field

from mtrain.config.families import NO_ADAPTERS, FamilyConfig, FamilySection, Limit
from mtrain.config.schema.base import Width

_NEIGHBOURS = "an n-gram needs the tokens before it, which another rank or document may have"


class NgramConfig(FamilySection):
    """`model.ngram`: embeddings of the last 2 to `longest` tokens, added to those of tokens."""

    FAMILY: ClassVar[str] = "ngram"

    longest: Annotated[int, Field(ge=2, le=8)] = 3
    """Tokens of the longest n-gram: 3 means a table of pairs and one of triples."""
    rows: Width = 16384
    """Rows of each table; n-grams with the same hash share a row."""


CONFIG = FamilyConfig(
    section=NgramConfig,
    about="The family ngram: embeddings of the last tokens together; null: another family.",
    limits=(
        NO_ADAPTERS,
        Limit("parallel.cp", (1,), _NEIGHBOURS),
        Limit("parallel.hybrid_context_parallel", (False,), _NEIGHBOURS),
        Limit("data.packed", (False,), _NEIGHBOURS),
        Limit("parallel.fsdp", ("none",), "the tables are not sharded"),
        Limit("model.mtp_num_layers", (None,), "MTP layers embed tokens by themselves"),
        Limit("trainer.sample_tokens", (0,), "text is not generated"),
    ),
)
