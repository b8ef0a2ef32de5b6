"""Parameter and operation counts against published figures."""

from typing import Any

import pytest

from mtrain.api import load
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import resolve
from mtrain.config.schema.data import UnresolvedData
from mtrain.config.schema.model import ModelConfig, MoEConfig
from mtrain.config.schema.optim import UnresolvedOptim
from mtrain.config.schema.parallel import UnresolvedParallel
from mtrain.config.schema.precision import UnresolvedPrecision
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.layout.grid import held_stages
from mtrain.models.count import Counts, counts
from mtrain.models.weights import Weight
from mtrain.plan import count
from mtrain.plan.states import stage_weights
from tests.support.configs import LAPTOP

LLAMA3_8B = ModelConfig(  # type: ignore[call-arg]
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)


def test_plan_count_llama3_8b_parameters_equal_published() -> None:
    assert count.parameters(LLAMA3_8B) == 8_030_261_248


def test_plan_count_qwen3_next_parameters_equal_transformers() -> None:
    model = compose(["model=qwen3_next_80b_a3b"]).run.model
    # of Qwen3NextForCausalLM(Qwen3NextConfig()) on the meta device
    assert count.parameters(model) == 79_674_391_296
    assert model.softmax_among(48) == 12


@pytest.mark.parametrize(("causal", "gflops"), [(True, 51.5), (False, 57.9)])
def test_plan_count_llama3_8b_flops_at_8192_tokens(causal: bool, gflops: float) -> None:
    assert count.flops_per_token(LLAMA3_8B, 8192, causal=causal) / 1e9 == pytest.approx(
        gflops, abs=0.06
    )


@pytest.mark.parametrize(
    "words",
    [
        "model=gpt_oss_tiny model.mtp_num_layers=2",
        "model=glm45_tiny",
        "model=deepseek_tiny",
        "model=nemotron_h_tiny",
        "model=t5_tiny model.t5.decoder_layers=5",
        "model=t5_tiny",
    ],
)
def test_plan_count_parameters_equal_weights(words: str) -> None:
    run = load([*words.split(), "parallel=single", "data=mock"], LAPTOP, {}).run
    assert count.parameters(run.model) == sum(
        weight.numel for weight in stage_weights(run, held_stages(run)[0][0])
    )


def resolved(**sections: Any) -> RunConfig:
    return resolve(UnresolvedRun(**sections), LAPTOP)


def test_plan_count_frozen_experts_are_all_frozen() -> None:
    model = compose(["model=mixtral_tiny"]).run.model
    assert model.moe is not None
    number = model.moe.num_experts
    chosen = model.moe.router_topk
    weights = [Weight("expert", (3, 5), "experts", frozen=True), Weight("norm", (7,), "norm")]
    assert counts(weights, model) == Counts(
        number * 15 + 7, chosen * 15 + 7, number * 15, number * 15
    )


def test_plan_count_tying_saves_one_embedding_only() -> None:
    tied = LLAMA3_8B.model_copy(update={"tie_word_embeddings": True})
    assert count.parameters(LLAMA3_8B) - count.parameters(tied) == 128256 * 4096
    assert count.flops_per_token(tied, 8192) == count.flops_per_token(LLAMA3_8B, 8192)


def test_plan_count_fp32_state_is_16_bytes() -> None:
    run = resolved(model=LLAMA3_8B, parallel=UnresolvedParallel(ranks=1))
    assert count.state_bytes(run) == 16 * count.parameters(LLAMA3_8B)


def test_plan_count_distributed_optimizer_keeps_moments_once() -> None:
    whole = resolved(model=LLAMA3_8B, parallel=UnresolvedParallel(ranks=4))
    spread = resolved(
        model=LLAMA3_8B, parallel=UnresolvedParallel(ranks=4, distributed_optimizer=True)
    )
    assert count.state_bytes(whole) - count.state_bytes(spread) == 3 * 8 * count.parameters(
        LLAMA3_8B
    )


def test_plan_count_low_precision_state_is_10_bytes() -> None:
    optim = UnresolvedOptim(
        exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16", store_param_remainders=True
    )
    precision = UnresolvedPrecision(dtype="bf16", grad_reduce_in_fp32=False)
    run = resolved(
        model=LLAMA3_8B, parallel=UnresolvedParallel(ranks=1), optim=optim, precision=precision
    )
    assert count.state_bytes(run) == 10 * count.parameters(LLAMA3_8B)


def test_plan_count_expert_parallelism_spreads_experts_only() -> None:
    moe = MoEConfig(num_experts=8, ffn_hidden_size=14336)
    model = LLAMA3_8B.model_copy(update={"moe": moe})
    one = resolved(model=model, parallel=UnresolvedParallel(ranks=8))
    spread = resolved(model=model, parallel=UnresolvedParallel(ranks=8, ep=8))
    experts = count.expert_parameters(model)
    assert experts == 32 * 8 * 3 * 4096 * 14336
    assert count.state_bytes(one) - count.state_bytes(spread) == 16 * 7 * experts
    assert count.expert_parameters(LLAMA3_8B) == 0


def test_plan_count_fsdp_keeps_everything_once() -> None:
    run = resolved(model=LLAMA3_8B, parallel=UnresolvedParallel(ranks=8, fsdp="megatron"))
    assert count.state_bytes(run) == 16 * count.parameters(LLAMA3_8B)


def test_plan_count_interleaved_stages_take_turns() -> None:
    run = resolved(
        model=LLAMA3_8B.model_copy(update={"num_layers": 8}),
        parallel=UnresolvedParallel(pp=2, vpp=2),
        data=UnresolvedData(),
    )
    held = [[stage.layers for stage in stages] for stages in held_stages(run)]
    assert held == [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]


def test_plan_count_frozen_model_saves_weight_gradients_only() -> None:
    model = compose(["model=llava_tiny"]).run.model
    assert model.llava is not None
    frozen = model.model_copy(
        update={"llava": model.llava.model_copy(update={"freeze": ("language",)})}
    )
    short, long = (
        count.flops_per_token(model, n) - count.flops_per_token(frozen, n) for n in (512, 1024)
    )
    assert short == pytest.approx(long)
    assert short > 0


def test_plan_count_sparse_attention_by_chosen_keys() -> None:
    dense, sparse = (
        compose(
            [f"model={name}", "model.mtp_num_layers=null", "model.mtp_loss_scaling_factor=null"]
        ).run.model
        for name in ("deepseek_v3", "deepseek_v3_2")
    )
    layers = 61
    matrices = 64 * 128 * 1536 + 7168 * (128 + 64)
    norm = 2 * 128
    assert count.parameters(sparse) - count.parameters(dense) == layers * (matrices + norm)
    pairs = 8192 / 2
    widths = 128 * (192 + 128)
    chosen = 2048 * (1 - 2048 / (2 * 8192))
    # what an indexer reads has no gradient: 4 for each of its weights that multiplies, and not 6
    indexer = 4 * matrices + 6 * norm + 6 * 64 * 128 * pairs
    found = count.flops_per_token(sparse, 8192) - count.flops_per_token(dense, 8192)
    assert found == pytest.approx(layers * (indexer - 6 * widths * (pairs - chosen)), rel=1e-9)
    few = sparse.model_copy(
        update={"dsa": sparse.dsa and sparse.dsa.model_copy(update={"indexer_topk": 8192})}
    )
    assert count.flops_per_token(few, 8192) == pytest.approx(
        count.flops_per_token(dense, 8192) + layers * indexer, rel=1e-9
    )
