"""LLaVA-1.5: a language model that reads images by a CLIP vision transformer and a projector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.base import Family
from mtrain.models.gpt import count as language
from mtrain.models.gpt import weights as language_weights
from mtrain.models.gpt.shrink import HEAD
from mtrain.models.gpt.shrink import shrink as shrink_language
from mtrain.models.gpt.torch_dist import saved_as
from mtrain.models.llava.config import LlavaConfig
from mtrain.models.llava.graph import stage
from mtrain.models.weights import Weight, column, row

PATCH = 4


def stage_weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield the weights of a (virtual) stage."""
    own = LlavaConfig.of(m)
    frozen = set(own.freeze)
    for weight in language_weights.stage_weights(m, p, held):
        yield replace(weight, frozen="language" in frozen)
    if not held.embedding:
        return
    for weight in _tower(own, p.tp):
        behind = weight.name.startswith(("vision.behind.", "vision.post_layernorm."))
        yield replace(weight, frozen=behind or "vision" in frozen)
    h = m.hidden_size
    wide = own.vision_hidden_size
    bias = own.projector_bias
    for weight in (
        *column("projector.linear_fc1", "vision", h, wide, p.tp, bias=bias),
        *row("projector.linear_fc2", "vision", h, h, p.tp, bias=bias),
    ):
        yield replace(weight, frozen="projector" in frozen)


def _tower(own: LlavaConfig, tp: int) -> Iterator[Weight]:
    h = own.vision_hidden_size
    patch = own.patch_size
    yield Weight("vision.class_embedding", (h,), "vision", whole=True)
    yield Weight("vision.patch_embedding", (h, 3, patch, patch), "vision", whole=True)
    yield Weight("vision.position_embedding", (own.image_tokens + 1, h), "vision", whole=True)
    yield from _norm("vision.pre_layernorm", h)
    for stack, layers in (("encoder", own.used_layers), ("behind", own.unused_layers)):
        for number in range(layers):
            yield from _layer(own, f"vision.{stack}.layers.{number}", tp)
    yield from _norm("vision.post_layernorm", h)


def _norm(name: str, width: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (width,), "norm", whole=True)
    yield Weight(f"{name}.bias", (width,), "norm", whole=True)


def _layer(own: LlavaConfig, name: str, tp: int) -> Iterator[Weight]:
    h = own.vision_hidden_size
    f = own.vision_ffn_hidden_size
    yield from _norm(f"{name}.input_layernorm", h)
    yield from row(f"{name}.self_attention.linear_proj", "vision", h, h, tp, bias=True)
    yield from column(f"{name}.self_attention.linear_qkv", "vision", 3 * h, h, tp, bias=True)
    yield from _norm(f"{name}.pre_mlp_layernorm", h)
    yield from column(f"{name}.mlp.linear_fc1", "vision", f, h, tp, bias=True)
    yield from row(f"{name}.mlp.linear_fc2", "vision", h, f, tp, bias=True)


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation; every
    sample has one image.

    Of the language model as `mtrain.models.gpt.count` has it; of vision tower and projector the
    products of an image, over the tokens of a sample. A frozen part has no weight gradients, and a
    part before every trained one has no backward.
    """
    own = LlavaConfig.of(model)
    frozen = set(own.freeze)
    text = language.flops_per_token(model, seq_length, causal=causal)
    if "language" in frozen:  # a third of the weights' FLOPs; attention between tokens has none
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


def shrink(model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """Return `model` with so many layers of its language model, for the layout `p` and sequences of
    `seq_length`.

    A layer of the vision tower stays after the features if there was one. Frozen parts stay
    frozen.
    """
    own = LlavaConfig.of(model)
    small_language = shrink_language(model, p, layers=layers, seq_length=seq_length)
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
            "image_token_id": small_language.vocab_size - 1,
        }
    )
    return small_language.model_copy(update={"llava": small})


FAMILY = Family(
    name="llava",
    builder="mtrain.models.llava.build:chunk",
    collator="mtrain.models.llava.data:collator",
    files="mtrain.models.llava.hf:files",
    auto_class="AutoModelForImageTextToText",
    probe="mtrain.models.llava.data:probe",
    writes=False,
    predicts_all=False,
    flops_per_token=flops_per_token,
    shrink=shrink,
    weights=stage_weights,
    alike=language_weights.alike,
    buffers=language_weights.buffers,
    saved_as=saved_as,
    stage=stage,
)
