"""A rank's chunk of LLaVA: a language model; on stage 0 also vision tower and projector."""

from __future__ import annotations

from typing import Any

from mtrain.config.engine.kernels import operands_apart
from mtrain.config.schema.run import RunConfig
from mtrain.mcore.layers import backend
from mtrain.mcore.layers.recipe import recipe
from mtrain.mcore.models.image_language_model import ImageLanguageModel
from mtrain.models.gpt.build import chunk as language_chunk
from mtrain.models.llava.config import LlavaConfig


def chunk(run: RunConfig, config: Any, stage: int | None) -> ImageLanguageModel:
    """Return the layers of one pipeline stage of this rank."""
    provider = backend.provider(run.kernels, fp8=recipe(run), operands=operands_apart(run) is None)
    more = {"own": LlavaConfig.of(run.model), "provider": provider}
    built: ImageLanguageModel = language_chunk(
        run, config, stage, kind=ImageLanguageModel, more=more
    )
    return built
