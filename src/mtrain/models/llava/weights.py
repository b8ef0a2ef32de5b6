"""The weights of LLaVA on one rank: the language model's, and on the first stage those of tower and
projector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.gpt import weights as language
from mtrain.models.llava.config import LlavaConfig
from mtrain.models.llava.count import of
from mtrain.models.weights import Weight, column, row


def stage_weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield the weights of a (virtual) stage."""
    own = of(m)
    frozen = set(own.freeze)
    for weight in language.stage_weights(m, p, held):
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
