"""Fields of megatron-core that each key feeds, found by watching the tables read."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.engine.core_fields import feeds, transformer_values
from mtrain.config.messages.keys import schema_keys
from mtrain.config.resolve.resolution import resolve
from tests.support.configs import LAPTOP, MOE, tiny

MLA = {"kv_lora_rank": 32, "rope_type": "yarn"}


def _feeds(**changes: Any) -> dict[str, list[str]]:
    return feeds(resolve(tiny(**changes), LAPTOP))


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("model.num_layers", "TransformerConfig.num_layers"),
        ("model.num_layers", "TransformerConfig.output_layer_init_method"),
        ("model.hidden_size", "TransformerConfig.kv_channels"),
        ("model.activation", "TransformerConfig.gated_linear_unit"),
        ("model.vocab_size", "GPTModel.vocab_size"),
        ("parallel.tp", "TransformerConfig.expert_tensor_parallel_size"),
        ("parallel.vpp", "TransformerConfig.overlap_p2p_comm"),
        ("precision.dtype", "OptimizerConfig.params_dtype"),
        ("optim.lr", "OptimizerParamScheduler.max_lr"),
        ("trainer.train_iters", "OptimizerParamScheduler.lr_decay_steps"),
        ("parallel.overlap_grad_reduce", "DistributedDataParallelConfig.overlap_grad_reduce"),
    ],
)
def test_core_fields_key_feeds_its_readers(key: str, field: str) -> None:
    assert field in _feeds()[key]


def test_core_fields_own_key_feeds_nothing() -> None:
    found = _feeds()
    for key in ("data.path", "trainer.seed", "log.interval", "cluster.nodes"):
        assert key not in found


def test_core_fields_moe_and_mla_feed_their_place() -> None:
    assert "model.moe.router_topk" not in _feeds()
    experts = _feeds(model__moe=MOE)
    assert experts["model.moe.router_topk"] == ["TransformerConfig.moe_router_topk"]
    latent = _feeds(model__mla=MLA, model__num_query_groups=None)
    assert latent["model.mla.mscale"] == ["MLATransformerConfig.mscale"]


def test_core_fields_only_schema_keys_are_found() -> None:
    both = _feeds(model__moe=MOE, model__mla=MLA, model__num_query_groups=None)
    assert both.keys() <= schema_keys().keys()


def test_core_fields_rope_scaling_is_passed_on_request() -> None:
    plain, yarn = (
        transformer_values(resolve(tiny(model__mla=mla, model__num_query_groups=None), LAPTOP))
        for mla in ({"kv_lora_rank": 32}, MLA)
    )
    assert "mscale" not in plain
    assert plain["q_lora_rank"] is None, (
        "null is a value here, where megatron-core's default is 512"
    )
    assert yarn["mscale"] == 1.0
