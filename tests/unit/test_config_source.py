"""What is read without Hydra is read as Hydra reads it."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mtrain.config.compose import compose
from mtrain.config.paths import choices_of_group, conf_dir
from mtrain.config.run import GROUPS
from mtrain.config.source import Sweep, defaults_list, hydra_value, parse_value

PLAIN = st.one_of(
    st.from_regex(r"-?[0-9]{1,6}(\.[0-9]{1,4})?([eE][-+]?[0-9]{1,2})?", fullmatch=True),
    st.from_regex(r"[A-Za-z_/][A-Za-z0-9_/.\-]{0,12}", fullmatch=True),
    st.sampled_from(
        ["true", "True", "null", "NULL", "nan", "inf", "-inf", "1_000", "0", "-0", "1.", ".5", "1e5", "00"]
    ),
    st.text("0123456789.eE+-_/aTn", min_size=1, max_size=6),
)


@given(text=PLAIN)
@settings(max_examples=400, deadline=None)
def test_a_plain_value_is_what_hydra_says_it_is(text: str) -> None:
    def outcome(read: object) -> object:
        try:
            value = read(text)  # type: ignore[operator]
        except ValueError as error:
            return type(error)
        return "nan" if isinstance(value, float) and math.isnan(value) else (type(value), value)

    assert outcome(parse_value) == outcome(hydra_value)


def test_group_files_without_defaults_lists_compose_as_hydra_composes_them() -> None:
    chosen = {group: choices_of_group(group)[0] for group in GROUPS}
    files, known = defaults_list(conf_dir(), chosen, {})
    composed = compose([f"{group}={choice}" for group, choice in chosen.items()])
    assert composed.choices == known == chosen
    assert {path: package for path, package in files if path != "config"} == {
        f"{group}/{choice}": group for group, choice in chosen.items()
    }


@pytest.mark.parametrize("text", ["1,2", "range(1,3)", "choice(a,b)", "glob(*)", "interval(0,1)"])
def test_every_kind_of_sweep_is_told_apart(text: str) -> None:
    with pytest.raises(Sweep):
        parse_value(text)


def test_a_value_nested_without_end_is_an_error_and_no_crash() -> None:
    with pytest.raises(ValueError):
        parse_value("[" * 3000)
