"""The documentation of keys: the text below each field, read from the source on demand.

pydantic can read it when it builds a class (`use_attribute_docstrings`), but parses the source of
every section at each start; `check` needs no word of it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from mtrain.config.messages.keys import section_in
from mtrain.config.schema.run import UnresolvedRun


@cache
def documented() -> type[UnresolvedRun]:
    """Return the schema with the text below each field as its `description`."""
    sections = list(dict.fromkeys(_sections(UnresolvedRun)))
    for section in sections:
        of_module = _words(section.__module__)
        words = {
            name: text
            for base in section.__mro__
            for name, text in of_module.get(base.__name__, {}).items()
        }
        for name, field in section.model_fields.items():
            field.description = words.get(name, field.description)
    for section in sections:  # inner ones first: the outer ones contain what they were built to
        section.model_rebuild(force=True)
    return UnresolvedRun


def _sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in section.model_fields.values():
        inner = section_in(field.annotation)
        if inner is not None:
            yield from _sections(inner)
    yield section


@cache
def _words(module: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> the text below it, for one module."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_under(node)) for node in classes}


def _under(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, after in pairwise(node.body):
        text = after.value if isinstance(after, ast.Expr) else None
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Constant)
            and isinstance(text.value, str)
        ):
            yield field.target.id, inspect.cleandoc(text.value)
