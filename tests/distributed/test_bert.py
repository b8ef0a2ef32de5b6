"""BERT in layouts: losses, norms and weights are one rank's; it resumes bitwise and learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.bert.config import BertConfig
from mtrain.plan.count import parameters
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import held_alike, tiny_run, train_steps, trained, whole_tensors

STEPS = 3
IDS = {"pad_token_id": 0, "cls_token_id": 298, "sep_token_id": 297, "mask_token_id": 299}
BERT: dict[str, Any] = {
    "family": "bert",
    "num_query_groups": None,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-12,
    "norm_placement": "post_residual",
    "activation": "gelu",
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "tie_word_embeddings": True,
    "bert": BertConfig(**IDS),
}
MEGATRON: dict[str, Any] = {
    **BERT,
    "layernorm_epsilon": 1e-5,
    "norm_placement": "pre",
    "activation": "gelu_tanh",
    "bert": BertConfig(**IDS, head_activation="gelu"),
}
"""Megatron-LM's BERT, with the head that its default flags give it."""
MODELS = {"bert": BERT, "megatron": MEGATRON}
ALONE = {**BERT, "bert": BertConfig(mask_token_id=299, next_sentence=False)}
FULL = RecomputeConfig(granularity="full", method="uniform", num_layers=1)
ZERO = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2pp2, sequence parallel": {"ranks": 4, "tp": 2, "pp": 2, "sequence_parallel": True},
    "dp2 distributed optimizer": {"ranks": 2, **ZERO},
    "tp2": {"ranks": 2, "tp": 2},
    "tp4": {"ranks": 4, "tp": 4},
    "pp2": {"ranks": 2, "pp": 2},
    "pp2vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "tp2dp2 distributed optimizer": {"ranks": 4, "tp": 2, **ZERO},
    "tp2, sequence parallel, recomputed": {
        "ranks": 2,
        "tp": 2,
        "sequence_parallel": True,
        "recompute": FULL,
    },
    "dp2 fsdp2": {"ranks": 2, "fsdp": "fsdp2"},
    "dp2 megatron fsdp": {"ranks": 2, "fsdp": "megatron", "fsdp_sharding": "optim_grads_params"},
}

ALWAYS = {
    *(("bert", name) for name in list(LAYOUTS)[:2]),
    ("megatron", "tp2pp2, sequence parallel"),
}
PLACED = [
    pytest.param(kind, name, marks=() if (kind, name) in ALWAYS else pytest.mark.full)
    for kind in MODELS
    for name in LAYOUTS
]


def bert_run(kind: str = "bert", **more: Any) -> RunConfig:
    return tiny_run(model={**MODELS[kind], **more.pop("model", {})}, **more)


def _train(run: RunConfig, folder: Path) -> list[tuple[float, float]]:
    return train_steps(run, STEPS, save_to=folder)


Trained = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Return the losses and norms of one rank, and the weights after them, by the kind of model;
    each is trained once.
    """
    known: dict[str, Trained] = {}

    def of(kind: str) -> Trained:
        if kind not in known:
            home = tmp_path_factory.mktemp(kind)
            values = run_ranks(1, _train, bert_run(kind), home)[0]
            known[kind] = values, whole_tensors(home / f"step_{STEPS:08d}")
        return known[kind]

    return of


@pytest.fixture(scope="module")
def one_rank(alone: Callable[[str], Trained]) -> Trained:
    """Return those of BERT on one rank."""
    return alone("bert")


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("kind", "name"), PLACED)
def test_bert_layout_equals_one_rank(
    kind: str, name: str, alone: Callable[[str], Trained], tmp_path: Path
) -> None:
    run = bert_run(kind, **LAYOUTS[name])
    expected_values, expected_weights = alone(kind)
    values = run_ranks(run.parallel.ranks or 1, _train, run, tmp_path)[0]
    for found, expected in zip(values, expected_values, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    many = whole_tensors(tmp_path / f"step_{STEPS:08d}")
    assert many.keys() == expected_weights.keys()
    for key, weight in expected_weights.items():
        error = (many[key] - weight).norm() / weight.norm().clamp_min(1e-12)
        # Adam divides by the root of a gradient's square: where a bias has next to none, rounding
        # decides its sign.
        assert error < (1e-3 if "bias" in key else 2e-5), (key, float(error))


LOSSES = {
    "all logits at once": ({"loss": "megatron"}, {}),
    "torch's attention": ({"attention": "torch"}, {"ranks": 2, "tp": 2}),
    "padding has a probability": ({}, {"ranks": 2, "tp": 2}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", some(LOSSES, ["all logits at once"]))
def test_bert_loss_implementation_changes_nothing(name: str) -> None:
    kernels, layout = LOSSES[name]
    padded = {"mask_padded_vocab": name != "padding has a probability"}
    one = bert_run(model=padded)
    other = bert_run(model=padded, **layout)
    other = other.model_copy(update={"kernels": other.kernels.model_copy(update=kernels)})
    for found, expected in zip(trained(other, 2), trained(one, 2), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("next_sentence", False),
        ("masked_share", 0.3),
        ("pad_token_id", 11),
        ("head_activation", "gelu_tanh"),
    ],
)
def test_bert_section_key_changes_numbers(key: str, value: Any, one_rank: Any) -> None:
    changed = BertConfig(**(IDS | {key: value}))
    # a gradient that is left out may change only the next step
    found = trained(bert_run(model={"bert": changed}), 2)
    assert found != one_rank[0][:2], (
        "one rank's numbers are the same bit by bit where nothing moves them"
    )


def test_bert_heads_start_near_uniform(one_rank: Any) -> None:
    (loss, _), *_ = one_rank[0]
    (alone, _), *_ = trained(tiny_run(model=ALONE), 1)
    assert alone == pytest.approx(torch.log(torch.tensor(300.0)).item(), abs=0.2)
    assert loss - alone == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=0.2)


RESUMED: dict[str, dict[str, Any]] = {
    "tp2, sequence parallel": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "pp2dp2": {"ranks": 4, "pp": 2, **ZERO},
}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bert", pytest.param("megatron", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", some(RESUMED, ["tp2, sequence parallel"]))
def test_bert_resume_is_bitwise(name: str, kind: str, tmp_path: Path) -> None:
    run = bert_run(kind, model={"hidden_dropout": 0.1, "attention_dropout": 0.1}, **RESUMED[name])
    ranks = run.parallel.ranks or 1

    def whole() -> list[tuple[float, float]]:
        return train_steps(run, 3, save_to=tmp_path / "whole", save_after=1)

    def rest() -> list[tuple[float, float]]:
        return train_steps(
            run, 2, save_to=tmp_path / "rest", load_from=tmp_path / "whole/step_00000001"
        )

    expected = run_ranks(ranks, whole)[0]
    assert run_ranks(ranks, rest)[0] == expected[1:]
    left, right = (whole_tensors(tmp_path / name / "step_00000003") for name in ("whole", "rest"))
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


@pytest.mark.sampled(9)
@pytest.mark.parametrize("model", [BERT, ALONE, MEGATRON], ids=["pairs", "alone", "megatron"])
def test_bert_plan_counts_built_parameters(model: dict[str, Any]) -> None:
    run = tiny_run(model=model, ranks=4, tp=2, pp=2)

    def job() -> int:
        from mtrain.assembly.model import build_model
        from mtrain.mcore.state.sharding import model_shards
        from mtrain.world.init import joined

        with joined(run) as world:
            shards = model_shards(build_model(run, world), trainable=True)
            return sum(shard.tensor.numel() for shard in shards if shard.primary)

    assert sum(run_ranks(4, job)) == parameters(run.model)


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("kind", ["bert", pytest.param("megatron", marks=pytest.mark.full)])
def test_bert_tp_shared_state_stays_equal_under_dropout(kind: str, sequence_parallel: bool) -> None:
    drops = {"hidden_dropout": 0.3, "attention_dropout": 0.3}
    run = bert_run(kind, model=drops, ranks=2, tp=2, sequence_parallel=sequence_parallel)

    one, other = run_ranks(2, held_alike, run)
    norm = {"bert": "embedding.norm.weight", "megatron": "encoder.final_layernorm.weight"}[kind]
    assert {"head.dense.weight", "pooler.weight", "next_sentence.bias", norm} <= one.keys()
    assert one == other
