"""`model.published`: what a report says of a model's training."""

from typing import Annotated

from pydantic import Field

from mtrain.config.schema.base import PositiveFloat, PositiveInt, Section


class PublishedConfig(Section):
    """`model.published`: how the model was trained, for `optim.lr` and `trainer.global_batch_size`
    that are null.
    """

    peak_lr: PositiveFloat | None = None
    """Largest learning rate; null: not published."""
    batch_tokens: PositiveInt | None = None
    """Tokens per optimizer step; null: not published."""
    source: Annotated[str, Field(max_length=200)]
    """Where that is said."""
