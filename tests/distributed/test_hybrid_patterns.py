"""Patterns with MLA, sparse attention and gated delta nets: layouts compute what one rank does, and
what a decoder- only transformer of the same layers computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.resolve.stages import pattern
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import held_stages
from mtrain.plan.count import adapter_parameters, parameters
from mtrain.plan.states import stage_weights
from tests.distributed.test_builders import DEEPSEEK, built_as
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import train_steps, trained, whole_tensors

NEMOTRON = "model=nemotron_h_tiny model.num_layers=6"
DELTA = (
    "model.linear_attention={num_key_heads:4,num_value_heads:8,key_head_dim:16,value_head_dim:16}"
)
LATENT = (
    "model.mla={q_lora_rank:32,kv_lora_rank:32,qk_head_dim:16,qk_pos_emb_head_dim:8,v_head_dim:16}"
)
EXPERTS = "model.moe={num_experts:4,ffn_hidden_size:64}"
TURNED = "model.position_embedding_type=rope model.num_query_groups=null model.qk_layernorm=true"
SPARSE = "model.dsa={indexer_n_heads:4,indexer_head_dim:16,indexer_topk:8}"
PATTERNS = {
    "gated delta nets": f"{NEMOTRON} model.hybrid.pattern=MG*-GM {DELTA}",
    "latent attention": f"{NEMOTRON} model.hybrid.pattern=M+-E+M {LATENT} {EXPERTS} {TURNED}",
    "sparse attention": f"{NEMOTRON} model.hybrid.pattern=MD-D-M {LATENT} {TURNED} {SPARSE}",
}
LAYOUTS = ("tp2sp", "pp2", "tp2pp2sp")
CASES = {f"{name} {layout}": (name, layout) for name in PATTERNS for layout in LAYOUTS}


def hybrid(name: str, layout: str) -> RunConfig:
    return built_as("gpt", f"{PATTERNS[name]} parallel={layout}")


def _train(run: RunConfig, home: Path) -> tuple[list[tuple[float, float]], int]:
    """Return two steps, a checkpoint after them, and the number of parameters that only this rank
    counts; a job for a rank.
    """
    from mtrain.assembly.model import build_model
    from mtrain.mcore.state.sharding import model_shards
    from mtrain.world.init import joined

    with joined(run) as world:
        shards = model_shards(build_model(run, world, drawn=False), trainable=True)
        own = sum(shard.tensor.numel() for shard in shards if shard.primary)
    return train_steps(run, 2, save_to=home), own


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_hybrid_patterns_layout_equals_one_rank_and_plan(name: str, tmp_path: Path) -> None:
    model, layout = CASES[name]
    one = hybrid(model, "single")
    run = hybrid(model, layout)
    expected = run_ranks(1, _train, one, tmp_path / "one")
    found = run_ranks(run.parallel.ranks or 1, _train, run, tmp_path / "many")
    for here, there in zip(found[0][0], expected[0][0], strict=True):
        assert here == pytest.approx(there, rel=1e-5)
    assert sum(own for _, own in found) == expected[0][1] == parameters(run.model)
    weights, many = (whole_tensors(tmp_path / side / "step_00000002") for side in ("one", "many"))
    assert weights.keys() == many.keys()
    for key, weight in weights.items():
        # Adam divides by the root of a gradient's square: where there is next to none, rounding
        # decides its sign.
        loose = 1e-2 if key.endswith(("bias", "A_log")) else 1e-4
        assert (many[key] - weight).norm() <= loose * weight.norm().clamp_min(1e-12), key


OF_LAYERS = {
    "gated delta nets": "model=qwen3_next_tiny",
    "latent attention": DEEPSEEK,
    "sparse attention": DEEPSEEK.replace(
        "deepseek_tiny", "deepseek_v3_2_tiny model.dsa.indexer_topk=8"
    ),
}


def _logits(one: RunConfig, other: RunConfig) -> list[torch.Tensor]:
    """Return the logits of a model, of another one with its weights, and of that one with a wrong
    weight; a job for one rank.
    """
    from mtrain.assembly.model import build_model
    from mtrain.mcore.state.local_params import unwrap
    from mtrain.world.init import joined

    tokens = torch.arange(32)[None] * 7 % one.model.vocab_size
    places = torch.arange(32)[None]

    def logits(chunk: Any) -> torch.Tensor:
        with torch.no_grad():
            return chunk(tokens, places, None).clone()  # type: ignore[no-any-return]

    with joined(one) as world:
        left, right = (unwrap(build_model(run, world, wrap=False)[0]) for run in (one, other))
        own = dict(left.named_parameters())
        names = dict(right.named_parameters())
        assert own.keys() == names.keys()
        for name, weight in own.items():
            names[name].data.copy_(weight.data)
        found = [logits(left), logits(right)]
        next(iter(right.decoder.layers[-1].parameters())).data.add_(1e-3)
        return [*found, logits(right)]


@pytest.mark.parametrize("name", some(OF_LAYERS, ["gated delta nets"]))
def test_hybrid_patterns_equal_transformer_of_same_layers(name: str, tmp_path: Path) -> None:
    words = OF_LAYERS[name]
    transformer = built_as("hybrid", f"{words} parallel=single")
    model = transformer.model
    section = {"pattern": pattern(model), "num_heads": 4, "num_groups": 2}
    moe = model.moe.model_copy(update={"first_dense_layers": 0}) if model.moe is not None else None
    said = {
        **model.model_dump(),
        "family": "hybrid",
        "builder": "gpt",
        "num_layers": len(pattern(model)),
    }
    kind = type(model).model_validate({**said, "hybrid": section, "moe": moe and moe.model_dump()})
    as_pattern = transformer.model_copy(update={"model": kind})
    expected, found, wrong = run_ranks(1, _logits, transformer, as_pattern)[0]
    assert torch.equal(found, expected)
    assert not torch.equal(wrong, expected)


OF_LATENT = {
    "adapters": "peft=lora peft.target=[qkv]",
    "attention computed again": (
        "parallel.recompute.granularity=selective parallel.recompute.modules=[core_attn]"
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", OF_LATENT)
def test_hybrid_patterns_latent_attention_is_recomputed(name: str) -> None:
    """Count layers of latent attention by their parts: queries, keys and values, and a core."""
    words = f"{PATTERNS['latent attention']} {OF_LATENT[name]}"
    runs = [built_as("gpt", f"{words} parallel={layout}") for layout in ("single", "tp2sp")]
    one, many = (trained(run, 2) for run in runs)
    for found, expected in zip(many, one, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    if name == "adapters":
        stage = stage_weights(runs[0], held_stages(runs[0])[0][0])
        adapters = [weight for weight in stage if not weight.frozen]
        assert sum(weight.numel for weight in adapters) == sum(adapter_parameters(runs[0])) > 0
    else:
        assert one == trained(hybrid("latent attention", "single"), 2)
