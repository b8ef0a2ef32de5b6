"""A lint of English: `python -m tests.architecture.prose [FOLDER ...]` prints each finding.

Docstrings of functions begin with a verb, in the imperative, and those of classes, modules and
attributes with a noun. Docstrings, comments, messages and pages name who does what, in the field's
words.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from tests.architecture.sources import ROOT, comments_of, nodes_of

FOLDERS = ("src/mtrain", "kernels", "benchmarks", "tests", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "docs")
"""Folders and pages that the rules hold for by default."""
OPENINGS = """
What Whatever Whether Of How Where Wherever Those That Which Who Whoever Whose Why So
As With Without In Inside From For By At On Under Until Only There This It Its If When
While After Before Between Again Both Behind Beside Nothing None No Neither Each Every
Everything The A An All Another One Two Three Four Five Several Some Same Other Our
Their Written Asked Always Else Since But And Or Not
Attention Device First Forward Gradient Last Loss Output Row Self-attention Softmax
Maximum Tensor Token Value Weight
"""
"""Words with which no docstring of a function begins: none of them is a verb."""
CLASS_OPENINGS = """
What Whatever Whether Of How Where Those That Which Who Whose Why So As With Without
In From For By At On Under Behind Beside Nothing It They If When
"""
"""Words with which no docstring of a class, module or attribute begins: none of them is a noun."""
PHRASES = {
    r"(?<!there )\bis (?-i:none)\b": "say `is no X` or `is missing`",
    r"(?<!there )\bare (?-i:none)\b": "say `there are no X`",
    r"\bwhich is one\b": "name the thing",
    r"\bthat is one\b": "name the thing",
    r"\bwhat is kept of\b": "name what is kept",
    r"\bis said\b|\bare said\b|\bwas said\b": "set, reported, or printed",
    r"\bis told\b|\bare told\b|\bwas told\b": "set, reported, or informed",
    r"\bis asked\b|\bare asked\b|\bwas asked\b": "requested, or name who asks",
    r"\btold apart\b": "distinguished",
    r"\bnobody says\b|\bnobody said\b|\bsomebody says\b": "unset, or set",
    r"\bthat is there\b|\bthat are there\b": "exists, present",
    r"\bgoes wrong\b": "fails",
    r"\bbeside\b": "next to, or with",
    r"\bbeneath\b": "below, or under",
    r"(?<!\.)\balone\b": "only",
    r"\blearnt\b": "learned",
}
"""Phrases that no text of the project has -> what to write."""
ANY_PHRASE = re.compile("|".join(PHRASES), re.IGNORECASE)
COMMAND = re.compile(r"[A-Z][a-z]+(-[a-z]+)*")
"""The first word of a docstring of a function: no formula, no name and no number."""


def first_word(text: str) -> str:
    """Return the first word of a docstring, without punctuation."""
    return text.split()[0].rstrip(".,:;") if text.split() else ""


def is_command(word: str) -> bool:
    """Return whether a word may be an imperative; plurals and third persons end with one s."""
    third = word.endswith("s") and not word.endswith("ss")
    return COMMAND.fullmatch(word) is not None and not third and word not in OPENINGS.split()


def attribute_findings(body: Iterable[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) of each string after an assignment in a module's or a class's body."""
    for statement, after in pairwise(body):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        if not isinstance(after, ast.Expr) or not isinstance(after.value, ast.Constant):
            continue
        text = after.value.value
        if isinstance(text, str) and first_word(text) in CLASS_OPENINGS.split():
            yield after.lineno, f"an attribute's docstring begins with {first_word(text)}"


def docstring_findings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) of each docstring whose first word breaks a rule."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.Module):
            yield from attribute_findings(node.body)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        word = first_word(text)
        line = node.body[0].lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(
                ast.unparse(each).startswith(("rule(", "of_family("))
                for each in node.decorator_list
            ):
                continue  # the docstring of a rule states it, as `explain` prints it
            if not is_command(word):
                yield line, f"the docstring of {node.name} begins with {word}, not with a verb"
        elif word in CLASS_OPENINGS.split():
            yield line, f"a docstring begins with {word}, not with a noun"


def phrase_findings(text: str) -> Iterator[str]:
    """Yield what to write in the place of each phrase that a text should not have."""
    plain = re.sub(r"`[^`]*`", "", text)
    if not ANY_PHRASE.search(plain):
        return
    for pattern, better in PHRASES.items():
        for found in re.finditer(pattern, plain, re.IGNORECASE):
            yield f"`{found[0]}`: {better}"


def is_prose(text: str) -> bool:
    """Return whether a string is a sentence, and no code, pattern or list of names."""
    return len(text.split()) >= 4 and not re.search(r"[\\{}<>]|\w\(\w", text)


def file_findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) of the docstrings, comments and messages of a Python file."""
    yield from docstring_findings(nodes_of(path))
    for line, text in comments_of(path):
        for finding in phrase_findings(text):
            yield line, finding
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_prose(node.value):
            for finding in phrase_findings(node.value):
                yield node.lineno, finding


def page_findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, finding) of a Markdown page, outside of its console blocks."""
    inside = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            for finding in phrase_findings(line):
                yield number, finding


def findings(folders: list[str]) -> Iterator[str]:
    """Yield `path:line: finding` of some folders and pages, or of all that the rules hold for."""
    for name in folders or [*FOLDERS, *PAGES]:
        top = ROOT / name
        paths = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in paths:
            if path == Path(__file__):  # it lists the words
                continue
            if path.suffix == ".py":
                found = file_findings(path)
            elif path.suffix == ".md":
                found = page_findings(path)
            else:
                continue
            for line, finding in found:
                yield f"{path.relative_to(ROOT)}:{line}: {finding}"


def main(arguments: list[str]) -> int:
    """Print the findings; return 1 if there are some."""
    lines = list(findings(arguments))
    for line in lines:
        print(line)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
