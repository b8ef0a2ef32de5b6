"""Expert-parallel ranks that send each other as many rows in every step compute what exact
exchanges compute.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.schema.moe import MoEConfig, room_of
from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.run import RunConfig
from tests.support.covering import some
from tests.support.forked import RankFailed, run_ranks
from tests.support.runs import tiny_run, train_steps

EP2: dict[str, Any] = {"ranks": 2, "ep": 2}
BOTH: dict[str, Any] = {"ranks": 4, "tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}
AGAIN = {"recompute": RecomputeConfig(granularity="full", method="uniform", num_layers=1)}
MOE_AGAIN = {"recompute": RecomputeConfig(granularity="selective", modules=("moe",))}
GROUPS = {
    "num_experts": 8,
    "router_num_groups": 4,
    "router_group_topk": 2,
    "router_score_function": "sigmoid",
}
SHARED = {"shared_expert_intermediate_size": 32, "shared_expert_overlap": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ep2": ({}, EP2, {}),
    "tp2 ep2 etp2, shared experts meanwhile": (SHARED, BOTH, {}),
    "tp2 ep2 etp1": ({}, {"ranks": 2, "tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, {}),
    "one expert a rank": ({"num_experts": 2}, EP2, {}),
    "more experts of a token than of a rank": ({"router_topk": 3}, EP2, {}),
    "groups": ({**GROUPS, "router_pre_softmax": False}, EP2, {}),
    "with a factor": ({"alltoall_capacity_factor": 1.9}, EP2, {}),
    "predictions": ({}, EP2, {"mtp_num_layers": 1}),
    "computed again": ({"alltoall_capacity_factor": 1.9}, {**EP2, **AGAIN}, {}),
    "experts computed again": ({}, {**EP2, **MOE_AGAIN}, {}),
    "weighed inputs": (
        {"router_topk": 1, "apply_probs_on_input": True, "router_pre_softmax": True},
        EP2,
        {},
    ),
}


def run_of(name: str, **more: Any) -> RunConfig:
    moe, parallel, model = CASES[name]
    experts = MoEConfig(
        **({"num_experts": 4, "ffn_hidden_size": 32, "pad_alltoall": True} | moe | more)
    )
    return tiny_run(model={"num_layers": 2, "moe": experts, **model}, **parallel)


def exact(run: RunConfig) -> RunConfig:
    assert run.model.moe is not None
    moe = run.model.moe.model_copy(update={"pad_alltoall": False, "alltoall_capacity_factor": None})
    return run.model_copy(update={"model": run.model.model_copy(update={"moe": moe})})


def steps(run: RunConfig, fault: bool = False) -> list[tuple[float, float]]:
    def job() -> Any:
        from mtrain.assembly import model
        from mtrain.mcore.layers.dispatch import SparseDispatcher

        model.routes_by_lists = lambda _: True
        if fault:
            right = SparseDispatcher._owners
            SparseDispatcher._owners = lambda self, rows: right(self, rows).roll(1)
        return train_steps(run, 2)

    return run_ranks(run.parallel.ranks or 1, job)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", some(CASES, ["ep2"]))
def test_padded_exchange_equals_exact_exchange_bitwise(name: str) -> None:
    run = run_of(name)
    assert steps(run) == steps(exact(run))


@pytest.mark.full
def test_padded_exchange_foreign_expert_rows_are_found() -> None:
    run = run_of("ep2")
    assert steps(run, fault=True) != steps(exact(run))


def test_padded_exchange_overflow_ends_training_not_evaluation() -> None:
    run = run_of("ep2", alltoall_capacity_factor=0.5)

    def evaluated() -> list[set[bool]]:
        """Return whether rows of an evaluation were padded, outside of graphs and where schedules
        are captured; a job for a rank.
        """
        from mtrain.mcore.layers.dispatch import SparseDispatcher as Dispatcher
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.train.loop.step import evaluate
        from mtrain.world.init import joined

        padded = [set[bool](), set[bool]()]
        made = Dispatcher._owners

        def owners(self: Any, rows: int) -> Any:
            padded[self.one_graph].add(rows > int(self._chunks.sum()))
            return made(self, rows)

        Dispatcher._owners = owners
        with joined(run) as world:
            parts = assemble(run, world, splits_of(run))
            assert evaluate(parts, parts.train_data, 1) is not None
            for module in parts.state.chunks[0].modules():
                if hasattr(module, "token_dispatcher"):
                    module.token_dispatcher.one_graph = True
            assert evaluate(parts, parts.train_data, 1) is not None
        return padded

    def without_autograd() -> None:
        """Run the forward of a training step as TransformerEngine's checkpoint first runs it; a job
        for a rank.
        """
        import torch

        from mtrain.mcore.layers.dispatch import SparseDispatcher as Dispatcher

        made = Dispatcher.dispatch_preprocess
        Dispatcher.dispatch_preprocess = torch.no_grad()(made)
        train_steps(run, 1)

    for job, given in ((train_steps, (run, 1)), (without_autograd, ())):
        with pytest.raises(
            RankFailed, match=r"more rows than model\.moe\.alltoall_capacity_factor allows"
        ):
            run_ranks(2, job, *given)
    assert run_ranks(2, evaluated)[0] == [{False}, {True}]


@pytest.mark.parametrize(
    ("topk", "local", "factor", "rows"),
    [(2, 8, None, 200), (8, 2, None, 200), (8, 2, 1.0, 200), (2, 8, 1.25, 32)],
)
def test_padded_exchange_capacity_is_full_or_a_share(
    topk: int, local: int, factor: float | None, rows: int
) -> None:
    assert room_of(100, topk, local, 8 if topk == 2 else 4, factor) == rows
