"""Positions of a model's tensors in a checkpoint: those of its family equal megatron-core's."""

from __future__ import annotations

import pytest

from mtrain.config.compose.choices import choices_of_group
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.convert.boxes import boxes_from_family, boxes_from_megatron
from tests.support.configs import LAPTOP
from tests.support.forked import run_alone

TINY, LARGE = (
    [n for n in choices_of_group("model") if ("tiny" in n) == small] for small in (True, False)
)
OTHERS = (
    ("llama_tiny", "model.mtp_num_layers=2", "model.tie_word_embeddings=true"),
    ("mixtral_tiny", "model.qk_layernorm=true", "model.moe.router_enable_expert_bias=false"),
    (
        "nemotron_h_tiny",
        "model.num_layers=4",
        "model.hybrid.pattern=MG*-",
        "model.linear_attention={}",
    ),
    (
        "nemotron_h_tiny",
        "model.num_layers=4",
        "model.hybrid.pattern=M+-E",
        "model.mla={q_lora_rank:64}",
        "model.qk_layernorm=true",
        "model.position_embedding_type=rope",
        "model.num_query_groups=null",
        "model.moe={num_experts:4,ffn_hidden_size:64}",
    ),
    (
        "llama_tiny",
        "model.normalization=LayerNorm",
        "model.add_bias_linear=true",
        "model.norm_placement=post",
    ),
)


def unlike(models: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the models for which megatron-core has other positions."""
    out = []
    for name, *words in models:
        run = resolve(compose([f"model={name}", "data=mock", *words]).run, LAPTOP)
        out += [(name, *words)] * (boxes_from_family(run) != boxes_from_megatron(run))
    return out


@pytest.mark.engine
@pytest.mark.parametrize("models", [[(n,) for n in TINY] + list(OTHERS)], ids=["tiny"])
def test_convert_boxes_equal_megatron_shards(models: list[tuple[str, ...]]) -> None:
    assert run_alone(lambda: unlike(models)) == []


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_convert_boxes_equal_megatron_shards_of_published_models(name: str) -> None:
    model = compose([f"model={name}"]).run.model
    few = ("model.num_layers=4",) if model.moe is not None and model.hybrid is None else ()
    assert run_alone(lambda: unlike([(name, *few)])) == []
