"""Figures of how readable the code is: `python -m tests.architecture.measure [FOLDER ...]`.

Lines count docstrings, comments and blank lines. Tokens are those of Python's tokenizer, without
comments, docstrings and line ends. Densities are per 1,000 lines.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from tests.architecture.sources import ROOT, comments_of, nodes_of, text_of

FOLDERS = ("src/mtrain", "kernels/mtrain_kernels", "tests", "kernels/tests")
COMMENTED = (
    "src/mtrain/mcore",
    "src/mtrain/assembly",
    "src/mtrain/train",
    "src/mtrain/ckpt",
    "kernels/mtrain_kernels",
)
"""Packages in which comments are counted by themselves."""
SHORT = 60
LAYOUT = {
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
PRAGMAS = ("#!", "# noqa", "# type:", "# fmt:", "# ruff:", "# mypy:")


@dataclass
class Figures:
    """Counts of one file, or sums over several."""

    files: int = 0
    short_files: int = 0
    """Files under 60 lines, apart from `__init__.py`."""
    lines: int = 0
    tokens: int = 0
    comments: int = 0
    """Lines with a comment that is no pragma."""
    parallel_assignments: int = 0
    conditional_expressions: int = 0
    nested_conditionals: int = 0
    long_conditionals: int = 0
    """Conditional expressions that take more than one line."""
    packed_literals: int = 0
    """`**{...}` in a call, and `*(...)` or `*[...]` anywhere, of a literal."""
    longest_file: int = 0
    long_lines: int = 0
    """Lines of more than 100 columns."""
    places: list[str] = field(default_factory=list)
    """`path:line: finding` of each statement that the rules forbid."""

    def add(self, other: Figures) -> None:
        """Add the counts of another file."""
        for each in fields(self):
            if each.name == "longest_file":
                self.longest_file = max(self.longest_file, other.longest_file)
            elif each.name == "places":
                self.places += other.places
            else:
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def is_swap(node: ast.Assign) -> bool:
    """Return true if an assignment only exchanges the values of its targets."""
    target = node.targets[0]
    assert isinstance(target, ast.Tuple)
    assert isinstance(node.value, ast.Tuple)
    return {ast.unparse(e) for e in target.elts} == {ast.unparse(e) for e in node.value.elts}


def parallel_assignments(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines of `a, b = x, y`, apart from swaps."""
    for node in nodes:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        if not isinstance(node.targets[0], ast.Tuple) or not isinstance(node.value, ast.Tuple):
            continue
        if not is_swap(node):
            yield node.lineno


def conditionals(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, bool, bool]]:
    """Yield (line, contains another, takes several lines) of each conditional expression."""
    for node in nodes:
        if isinstance(node, ast.IfExp):
            parts = (node.test, node.body, node.orelse)
            nested = any(isinstance(n, ast.IfExp) for part in parts for n in ast.walk(part))
            yield node.lineno, nested, node.end_lineno != node.lineno


def packed_literals(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Yield the lines of literals that are unpacked where they are written."""
    for node in nodes:
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield node.lineno
        elif (
            isinstance(node, ast.keyword) and node.arg is None and isinstance(node.value, ast.Dict)
        ):
            yield node.value.lineno


def docstrings(nodes: Iterable[ast.AST]) -> set[tuple[int, int]]:
    """Return the places of all strings that are statements."""
    return {
        (node.value.lineno, node.value.col_offset)
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def count_tokens(path: Path) -> int:
    """Return the number of tokens of a file, without comments, docstrings and line ends."""
    documented = docstrings(nodes_of(path))
    tokens = tokenize.generate_tokens(io.StringIO(text_of(path)).readline)
    return sum(token.type not in LAYOUT and token.start not in documented for token in tokens)


@cache
def measure_file(path: Path) -> Figures:
    """Return the figures of one Python file, apart from its tokens."""
    nodes = nodes_of(path)
    lines = text_of(path).splitlines()
    figures = Figures(files=1, lines=len(lines), longest_file=len(lines))
    figures.short_files = int(len(lines) < SHORT and path.name != "__init__.py")
    figures.long_lines = sum(len(line) > 100 for line in lines)
    figures.comments = sum(not text.startswith(PRAGMAS) for _, text in comments_of(path))
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line in parallel_assignments(nodes):
        figures.parallel_assignments += 1
        figures.places.append(f"{name}:{line}: parallel assignment")
    for line, nested, long in conditionals(nodes):
        figures.conditional_expressions += 1
        figures.nested_conditionals += nested
        figures.long_conditionals += long
        if nested:
            figures.places.append(f"{name}:{line}: conditional expression in another one")
        if long:
            figures.places.append(f"{name}:{line}: conditional expression of several lines")
    for line in packed_literals(nodes):
        figures.packed_literals += 1
        figures.places.append(f"{name}:{line}: literal that is unpacked where it is written")
    return figures


def measure_folder(folder: Path) -> Figures:
    """Return the figures of all Python files under a folder."""
    total = Figures()
    for path in sorted(folder.rglob("*.py")):
        total.add(measure_file(path))
    return total


def page(folder: str, figures: Figures) -> str:
    """Return the figures of a folder as lines of text."""
    lines = max(figures.lines, 1)
    density = f"{1000 * figures.parallel_assignments / lines:.1f} parallel assignments, "
    density += f"{1000 * figures.conditional_expressions / lines:.1f} conditional expressions and "
    density += f"{1000 * figures.comments / lines:.1f} comments per 1,000 lines"
    out = [
        f"{folder}: {figures.files} files, {figures.lines:,} lines, {figures.tokens:,} tokens",
        f"  {density}",
        f"  {figures.nested_conditionals} nested conditionals, {figures.long_conditionals} of "
        f"several lines, {figures.packed_literals} packed literals",
        f"  {figures.short_files} files under {SHORT} lines, the longest has "
        f"{figures.longest_file}; {figures.long_lines} lines over 100 columns",
    ]
    return "\n".join(out)


def main(arguments: list[str]) -> int:
    """Print the figures of some folders; with `--places`, what the rules forbid as well."""
    places = "--places" in arguments
    folders = [a for a in arguments if a != "--places"] or [*FOLDERS, *COMMENTED[:-1]]
    for folder in folders:
        if not (ROOT / folder).is_dir():
            continue
        figures = measure_folder(ROOT / folder)
        figures.tokens = sum(map(count_tokens, (ROOT / folder).rglob("*.py")))
        print(page(folder, figures))
        if places:
            print("\n".join(figures.places))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
