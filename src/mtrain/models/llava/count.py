"""Parameters and floating-point operations of LLaVA, from its configuration only."""

from __future__ import annotations

from mtrain.config.schema.model import ModelConfig
from mtrain.models.gpt import count as language
from mtrain.models.llava.config import LlavaConfig


def of(model: ModelConfig) -> LlavaConfig:
    """Return the section `model.llava`, which every model of the family has."""
    assert model.llava is not None
    return model.llava


def parameters(model: ModelConfig) -> int:
    """Return all parameters, frozen ones and those of the layers behind the features included."""
    return language.parameters(model) + vision_parameters(of(model)) + projector_parameters(model)


def frozen_parameters(model: ModelConfig) -> int:
    """Return the parameters that have neither gradient nor optimizer state."""
    own = of(model)
    parts = {
        "vision": vision_parameters(own),
        "projector": projector_parameters(model),
        "language": language.parameters(model),
    }
    behind = 0 if "vision" in own.freeze else unused_parameters(own)
    return behind + sum(parts[part] for part in set(own.freeze))


def expert_parameters(model: ModelConfig) -> int:
    """None: the language model is dense."""
    return 0


def vision_parameters(own: LlavaConfig) -> int:
    """Return the parameters of the vision tower: patches, class token, positions, layers and the
    norms around them.
    """
    h = own.vision_hidden_size
    embedding = 3 * own.patch_size**2 * h + h + (own.image_tokens + 1) * h
    return embedding + 2 * 2 * h + own.vision_layers * _layer(own)


def unused_parameters(own: LlavaConfig) -> int:
    """Return the parameters of the layers after the features, and of the last norm."""
    return own.unused_layers * _layer(own) + 2 * own.vision_hidden_size


def projector_parameters(model: ModelConfig) -> int:
    """Return the parameters of the projector's two layers."""
    own = of(model)
    h = model.hidden_size
    return own.vision_hidden_size * h + h * h + (2 * h if own.projector_bias else 0)


def _layer(own: LlavaConfig) -> int:
    h = own.vision_hidden_size
    f = own.vision_ffn_hidden_size
    return 4 * h * (h + 1) + h * f + f + f * h + h + 4 * h


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation; every
    sample has one image.

    Of the language model as `mtrain.models.gpt.count` has it; of vision tower and projector the
    products of an image, over the tokens of a sample. A frozen part has no weight gradients, and
    what is in front of every trained part no backward at all.
    """
    own = of(model)
    frozen = set(own.freeze)
    text = language.flops_per_token(model, seq_length, causal=causal)
    if "language" in frozen:  # a third of what its weights take; attention between tokens has none
        text -= language.flops_per_token(model, 0, causal=causal) / 3
    h = own.vision_hidden_size
    f = own.vision_ffn_hidden_size
    patches = own.image_tokens
    # 2 of a forward for each weight and patch, the class token among them; 4 for each channel of
    # keys and values
    products = 3 * own.patch_size**2 * h * patches
    products += own.used_layers * (patches + 1) * (4 * h * h + 2 * h * f + 2 * h * (patches + 1))
    tower = 2.0 * products * (1 if "vision" in frozen else 3)
    weights = (own.vision_hidden_size + model.hidden_size) * model.hidden_size
    if "projector" not in frozen:
        backward = 2
    else:
        backward = 1 if "vision" not in frozen else 0
    return text + (tower + 2.0 * weights * patches * (1 + backward)) / seq_length
