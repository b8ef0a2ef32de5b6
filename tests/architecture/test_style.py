"""Style that a machine can check: plain statements, plain English, and comments where they help."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture import measure, prose

PLAIN = ("src/mtrain", "kernels/mtrain_kernels", "tests", "kernels/tests")
LEAST_COMMENTS = 20
"""Comments per 1,000 lines of the packages where readers stop and wonder."""


@pytest.mark.parametrize("folder", PLAIN)
def test_style_statements_are_plain(folder: str) -> None:
    figures = measure.measure_folder(measure.ROOT / folder)
    forbidden = [place for place in figures.places if not place.endswith("parallel assignment")]
    assert not forbidden, "write these as statements"
    assert figures.parallel_assignments <= 2 * figures.lines / 1000, "one statement per line"


@pytest.mark.parametrize("folder", measure.COMMENTED)
def test_style_comments_explain_why(folder: str) -> None:
    figures = measure.measure_folder(measure.ROOT / folder)
    assert 1000 * figures.comments / figures.lines >= LEAST_COMMENTS, (
        "explain why, where a reader would stop and wonder"
    )


def test_style_prose_has_no_findings() -> None:
    assert list(prose.findings([])) == []


def test_style_seeded_faults_are_found(tmp_path: Path) -> None:
    path = tmp_path / "faults.py"
    path.write_text(
        '"""A module."""\n\n\n'
        "def f(a, b, c):\n"
        '    """What is kept of it."""\n'
        "    a, b = b, c\n"
        "    d = 1 if a else 2 if b else 3\n"
        "    return dict(**{'a': d}, b=[*('a', 'b')])\n"
    )
    figures = measure.measure_file(path)
    assert figures.parallel_assignments == figures.nested_conditionals == 1
    assert figures.packed_literals == 2
    found = [finding for _, finding in prose.file_findings(path)]
    assert len(found) == 2, found


def test_style_attribute_docstrings_begin_with_nouns(tmp_path: Path) -> None:
    path = tmp_path / "attributes.py"
    path.write_text(
        '"""A module."""\n\n'
        "LIMIT = 4\n"
        '"""Of a batch."""\n'
        "NAMES = ()\n"
        '"""Names of layers."""\n\n\n'
        "class Point:\n"
        '    """A point."""\n\n'
        "    x: int\n"
        '    """Whether it is there."""\n'
        "    y: int\n"
        '    """Second coordinate."""\n'
    )
    assert [line for line, _ in prose.file_findings(path)] == [4, 13]
    module = tmp_path / "module.py"
    module.write_text('"""From one module to the next."""\n')
    assert [line for line, _ in prose.file_findings(module)] == [1]


def test_style_function_docstrings_begin_with_commands() -> None:
    for word in ("Return", "Pass", "Reduce-scatter", "Own"):
        assert prose.is_command(word), word
    for word in ("Returns", "Losses", "What", "The", "`x`", "[s", "fp32", "megatron-core's"):
        assert not prose.is_command(word), word


def test_style_names_and_values_are_no_prose() -> None:
    for text in ("the last step is None, not 2", "loss.alone float32 h16 v64"):
        assert not list(prose.phrase_findings(text)), text
    for text in ("it is none", "a norm alone"):
        assert list(prose.phrase_findings(text)), text


def test_style_swap_is_no_parallel_assignment() -> None:
    for text, lines in (("a, b = b, a", []), ("a, b = b, c", [1])):
        assert list(measure.parallel_assignments(ast.walk(ast.parse(text)))) == lines
