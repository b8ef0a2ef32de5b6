"""Which field of megatron-core a key feeds is found by watching the tables read."""

from __future__ import annotations

import pytest

from mtrain.config.engine.core_fields import feeds, transformer_values
from mtrain.config.messages.keys import schema_keys
from mtrain.config.resolve.resolution import resolve
from tests.support.configs import LAPTOP, MOE, tiny

MLA = {"kv_lora_rank": 32, "rope_type": "yarn"}


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
def test_a_key_feeds_the_fields_that_read_it(key: str, field: str) -> None:
    assert field in feeds(tiny())[key]


def test_a_key_that_mtrain_reads_alone_feeds_nothing() -> None:
    found = feeds(tiny())
    for key in ("data.path", "trainer.seed", "log.interval", "cluster.nodes"):
        assert key not in found


def test_experts_and_latent_attention_feed_where_they_are() -> None:
    assert "model.moe.router_topk" not in feeds(tiny())
    experts = feeds(tiny(model__moe=MOE))
    assert experts["model.moe.router_topk"] == ["TransformerConfig.moe_router_topk"]
    latent = feeds(tiny(model__mla=MLA, model__num_query_groups=None))
    assert latent["model.mla.mscale"] == ["MLATransformerConfig.mscale"]


def test_only_keys_of_the_schema_are_found() -> None:
    both = tiny(model__moe=MOE, model__mla=MLA, model__num_query_groups=None)
    assert feeds(both).keys() <= schema_keys().keys()


def test_stretched_positions_are_handed_on_only_where_they_are_asked_for() -> None:
    plain, yarn = (
        transformer_values(resolve(tiny(model__mla=mla, model__num_query_groups=None), LAPTOP))
        for mla in ({"kv_lora_rank": 32}, MLA)
    )
    assert "mscale" not in plain
    assert plain["q_lora_rank"] is None, (
        "null is a value here, where megatron-core's default is 512"
    )
    assert yarn["mscale"] == 1.0
