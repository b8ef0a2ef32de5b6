"""A resolved run as text and back."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from mtrain.config.compose.composer import compose
from mtrain.config.compose.dump import override, run_yaml
from mtrain.config.compose.grammar import parse_value
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.yaml_reader import parse
from mtrain.config.resolve.resolution import resolve
from tests.support.configs import LAPTOP, MOE, tiny

# `${` is the one thing a string of a configuration cannot hold: it is a reference or it is refused.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
    lambda s: "${" not in s
)


@given(prompt=TEXT, suffix=TEXT)
@settings(max_examples=150, deadline=None)
def test_config_dump_any_text_round_trips(prompt: str, suffix: str) -> None:
    run = tiny(trainer__sample_prompt=prompt, data__suffixes=[suffix])
    values = parse(run_yaml(run), "f").values
    assert values["trainer"]["sample_prompt"] == prompt
    assert values["data"]["suffixes"] == [suffix]


@pytest.mark.parametrize(
    "word", ["no", "1e-5", "null", "~", "true", "0x1F", "12:30", "", " a", "a: b", "#x", "- x", "1"]
)
def test_config_dump_yaml_lookalikes_stay_text(word: str) -> None:
    assert (
        parse(run_yaml(tiny(trainer__sample_prompt=word)), "f").values["trainer"]["sample_prompt"]
        == word
    )


@pytest.mark.parametrize(
    "changes", [{}, {"model__moe": MOE}, {"cluster__peak_tflops": {"bf16": 989.0}}]
)
def test_config_dump_resolved_run_round_trips_with_digest(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    run = resolve(tiny(**changes), LAPTOP)
    file = tmp_path / "run.yaml"
    file.write_text(run_yaml(run))
    assert read_run_file(file) == run
    again = compose([f"run={file}"]).run
    assert again.to_dict() == run.to_dict()
    assert again.digest() == run.digest()


def test_config_dump_nested_list_is_one_word() -> None:
    (argument,) = shlex.split(override("trainer.batch_size_schedule", [[8, 1000], [12, 2000]]))
    assert parse_value(argument.partition("=")[2]) == [[8, 1000], [12, 2000]]


def test_config_dump_comments_change_nothing() -> None:
    run = resolve(tiny(), LAPTOP)
    with_comments = run_yaml(run, dict.fromkeys(run.flat(), "conf/x.yaml:3"))
    assert parse(with_comments, "f").values == parse(run_yaml(run), "f").values
    assert "# conf/x.yaml:3" in with_comments


@given(text=TEXT)
@example(text="INF")
@example(text="Null")
@settings(max_examples=100, deadline=None)
def test_config_dump_fix_round_trips_through_shell_and_grammar(text: str) -> None:
    (argument,) = shlex.split(override("trainer.sample_prompt", text))
    assert parse_value(argument.partition("=")[2]) == text
    (argument,) = shlex.split(override("data.blend", [text, "plain"]))
    assert parse_value(argument.partition("=")[2]) == [text, "plain"]


@pytest.mark.parametrize(("older", "word"), [(True, "cpu"), (False, "reference")])
def test_config_dump_older_cpu_run_keeps_fast_paths(older: bool, word: str, tmp_path: Path) -> None:
    run = resolve(tiny(kernels__norm="reference", cluster__device="cpu"), LAPTOP)
    text = run_yaml(run)
    if older:
        text = re.sub(r"^objective:\n(  .*\n)*", "", text, flags=re.MULTILINE)
        assert "objective" not in text
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert compose([f"run={path}"]).run.kernels.norm == word
    assert read_run_file(path).kernels.norm == word
