"""Table of how classes of transformers read the keys of a `config.json`, from their source.

`python -m tests.support.hf_classes` writes `src/mtrain/recipes/huggingface/classes.json`, which the
importer uses; a test makes it again and compares.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtrain.recipes.huggingface.importer import KINDS

TABLE = Path(__file__).resolve().parents[2] / "src/mtrain/recipes/huggingface/classes.json"
INSIDE = ("clip_vision_model", "ministral")
"""Kinds that stand inside of another one's file, or that a file is read as."""
OF_EVERY = (
    "tie_word_embeddings",
    "initializer_range",
    "max_position_embeddings",
    "head_dim",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""Keys that transformers reads of any model, outside of its own files."""
WINDOW = {
    "create_sliding_window_causal_mask": "sliding_window",
    "create_chunked_causal_mask": "attention_chunk_size",
}
"""Functions that make masks -> the key that they read of the configuration that they are given."""


@cache
def _root() -> Path:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@cache
def _classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    """Return configuration classes by name with their files, from the files that name a kind."""
    out = {}
    for path in sorted(_root().glob("models/*/configuration_*.py")):
        text = path.read_text()
        if not any(f'model_type = "{kind}"' in text for kind in (*KINDS, *INSIDE)):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                out[node.name] = path, node
    return out


def _constant(node: ast.ClassDef, name: str) -> Any:
    for item in node.body:
        if (
            isinstance(item, ast.Assign)
            and isinstance(item.targets[0], ast.Name)
            and item.targets[0].id == name
        ):
            return ast.literal_eval(item.value)
    return None


def _class_of(kind: str) -> tuple[Path, list[ast.ClassDef]]:
    """Return the file of a kind's configuration class, and the class with its bases, the base
    first.
    """
    found = [
        (path, node) for path, node in _classes().values() if _constant(node, "model_type") == kind
    ]
    ((path, node),) = found
    line = [node]
    while bases := [
        base.id for base in line[-1].bases if isinstance(base, ast.Name) and base.id in _classes()
    ]:
        line.append(_classes()[bases[0]][1])
    return path, line[::-1]


def _fields(line: list[ast.ClassDef]) -> dict[str, ast.AnnAssign]:
    return {
        item.target.id: item
        for node in line
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item)
    }


def _methods(line: list[ast.ClassDef]) -> Iterator[ast.FunctionDef]:
    for node in line:
        yield from (item for item in node.body if isinstance(item, ast.FunctionDef))


def _filled_in(line: list[ast.ClassDef]) -> set[str]:
    """Return the keys whose null a class replaces by another value."""
    out = set()
    for function in _methods(line):
        for node in ast.walk(function):
            if isinstance(node, ast.If) and (name := _tested(node.test)):
                assigned = [
                    t for item in node.body if isinstance(item, ast.Assign) for t in item.targets
                ]
                out |= {name} & {t.attr for t in assigned if isinstance(t, ast.Attribute)}
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                name = node.targets[0].attr
                value = node.value
                tested = isinstance(value, ast.IfExp) and _tested(value.test) == name
                either = (
                    isinstance(value, ast.BoolOp) and ast.unparse(value.values[0]) == f"self.{name}"
                )
                out |= {name} if tested or either else set()
    return out


def _tested(test: ast.expr) -> str:
    """Yield `x` of `self.x is None` and `self.x is not None`."""
    found = re.fullmatch(r"self\.(\w+) is (not )?None", ast.unparse(test))
    return found[1] if found else ""


def _read(trees: Sequence[ast.AST], owners: tuple[str, ...]) -> set[str]:
    """Return the attributes of configurations that code reads, and the keys that it takes from its
    arguments.
    """
    out: set[object] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = ast.unparse(node.value).rpartition(".")[2]
                out |= {node.attr} if owner in owners else set()
            if (
                isinstance(node, ast.Call)
                and len(node.args) > 1
                and ast.unparse(node.func) in ("getattr", "hasattr")
            ):
                out |= {node.args[1].value} if isinstance(node.args[1], ast.Constant) else set()
            if (
                isinstance(node, ast.Call)
                and node.args
                and ast.unparse(node.func) in ("kwargs.get", "kwargs.pop")
            ):
                out |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
            if isinstance(node, ast.Name) and node.id in WINDOW:
                out.add(WINDOW[node.id])
    return {name for name in out if isinstance(name, str)}


def _computed(line: list[ast.ClassDef]) -> set[str]:
    """Return the keys that a class sets to true or false from others, although a file may state
    them.
    """
    assigned = (
        node
        for function in _methods(line)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
    )
    return {
        n.targets[0].attr  # type: ignore[attr-defined]
        for n in assigned
        if isinstance(n.value, ast.Compare) and _is_own(n.targets[0])
    }


def _is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"


def _defaults(tree: ast.AST) -> Iterator[str]:
    """Return the arguments that a function takes from the configuration unless a caller passes
    them.
    """
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if any("config_defaults" in ast.unparse(one) for one in function.decorator_list):
            yield from (arg.arg for arg in function.args.args)


def _null(field: ast.AnnAssign, filled: bool) -> str:
    """Return how null is treated: refused, as absence, as another value, as false, or as
    nothing.
    """
    kinds = {part.strip() for part in ast.unparse(field.annotation).split("|")}
    if "None" not in kinds:
        return "refused"
    if field.value is not None and ast.unparse(field.value) == "None":
        return "absent"
    if filled:
        return "filled"
    return "false" if "bool" in kinds else "nothing"


def of_kind(kind: str) -> dict[str, Any]:
    """Return the keys that the classes of a kind read and how they treat null, with keys of any
    class.
    """
    path, line = _class_of(kind)
    files = sorted(path.parent.glob("modeling_*.py"))
    trees = [ast.parse(file.read_text()) for file in files]
    fields = _fields(line)
    filled = _filled_in(line)
    computed = _computed(line)
    read = _read(trees, ("config", "text_config", "vision_config")) | _read(
        [*_methods(line)], ("self",)
    )
    read |= {name for tree in trees for name in _defaults(tree)} | {*OF_EVERY}
    aliases = {
        key: of for node in line for key, of in (_constant(node, "attribute_map") or {}).items()
    }
    read |= {aliases[name] for name in read & aliases.keys()} | {
        key for key, of in aliases.items() if of in read
    }
    null: dict[str, list[str]] = {"false": sorted(computed - fields.keys())}
    for name, field in fields.items():
        null.setdefault(_null(field, name in filled), []).append(name)
    return {
        "class": line[-1].name,
        "read": sorted(read & (known() | fields.keys() | aliases.keys() | computed)),
        "null": {meaning: sorted(names) for meaning, names in sorted(null.items()) if names},
    }


@cache
def known() -> frozenset[str]:
    """Return every key that a configuration class of the supported kinds declares."""
    return frozenset(name for kind in (*KINDS, *INSIDE) for name in _fields(_class_of(kind)[1]))


def table() -> dict[str, Any]:
    """Return the content of the file."""
    import transformers

    return {
        "transformers": transformers.__version__,
        "kinds": {kind: of_kind(kind) for kind in (*KINDS, *INSIDE)},
    }


def text() -> str:
    """Return the file's text, with one line for each list."""
    made = table()
    lines = [f' "transformers": {json.dumps(made["transformers"])},', ' "kinds": {']
    for kind, one in made["kinds"].items():
        own = [f'   "class": {json.dumps(one["class"])}', f'   "read": {json.dumps(one["read"])}']
        own += [f'   "null": {json.dumps(one["null"])}']
        lines += [f'  "{kind}": {{', ",\n".join(own), "  },"]
    lines[-1] = "  }"
    return "\n".join(("{", *lines, " }", "}", ""))


if __name__ == "__main__":
    TABLE.write_text(text())
