"""The rank grid against an independent definition, and its refusals."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.layout.grid import RankGrid

DEGREES = st.sampled_from([1, 2, 3, 4])


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    tp, cp, dp, pp = (draw(DEGREES) for _ in range(4))
    per_stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in (1, 2, 4, tp) if per_stage % n == 0]))
    ep = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if (per_stage // etp) % n == 0]))
    return RankGrid(per_stage * pp, tp, cp, pp, ep, etp)


@settings(max_examples=60, deadline=None)
@given(grids(), st.data())
def test_grid_rank_is_in_one_group_of_each_kind(grid: RankGrid, data: st.DataObject) -> None:
    view = data.draw(st.sampled_from([("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")]))
    axes = data.draw(st.lists(st.sampled_from(view), min_size=1, unique=True))
    groups = grid.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world))
    for group in groups:
        first = grid.coords(group[0])
        for rank in group:
            coords = grid.coords(rank)
            assert all(coords[a] == first[a] for a in view if a not in axes)


@settings(max_examples=60, deadline=None)
@given(grids())
def test_grid_coordinates_and_ranks_are_inverse(grid: RankGrid) -> None:
    for rank in range(grid.world):
        c = grid.coords(rank)
        assert grid.rank_of(tp=c["tp"], cp=c["cp"], dp=c["dp"], pp=c["pp"]) == rank


def test_grid_tp_is_near_and_pp_far() -> None:
    grid = RankGrid(16, tp=2, pp=2, cp=2)
    assert grid.dp == 2
    assert grid.groups("tp")[0] == [0, 1]
    assert grid.groups("cp")[0] == [0, 2]
    assert grid.groups("dp")[0] == [0, 4]
    assert grid.groups("pp")[0] == [0, 8]
    assert grid.groups("dp", "cp")[0] == [0, 2, 4, 6]
    assert grid.embedding_groups()[3] == [3, 11]


def test_grid_experts_number_inside_stage() -> None:
    grid = RankGrid(16, tp=2, pp=2, ep=4, etp=1)
    assert grid.edp == 2
    assert grid.groups("ep")[0] == [0, 1, 2, 3]
    assert grid.groups("edp")[0] == [0, 4]


@pytest.mark.parametrize(
    ("degrees", "numbers"),
    [
        ({"world": 6, "tp": 4}, "6 ranks are no multiple of tp 4"),
        ({"world": 8, "tp": 2, "ep": 3}, "8 ranks are no multiple of etp 1 [*] ep 3"),
        ({"world": 2, "pp": 0}, "pp must be at least 1"),
    ],
)
def test_grid_unfit_degrees_state_numbers(degrees: dict[str, int], numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers):
        RankGrid(**degrees)


def test_grid_two_views_cannot_be_mixed() -> None:
    with pytest.raises(ValueError, match="not all of"):
        RankGrid(4, tp=2).groups("tp", "ep")
