"""Activations that autograd saves, compared with the plan; weights and states, counted to the
byte.
"""

from __future__ import annotations

from statistics import mean

import pytest

from mtrain.api import load
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid
from mtrain.plan.rank import passing, stage_memories
from mtrain.plan.states import rank_states
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.memory import held, measured

BIG = Machine(cpu_cores=64, memory_bytes=1 << 40)
BASE = "data=mock data.seq_length=64 trainer.global_batch_size=8 trainer.micro_batch_size=2"
SHORT = "model.num_layers=2"
KEPT = cases_of("plan_kept")
AGAIN = "parallel.recompute.granularity=selective parallel.recompute.modules="
QUICK = ["llama tp sp", "mixtral ep bf16", "deepseek selective", "gemma", "next tp sp"]
STATES = cases_of("plan_states")
LIMIT = 0.02
"""Relative difference; the acceptance of the plan is 3%."""


def planned(words: str) -> RunConfig:
    """Return the run of a case."""
    said = {word.partition("=")[0] for word in words.split()}
    base = [word for word in BASE.split() if word.partition("=")[0] not in said]
    run = load([*base, *words.split()], BIG, {}).run
    if run.parallel.pp > 1:
        return run
    one = run.trainer.model_copy(update={"global_batch_size": run.trainer.micro * run.parallel.dp})
    return run.model_copy(update={"trainer": one})  # one micro-batch


def difference(run: RunConfig, counted: RunConfig) -> float:
    """Return the largest relative difference, over stages, between the bytes that the ranks of
    `run` save and the plan of `counted`.

    Measured between forward and backward, and with the tensors that a backward recomputes. Ranks
    of a stage choose experts differently, so their mean is compared. Of a weight's copies in 8
    bits, which the plan has as a part of its own, autograd holds the transposed one, but not of
    weights that are freed.
    """
    grid = RankGrid.of(run)
    found = run_ranks(run.parallel.ranks or 1, measured, run)
    out = []
    for stage in stage_memories(counted):
        here = [r for r in found if grid.coords(r["rank"])["pp"] == stage.stage]
        copies = 0 if passing(run) else stage.parts["low_precision"] // 2
        out.append(abs((stage.saved + copies) / mean(r["most"] for r in here) - 1))
        kept = [mean(r["after"]) if grid.pp == 1 else r["kept"] for r in here]
        out.append(abs((stage.in_flight[0] + copies) / mean(kept) - 1))
    return max(out)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", some(sorted(KEPT), QUICK))
def test_plan_kept_equals_autograd(case: str) -> None:
    run = planned(KEPT[case])
    assert difference(run, run) < LIMIT


@pytest.mark.full
def test_plan_kept_differs_for_another_layout() -> None:
    assert difference(planned(KEPT["llama tp sp"]), planned(KEPT["llama tp"])) > LIMIT


@pytest.mark.parametrize("case", some(sorted(STATES), ["lora experts"]))
def test_plan_kept_counts_weights_gradients_states_exactly(case: str) -> None:
    run = planned(STATES[case])
    grid = RankGrid.of(run)
    found = run_ranks(run.parallel.ranks or 1, held, run)
    for rank, here in enumerate(found):
        states = rank_states(run, grid.coords(rank)["pp"])
        assert here["numbers"] == states.numbers.total()
        assert here["weights"] == states.weight_bytes
        assert here["gradients"] == states.gradient_bytes
        assert here["optimizer"] == states.optimizer_bytes(here["data_rank"])
