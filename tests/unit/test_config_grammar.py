"""What an argument's value is: Hydra's grammar, within bounds."""

from __future__ import annotations

import pytest

from mtrain.config.compose.grammar import Sweep, parse_value


@pytest.mark.parametrize("text", ["1,2", "range(1,3)", "choice(a,b)", "glob(*)", "interval(0,1)"])
def test_every_kind_of_sweep_is_told_apart(text: str) -> None:
    with pytest.raises(Sweep):
        parse_value(text)


def test_a_value_nested_without_end_is_an_error_and_no_crash() -> None:
    with pytest.raises(ValueError):
        parse_value("[" * 3000)
