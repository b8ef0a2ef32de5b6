"""Model families in layouts of their own: losses, norms, weights and parameter counts equal one
rank's.
"""

from pathlib import Path
from typing import Any

import pytest

from mtrain.config.schema.linear_attention import LinearAttentionConfig
from mtrain.config.schema.model import MLAConfig, MoEConfig
from mtrain.plan.count import parameters
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

STEPS = 3
MOE = MoEConfig(
    num_experts=4, ffn_hidden_size=64, first_dense_layers=1, aux_loss_coeff=0.1, z_loss_coeff=0.01
)
BIASED = MoEConfig(
    num_experts=4,
    ffn_hidden_size=64,
    shared_expert_intermediate_size=64,
    router_score_function="sigmoid",
    router_enable_expert_bias=True,
    router_load_balancing_type="none",
)
LATENT = MLAConfig(
    q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
)
NEXT: dict[str, Any] = {
    "linear_attention": LinearAttentionConfig(
        freq=2, num_key_heads=4, num_value_heads=8, key_head_dim=8, value_head_dim=16
    ),
    **{"attention_output_gate": True, "qk_layernorm": True, "layernorm_zero_centered_gamma": True},
    **{"rotary_percent": 0.5, "kv_channels": 16},
}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt tp2pp2 sequence parallel": (
        {
            "activation": "gelu",
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "position_embedding_type": "learned_absolute",
            "num_query_groups": None,
        },
        {"ranks": 4, "tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "qwen3 tied tp2pp2": (
        {"qk_layernorm": True, "kv_channels": 16, "tie_word_embeddings": True},
        {"ranks": 4, "tp": 2, "pp": 2},
    ),
    "gemma 3 tied tp2pp2": (
        {
            **{
                "qk_layernorm": True,
                "kv_channels": 16,
                "tie_word_embeddings": True,
                "activation": "geglu_tanh",
            },
            **{
                "norm_placement": "pre_and_post",
                "layernorm_zero_centered_gamma": True,
                "scale_embedding": True,
            },
            **{"window_size": 8, "window_attn_skip_freq": 2, "rotary_base_local": 100.0},
            "attn_logit_softcapping": 1.0,
        },
        {"ranks": 4, "tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "olmo 2 tp4 with fewer keys": (
        {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True},
        {"ranks": 4, "tp": 4},
    ),
    "moe ep2": ({"moe": MOE}, {"ranks": 2, "ep": 2}),
    "moe tp2ep2 with whole experts": (
        {"moe": MOE},
        {"ranks": 4, "tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    ),
    "biased router and shared expert ep2": ({"moe": BIASED}, {"ranks": 2, "ep": 2}),
    "qwen3 next tp2pp2": (NEXT, {"ranks": 4, "tp": 2, "pp": 2}),
    "qwen3 next tp4 with fewer keys, sequence parallel": (
        {**NEXT, "num_query_groups": 2, "moe": MOE},
        {"ranks": 4, "tp": 4, "sequence_parallel": True},
    ),
    "mla tp2": (
        {"mla": LATENT, "num_query_groups": None, "qk_layernorm": True},
        {"ranks": 2, "tp": 2},
    ),
}
REMEMBERS = 1
"""A seed with which a head of each linear-attention layer remembers.

With most seeds all four forget at once, and the gradients of their decays are rounding.
"""
ALWAYS = ["moe tp2ep2 with whole experts", "qwen3 next tp2pp2"]


def _train(run: object, folder: Path) -> list[tuple[float, float]]:
    return train_steps(run, STEPS, save_to=folder)  # type: ignore[arg-type]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(CASES, ALWAYS))
def test_families_train_sharded_as_one_rank(name: str, tmp_path: Path) -> None:
    model, layout = CASES[name]
    trainer = {"seed": REMEMBERS} if "qwen3 next" in name else {}
    whole = tiny_run(model=model, trainer=trainer)
    sharded = tiny_run(model=model, trainer=trainer, **layout)
    expected = run_ranks(1, _train, whole, tmp_path / "one")[0]
    values = run_ranks(sharded.parallel.ranks, _train, sharded, tmp_path / "many")[0]
    for (loss, norm), (expected_loss, expected_norm) in zip(values, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    one, many = (whole_tensors(tmp_path / n / f"step_{STEPS:08d}") for n in ("one", "many"))
    assert one.keys() == many.keys()
    for key, weight in one.items():
        error = (many[key] - weight).norm() / weight.norm().clamp_min(1e-12)
        # Adam divides by the root of a gradient's square: where a bias has next to none, rounding
        # decides its sign.
        assert error < (1e-3 if "bias" in key else 2e-5), (key, float(error))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CASES)
def test_families_plan_counts_built_parameters(name: str, tmp_path: Path) -> None:
    model, layout = CASES[name]
    run = tiny_run(model=model, **layout)

    def job() -> int:
        from mtrain.assembly.model import build_model
        from mtrain.mcore.state.sharding import model_shards
        from mtrain.world.init import joined

        with joined(run) as world:
            shards = model_shards(build_model(run, world), trainable=True)
            return sum(shard.tensor.numel() for shard in shards if shard.primary)

    assert sum(run_ranks(run.parallel.ranks, job)) == parameters(run.model)
