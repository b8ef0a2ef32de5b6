"""A family of decoder-only transformers whose token embedding is not trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.gpt.family import FAMILY as GPT
from mtrain.models.gpt.weights import stage_weights
from mtrain.models.weights import Weight

EMBEDDING = "embedding.word_embeddings.weight"


def chunk(run: RunConfig, config: Any, stage: int | None) -> Any:
    """Build this rank's chunk as the GPT family does, and freeze its embedding.

    The module is imported only here, because it needs torch.
    """
    from mtrain.models.gpt import build

    model = build.chunk(run, config, stage)
    for name, parameter in model.named_parameters():
        if name == EMBEDDING:
            parameter.requires_grad = False
    return model


def weights(model: ModelConfig, parallel: ParallelConfig, stage: Stage) -> Iterator[Weight]:
    """Yield the weights of a stage, with the embedding marked as frozen."""
    for weight in stage_weights(model, parallel, stage):
        yield replace(weight, frozen=weight.name == EMBEDDING)


FAMILY = replace(
    GPT,
    name="frozen_embedding",
    builder="frozen_embedding:chunk",
    weights=weights,
)
