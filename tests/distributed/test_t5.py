"""T5: the same losses and weights in every layout, bitwise resumes, and initial weights as in the
paper.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.run import RunConfig
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import held_alike, tiny_run, train_steps, trained

MODEL: dict[str, Any] = {
    "family": "t5",
    "num_layers": 2,
    "num_query_groups": None,
    "num_attention_heads": 4,
    "kv_channels": 12,
    "activation": "relu",
    "softmax_scale": 1.0,
    "position_embedding_type": "relative",
    "tie_word_embeddings": True,
    "t5": {"decoder_layers": 3, "relative_attention_buckets": 8, "relative_attention_distance": 16},
}
GATED = {"activation": "geglu_tanh", "tie_word_embeddings": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 sequence parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "dp2 distributed optimizer": {"ranks": 2, "distributed_optimizer": True},
    "tp2": {"ranks": 2, "tp": 2},
    "dp2": {"ranks": 2},
    "dp2 FSDP2": {"ranks": 2, "fsdp": "fsdp2"},
    "dp2 FSDP of megatron-core": {"ranks": 2, "fsdp": "megatron"},
    "tp2 dp2": {"ranks": 4, "tp": 2, "sequence_parallel": True, "distributed_optimizer": True},
}
STEPS = 3


def run_of(
    model: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **layout: Any
) -> RunConfig:
    made = tiny_run(model={**MODEL, **(model or {})}, trainer=trainer, **layout)
    return resolve(made, Machine(cpu_cores=1, memory_bytes=0))


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "model", [{}, pytest.param(GATED, marks=pytest.mark.full)], ids=["relu", "gated"]
)
@pytest.mark.parametrize(
    "name", some(LAYOUTS, ["tp2 sequence parallel", "dp2 distributed optimizer"])
)
def test_t5_layout_equals_one_rank(name: str, model: dict[str, Any]) -> None:
    expected = trained(run_of(model), STEPS)
    found = trained(run_of(model, **LAYOUTS[name]), STEPS)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0.0)
    assert expected[0][0] != expected[1][0]


@pytest.mark.full
def test_t5_wrong_gradient_on_one_rank_is_found() -> None:
    """Show that the comparison can fail: one rank negates the gradient of one of its weights."""
    run = run_of(**LAYOUTS["tp2 sequence parallel"])
    found = run_ranks(2, lambda: train_steps(run, STEPS, flip_gradient_on=1))[0]
    apart = max(abs(a[0] - b[0]) for a, b in zip(found, trained(run_of(), STEPS), strict=True))
    assert apart > 1e-4


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(granularity="full", method="uniform", num_layers=1),
        pytest.param(RecomputeConfig(granularity="selective"), marks=pytest.mark.full),
        pytest.param(
            RecomputeConfig(granularity="selective", modules=("mlp",)), marks=pytest.mark.full
        ),
    ],
    ids=["full", "attention", "MLPs"],
)
def test_t5_recomputation_is_bitwise(recompute: RecomputeConfig) -> None:
    """Recompute layers that share biases by distance, although each has a backward of its own."""
    assert trained(run_of(recompute=recompute), STEPS) == trained(run_of(), STEPS)


@pytest.mark.full
def test_t5_resume_is_bitwise(tmp_path: Path) -> None:
    run = run_of(
        {"hidden_dropout": 0.1, "attention_dropout": 0.1}, **LAYOUTS["tp2 sequence parallel"]
    )
    whole = run_ranks(2, lambda: train_steps(run, 4, save_to=tmp_path, save_after=2))[0]
    rest = run_ranks(2, lambda: train_steps(run, 2, load_from=tmp_path / "step_00000002"))[0]
    assert rest == whole[2:]


@pytest.mark.full
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True])
def test_t5_tp_shared_state_stays_equal_under_dropout(
    sequence_parallel: bool,
) -> None:
    drops = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    run = run_of(drops, ranks=2, tp=2, sequence_parallel=sequence_parallel)

    one, other = run_ranks(2, held_alike, run)
    tables = {
        f"{stack}_relative_pos_emb.relative_attention_bias.weight"
        for stack in ("encoder", "decoder")
    }
    assert tables | {"encoder.final_layernorm.weight"} <= one.keys()
    assert one == other


def _measured(run: RunConfig) -> dict[str, Any]:
    from mtrain.assembly.model import build_model
    from mtrain.train.assemble import splits_of
    from mtrain.train.generate.evaluation import measured
    from mtrain.world.init import joined

    with joined(run) as world, torch.no_grad():
        chunks = build_model(run, world, wrap=False)
        twice = [asdict(measured(run, world, chunks, splits_of(run), None, 12)) for _ in range(2)]
        assert twice[0]["loss"] == twice[1]["loss"], "an evaluation is repeatable"
        return twice[0]


@pytest.mark.full
def test_t5_evaluation_is_equal_in_any_layout() -> None:
    keys = {"trainer": {"eval_iters": 2}}
    one, two = (
        run_ranks(n, _measured, run_of(**keys, **layout))[0]
        for n, layout in ((1, {}), (2, LAYOUTS["tp2"]))
    )
    assert one["tokens"] == two["tokens"] == 12 * 8, (
        "5 tokens, 2 sentinels and an end of each sample"
    )
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)


def _deviations(run: RunConfig) -> dict[str, float]:
    from mtrain.assembly.model import build_model
    from mtrain.world.init import joined

    with joined(run) as world:
        (chunk,) = build_model(run, world, wrap=False)
        named = {name: parameter.detach() for name, parameter in chunk.named_parameters()}
    queries, keys, values = (
        named["encoder.layers.0.self_attention.linear_qkv.weight"].view(4, 3, 12, -1).unbind(1)
    )
    found = {"queries": queries, "keys": keys, "values": values}
    for name in (
        "embedding.word_embeddings",
        "decoder.layers.2.cross_attention.linear_q",
        "output_layer",
    ):
        found[name] = named[f"{name}.weight"]
    for name in (
        "self_attention.linear_proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "cross_attention.linear_kv",
    ):
        found[name] = named[f"decoder.layers.1.{name}.weight"]
    return {name: float(weight.std()) for name, weight in found.items()}


def test_t5_initial_weights_have_paper_deviation() -> None:
    model = {**GATED, "t5": {**MODEL["t5"], "initializer_factor": 2.0}}
    (found,) = run_ranks(1, _deviations, run_of(model))
    inputs = {"queries": 64 * 12, "keys": 64, "values": 64, "embedding.word_embeddings": 1}
    inputs |= {"decoder.layers.2.cross_attention.linear_q": 64 * 12, "output_layer": 64}
    inputs |= {"self_attention.linear_proj": 48, "mlp.linear_fc1": 64, "mlp.linear_fc2": 128}
    inputs |= {"cross_attention.linear_kv": 64}
    assert found == {name: pytest.approx(2 * n**-0.5, rel=0.05) for name, n in inputs.items()}
