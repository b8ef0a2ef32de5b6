"""A LLaVA small enough for a laptop: a narrow language model, and a vision tower of two layers and
four patches.
"""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.gpt.shrink import HEAD
from mtrain.models.gpt.shrink import shrink as shrink_language
from mtrain.models.llava.config import LlavaConfig

PATCH = 4


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """`model` with so many layers of its language model, for the layout `p` and sequences of
    `seq_length`.

    A layer of the vision tower stays behind the features where there was one. What is frozen stays
    frozen.
    """
    own = LlavaConfig.of(model)
    language = shrink_language(model, p, layers=layers, seq_length=seq_length)
    behind = min(1, own.unused_layers)
    heads = max(2, p.tp)
    small = own.model_copy(
        update={
            "image_size": 2 * PATCH,
            "patch_size": PATCH,
            "vision_layers": 2 + behind,
            "vision_hidden_size": heads * HEAD,
            "vision_ffn_hidden_size": 2 * heads * HEAD,
            "vision_heads": heads,
            "feature_layer": 2,
            "image_token_id": language.vocab_size - 1,
        }
    )
    return language.model_copy(update={"llava": small})
