"""The YAML reader: data only, bounded, with the line of every key."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.yaml_reader import MAX_NODES, load, parse
from mtrain.config.disk.files import MAX_BYTES
from mtrain.errors import ConfigError, Problem


def refusal(text: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3e-4", 3e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2", -2),
        ("0x10", 16),
        ("no", "no"),
        ("on", "on"),
        ("12:30:45", "12:30:45"),
        ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("007", 7),
    ],
)
def test_load_unquoted_words_follow_yaml_1_2(text: str, value: object) -> None:
    got = parse(f"a: {text}\n", "f.yaml").values["a"]
    assert got == value
    assert type(got) is type(value)


def test_load_keys_and_items_have_lines() -> None:
    document = parse("# head\na:\n  b: 1\n\n  c: {d: 2,\n      e: 3}\nf:\n  - x\n  - y\n", "f.yaml")
    assert document.lines == {
        "a": 2,
        "a.b": 3,
        "a.c": 5,
        "a.c.d": 5,
        "a.c.e": 6,
        "f": 7,
        "f.0": 8,
        "f.1": 9,
    }
    assert document.where("a.c.zzz") == "f.yaml:5"


@pytest.mark.parametrize(
    "tagged",
    [
        "a: !!python/object/apply:os.system ['true']",
        "a: !!int '3'",
        "a: !!str 3",
        "a: !custom x",
        "!!map {a: 1}",
        "a: !!binary aGk=",
        "a: [1, !x 2]",
        "!!str a: 1",
    ],
)
def test_load_explicit_tag_is_refused(tagged: str) -> None:
    problem = refusal(f"ok: 1\n{tagged}\n" if not tagged.startswith("!!map") else tagged)
    assert problem.code == "MT006"
    assert "tag" in problem.rule


def test_load_billion_laughs_are_refused() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    problem = refusal("\n".join(rows))
    assert problem.code == "MT005"
    assert str(MAX_NODES) in problem.rule


def test_load_aliases_within_limits_are_copies() -> None:
    values = parse("a: &x {k: 1}\nb: *x\n", "f.yaml").values
    assert values["a"] == values["b"] == {"k": 1}
    assert values["a"] is not values["b"]


@pytest.mark.parametrize(
    "deep",
    [
        "[" * 40 + "]" * 40,
        "a: &x " + "[" * 20 + "1" + "]" * 20 + "\nb: " + "[" * 15 + "*x" + "]" * 15,
    ],
)
def test_load_nesting_limit_counts_aliases(deep: str) -> None:
    assert refusal(deep if deep.startswith("a:") else f"a: {deep}").code == "MT005"


def test_load_recursive_alias_is_refused() -> None:
    assert refusal("a: &x [*x]").code == "MT005"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\n\tb: 2\n", 2),
        ("a: [1, 2\nb: 3\n", 2),
        ("a: 1\n  b: 2\n", 2),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: 1\n? [x]\n: 2\n", 2),
        ("a: 1\n1: 2\n", 2),
        ("a: 1\nb.c: 2\n", 2),
        ("a: 1\nb: 'x\u202ey'\n", 2),
        ("a: 1\nb: 'x\x07y'\n", 2),
    ],
)
def test_load_non_mapping_is_refused_at_its_line(text: str, line: int) -> None:
    problem = refusal(text)
    assert problem.code == "MT003"
    assert problem.source == f"f.yaml:{line}"


def test_load_tab_is_shown_and_explained() -> None:
    problem = refusal("a:\n\tb: 2\n")
    assert "<TAB>" in problem.rule
    assert "spaces" in problem.fix


def test_load_top_level_list_is_refused() -> None:
    assert "mapping" in refusal("- a\n- b\n").rule


def test_load_empty_file_is_empty_mapping() -> None:
    assert parse("# nothing\n", "f.yaml").values == {}


def test_load_missing_file_names_near_ones(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml"):
        load(tmp_path / "recip.yaml")


def test_load_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load(tmp_path)


def test_load_large_file_is_refused(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=str(MAX_BYTES)):
        load(big)


def test_load_non_utf8_names_its_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml:2.*0xff"):
        load(bad)


def test_load_incomplete_run_file_names_every_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {num_layers: 0}\n")
    with pytest.raises(ConfigError) as caught:
        read_run_file(file)
    paths = {problem.path for problem in caught.value.problems}
    assert {"model.num_layers", "model.hidden_size", "model.vocab_size"} <= paths
