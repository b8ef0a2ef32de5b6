"""Layouts in one word."""

from __future__ import annotations

import pytest

from mtrain.config.compose.composer import compose
from mtrain.config.compose.layout_string import parse_layout
from mtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("tp2", {"tp": 2}),
        ("tp8pp12cp2vpp4ep8", {"tp": 8, "pp": 12, "cp": 2, "vpp": 4, "ep": 8}),
        ("tp2pp2dp2", {"tp": 2, "pp": 2, "ranks": 8}),
        ("dp3", {"ranks": 3}),
        ("tp4sp", {"tp": 4, "sequence_parallel": True}),
        ("sptp4", {"tp": 4, "sequence_parallel": True}),
        ("etp1ep2", {"etp": 1, "ep": 2}),
        ("pp2vpp2", {"pp": 2, "vpp": 2}),
    ],
)
def test_layout_string_parses_axes_with_dp_as_ranks(word: str, values: dict[str, object]) -> None:
    assert parse_layout(word) == values


@pytest.mark.parametrize(
    "word", ["tp2xx3", "tp0", "tp2tp4", "tp", "2tp", "tp-1", "", "tp2.5", "spsp", "sp2"]
)
def test_layout_string_bad_text_is_refused_with_grammar(word: str) -> None:
    with pytest.raises(ValueError, match="tp pp vpp cp ep etp dp"):
        parse_layout(word)


@pytest.mark.parametrize(("word", "fix"), [("tp2xx3", "tp2"), ("tp0pp2", "pp2"), ("tp2tp4", "tp2")])
def test_layout_string_bad_one_keeps_readable_parts(word: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"parallel={word}"])
    (problem,) = caught.value.problems
    assert problem.code == "MT016"
    assert problem.fix == f"parallel={fix}"
    compose([problem.fix])


def test_layout_string_without_file_is_a_choice() -> None:
    composed = compose(["parallel=tp2pp2dp2"])
    assert composed.run.parallel.model_dump(include={"tp", "pp", "ranks"}) == {
        "tp": 2,
        "pp": 2,
        "ranks": 8,
    }
    assert composed.choices["parallel"] == "tp2pp2dp2"
    assert composed.origins["parallel.ranks"] == "command line"
