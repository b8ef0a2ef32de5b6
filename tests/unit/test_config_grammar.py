"""Values of arguments follow Hydra's grammar, within bounds."""

from __future__ import annotations

import pytest

from mtrain.config.compose.grammar import Sweep, parse_value


@pytest.mark.parametrize("text", ["1,2", "range(1,3)", "choice(a,b)", "glob(*)", "interval(0,1)"])
def test_grammar_distinguishes_every_sweep(text: str) -> None:
    with pytest.raises(Sweep):
        parse_value(text)


def test_grammar_deep_nesting_is_an_error() -> None:
    with pytest.raises(ValueError):
        parse_value("[" * 3000)
