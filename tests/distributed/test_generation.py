"""Generated text: the same with and without a cache of keys and values, in a batch or by itself, in
any layout.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain.config.schema.linear_attention import LinearAttentionConfig
from mtrain.config.schema.model import MLAConfig, MoEConfig
from mtrain.models.hybrid.config import HybridConfig
from mtrain.train.generate.request import Sampling
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run

LATENT = {
    "mla": MLAConfig(
        q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16
    )
}
EXPERTS = {"moe": MoEConfig(num_experts=4, ffn_hidden_size=64)}
LEARNED = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
}
NEXT = {
    "linear_attention": LinearAttentionConfig(
        freq=2, num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8
    ),
    "attention_output_gate": True,
}
MIXERS: dict[str, Any] = {
    "family": "hybrid",
    "num_layers": 5,
    "position_embedding_type": "rope",
    "hybrid": HybridConfig(
        pattern="MM*-M", num_heads=4, head_dim=16, state_dim=8, num_groups=2, chunk_size=4
    ),
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped queries": ({}, {}),
    "latent": ({**LATENT, "num_query_groups": None}, {}),
    "window": ({"window_size": 6}, {}),
    "sinks and every other layer windowed": (
        {"softmax_type": "learnable", "window_size": 6, "window_attn_skip_freq": 2},
        {},
    ),
    "learned positions": (LEARNED, {}),
    "tp2": ({}, {"ranks": 2, "tp": 2}),
    "tp2 sequence parallel": (LEARNED, {"ranks": 2, "tp": 2, "sequence_parallel": True}),
    "latent tp2 sequence parallel": (
        {**LATENT, "num_query_groups": None},
        {"ranks": 2, "tp": 2, "sequence_parallel": True},
    ),
    "linear attention pp2vpp2": (NEXT, {"ranks": 2, "pp": 2, "vpp": 2}),
    "hybrid pp2": (MIXERS, {"ranks": 2, "pp": 2, "layers_per_stage": (2, 3)}),
    "hybrid tp2": (MIXERS, {"ranks": 2, "tp": 2}),
    "hybrid tp2 sequence parallel, without a cache": (
        MIXERS,
        {"ranks": 2, "tp": 2, "sequence_parallel": True},
    ),
    "pp2": ({}, {"ranks": 2, "pp": 2}),
    "pp2vpp2": ({}, {"ranks": 2, "pp": 2, "vpp": 2}),
    "ep2": (EXPERTS, {"ranks": 2, "ep": 2}),
    "multi-token prediction tp2": ({"mtp_num_layers": 1}, {"ranks": 2, "tp": 2}),
}
PROMPTS = [[5, 17, 8, 250, 31], [9] * 11, list(range(40, 57))]
TOKENS = 24
"""Beyond the 32 tokens of the context for every prompt."""
LIVELY = {"seed": 3}
"""Weights with which no case soon repeats the same token for ever."""


def _texts(
    run: Any, cache: bool, prompts: list[list[int]], sampling: Sampling, forgets: str = ""
) -> Any:
    from mtrain.assembly.model import build_model
    from mtrain.mcore import api as mcore
    from mtrain.train.generate.sampler import Sampler
    from mtrain.world.init import joined

    torch.set_num_threads(1)
    with joined(run) as world, torch.no_grad():
        chunks = build_model(run, world, wrap=False)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if (
                    parameter.ndim > 1
                ):  # layers that change what passes through them, and logits that are far apart
                    parameter.mul_(8.0)
                elif "softmax_offset" in name:
                    parameter.copy_(torch.linspace(-1, 3, len(parameter)))
        if forgets:
            advance = mcore.Cache.advance

            def forgetful(self: Any, tokens: int) -> None:
                for _, values in list(self.key_value_memory_dict.values())[
                    :1
                ]:  # of the first layer with attention
                    values.zero_()
                for state in self.states.values():
                    (state.state if forgets == "states" else state.tail).zero_()
                advance(self, tokens)

            mcore.Cache.advance = forgetful  # type: ignore[method-assign]
        found = Sampler(run, world, chunks, cache=cache).continued(prompts, sampling)
        assert found is not None
        return [text.ids for text in found]


def _alone_without_a_cache(run: Any, sampling: Sampling) -> list[list[int]]:
    return [run_ranks(1, _texts, run, False, [prompt], sampling)[0][0] for prompt in PROMPTS]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "name",
    some(
        CASES,
        [
            "sinks and every other layer windowed",
            "linear attention pp2vpp2",
            "multi-token prediction tp2",
            "hybrid pp2",
        ],
    ),
)
def test_generation_cache_keeps_tokens_for_unequal_prompts(name: str) -> None:
    model, layout = CASES[name]
    greedy = Sampling(TOKENS, temperature=0)
    run = tiny_run(model=model, trainer=LIVELY, **layout)
    expected = _alone_without_a_cache(tiny_run(model=model, trainer=LIVELY), greedy)
    assert all(len(set(text)) > TOKENS // 3 for text in expected), (
        "texts that repeat themselves show nothing"
    )
    for texts in run_ranks(run.parallel.ranks or 1, _texts, run, True, PROMPTS, greedy):
        assert texts == expected


MAMBA = {**MIXERS, "num_layers": 2, "hybrid": MIXERS["hybrid"].model_copy(update={"pattern": "MM"})}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "what"),
    [
        ({}, "values"),
        *(
            pytest.param(MAMBA, what, marks=pytest.mark.full)
            for what in ("states", "inputs of convolutions")
        ),
    ],
)
def test_generation_forgetting_cache_is_found(model: dict[str, Any], what: str) -> None:
    greedy = Sampling(TOKENS, temperature=0)
    run = tiny_run(model=model)
    whole, spoilt = (run_ranks(1, _texts, run, True, PROMPTS, greedy, f)[0] for f in ("", what))
    assert all(a != b for a, b in zip(whole, spoilt, strict=True))


def test_generation_draws_follow_seed_only() -> None:
    run = tiny_run()
    drawn = Sampling(12, temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=3)
    expected = _alone_without_a_cache(run, drawn)
    assert run_ranks(1, _texts, run, True, PROMPTS, drawn)[0] == expected
    assert run_ranks(1, _texts, run, True, PROMPTS, replace(drawn, seed=4))[0] != expected


def test_generation_limited_capacity_has_no_cache() -> None:
    from mtrain.mcore.layers.cache import obstacle

    def config(**fields: Any) -> Any:
        plain = {
            "apply_rope_fusion": False,
            "multi_latent_attention": False,
            "moe_expert_capacity_factor": None,
        }
        return SimpleNamespace(**(plain | {"experimental_attention_variant": None} | fields))

    assert obstacle(config(), "reference") == ""
    assert "indexer" in obstacle(config(experimental_attention_variant="dsa"), "reference")
    assert "capacity" in obstacle(config(moe_expert_capacity_factor=1.0), "reference")
    assert "TransformerEngine" in obstacle(config(), "te")
    assert "MLA" in obstacle(
        config(apply_rope_fusion=True, multi_latent_attention=True), "reference"
    )
