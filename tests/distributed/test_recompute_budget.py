"""Recomputation within a budget: it fits by the plan and by the trace, costs hardly more than the
best of all ways, and changes no number.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtrain.api import load
from mtrain.config.schema.run import RunConfig
from mtrain.launching import local, prove
from mtrain.layout.grid import RankGrid
from mtrain.plan import recompute
from mtrain.plan.fits import SPARE
from mtrain.plan.rank import worst_stage
from mtrain.plan.recompute import Way, way
from mtrain.units import GIB
from tests.distributed.test_plan_trace import BIG, traced
from tests.support.cases import cases_of
from tests.support.covering import some
from tests.support.runs import whole_tensors

CASES = cases_of("recompute_budget")
# Of the memory between all layers recomputed and none.
SHARES = (0.15, 0.5, 0.85)
SLOWER = 1.02


def run_of(name: str, cluster: str) -> RunConfig:
    """Return the run of a case that recomputes nothing."""
    words = f"{CASES[name]} data=mock cluster={cluster} parallel.recompute.granularity=none"
    return load(words.split(), BIG, {}, to_run=False).run


def every_way(run: RunConfig) -> list[Way]:
    """Return every kind of recomputation that megatron-core has, planned one by one."""
    layers = recompute.most_layers(run)
    ways = [way(run, "none")]
    ways += [way(run, "selective", modules=some) for some in recompute.module_sets(run)]
    for number in range(1, layers + 1):
        ways.append(way(run, "full", method="block", num_layers=number))
        ways.append(way(run, "full", method="uniform", num_layers=number))
    return [one for one in ways if one.legal]


def rooms(ways: list[Way]) -> list[float]:
    """Return three budgets between the least and the most that any way needs."""
    least = min(one.peak for one in ways)
    return [least + share * (ways[0].peak - least) for share in SHARES]


@pytest.mark.parametrize("name", some(sorted(CASES), ["dense pp", "glm pp", "mixtral"]))
def test_recompute_budget_costs_2_percent_more_than_best(name: str) -> None:
    run = run_of(name, "h100x8")
    ways = every_way(run)
    for room in rooms(ways):
        best = min(one.cost for one in ways if one.peak <= room)
        found = recompute.cheapest(run, room)
        assert found is not None
        assert found.peak <= room
        assert found.cost <= SLOWER * best, found.words


def test_recompute_budget_all_modules_are_not_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("mixtral", "h100x8")
    ways = every_way(run)
    room = rooms(ways)[-1]
    best = min(one.cost for one in ways if one.peak <= room)
    monkeypatch.setattr(recompute, "module_sets", lambda run: [("core_attn", "layernorm", "moe")])
    found = recompute.cheapest(run, room)
    assert found is not None
    assert found.cost > SLOWER * best


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(CASES))
def test_recompute_budget_fits_by_plan_and_trace(name: str) -> None:
    """Compare the program's own tensors, without the other memory of a process."""
    run = run_of(name, "cpu")
    context = worst_stage(run).parts["context"]
    for room in rooms(every_way(run)):
        held = (room - context) / (1 - SPARE)
        found = recompute.cheapest(run, room)
        assert found is not None
        worst = worst_stage(found.run)
        assert worst.peak <= room
        seen = traced(found.run, RankGrid.of(run).rank_of(pp=worst.stage))
        assert seen["peak"]["bytes"] <= held, found.words
        if name == "dense pp" and room == rooms(every_way(run))[0]:
            without = traced(run, RankGrid.of(run).rank_of(pp=worst_stage(run).stage))
            assert without["peak"]["bytes"] > held


BITWISE = {
    "modules": ("parallel=tp2sp", 0.85),
    "layers": ("parallel=pp2", 0.5),
    "experts": ("model=mixtral_tiny parallel=ep2", 0.5),
}


@pytest.mark.parametrize("name", some(BITWISE, []))
def test_recompute_budget_results_are_bitwise(name: str, tmp_path: Path) -> None:
    words, share = BITWISE[name]
    base = f"{words} data=mock data.seq_length=128 trainer.micro_batch_size=4".split()
    ways = every_way(load([*base, "parallel.recompute.granularity=none"]).run)
    least = min(one.peak for one in ways)
    room = least + share * (ways[0].peak - least)
    budget = f"parallel.recompute.budget_gib={room / GIB / (1 - SPARE)}"
    ends = []
    chosen = []
    for number, more in enumerate(([], ["parallel.recompute.granularity=auto", budget])):
        home = tmp_path / str(number)
        home.mkdir()
        run = load([*base, *more]).run
        small = prove.shrunk(run, [*base, *more], 2, "fp32")
        chosen.append(small.parallel.recompute.granularity)
        local.observe(small, home)
        ends.append(whole_tensors(home / "step_00000002"))
    assert chosen[0] == "none" != chosen[1]
    kept, again = ends
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[key], tensor) for key, tensor in again.items())
