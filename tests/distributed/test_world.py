"""Joining: process groups equal the grid for every kind of layout, and a world that differs is
refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from mtrain.layout.grid import RankGrid
from tests.support.forked import RankFailed, run_ranks
from tests.support.runs import tiny_run


def _join(run: object) -> dict[str, int]:
    from mtrain.world.init import joined

    with joined(run) as world:  # type: ignore[arg-type]
        return world.coords


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "degrees",
    [
        {"ranks": 8, "tp": 2, "pp": 2, "cp": 2},
        {"ranks": 8, "tp": 2, "pp": 2, "ep": 2},
        {"ranks": 8, "tp": 2, "ep": 4, "etp": 1},
        {"ranks": 6, "pp": 3},
        {"ranks": 8, "tp": 2, "cp": 2, "fsdp": "fsdp2", "hsdp_replicas": 2},
        {"ranks": 8, "tp": 2, "ep": 2, "etp": 1, "distributed_optimizer": True, "hsdp_replicas": 2},
    ],
    ids=str,
)
def test_world_megatron_groups_equal_grid(degrees: dict[str, int]) -> None:
    run = tiny_run(**degrees)
    grid = RankGrid.of(run)
    assert run_ranks(run.parallel.ranks, _join, run) == [
        grid.coords(rank) for rank in range(grid.world)
    ]


def test_world_differing_rank_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import mtrain.layout.grid as grid

    monkeypatch.setattr(grid, "DENSE_ORDER", ("pp", "cp", "dp", "tp"))
    with pytest.raises(RankFailed, match="process groups differ from the rank grid"):
        run_ranks(4, _join, tiny_run(ranks=4, tp=2, pp=2))


def test_world_differing_replica_spread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtrain.mcore import api

    real = api.parallel_state.get_data_parallel_group

    def group(*args: Any, partial_data_parallel: bool = False, **more: Any) -> Any:
        if partial_data_parallel:
            return api.parallel_state.get_inter_distributed_optimizer_instance_group()
        return real(*args, **more)

    monkeypatch.setattr(api.parallel_state, "get_data_parallel_group", group)
    with pytest.raises(RankFailed, match="dp-cp of a copy: megatron-core has"):
        run_ranks(4, _join, tiny_run(ranks=4, fsdp="fsdp2", hsdp_replicas=2))


def test_world_differing_configuration_is_named() -> None:
    def join() -> None:
        odd = {"seed": 7} if dist.get_rank() == 1 else {}
        _join(tiny_run(ranks=2, trainer=odd))

    with pytest.raises(
        RankFailed, match=r"ranks \[1\] differ from rank 0 in version or configuration"
    ):
        run_ranks(2, join)


def test_world_wrong_process_count_is_refused() -> None:
    with pytest.raises(RankFailed, match="the layout has 4 ranks"):
        run_ranks(2, _join, tiny_run(ranks=4, tp=2))
