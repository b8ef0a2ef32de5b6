"""The laws of the architecture: each failure message is the sentence that explains the law."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from mtrain.config.docs import documented

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/mtrain"
KERNELS = ROOT / "kernels/mtrain_kernels"

LAYERS = {
    "errors": 0,
    "units": 0,
    "strict_json": 0,
    "config": 1,
    "layout": 2,
    "recipes": 2,
    "plan": 3,
    "devices": 4,
    "mcore": 5,
    "world": 6,
    "data": 7,
    "build": 8,
    "ckpt": 8,
    "train": 9,
    "launching": 10,
    "cli": 11,
}
ONLY_IN = {
    "hydra": ("config/hydra_source.py", "config/grammar.py"),
    "omegaconf": ("config/hydra_source.py",),
    "pydantic": ("config/",),
    "megatron": ("mcore/",),
    "transformer_engine": ("mcore/",),
    "safetensors": ("ckpt/",),
    "tokenizers": ("data/",),
}
TOP_LEVEL = {
    *("conf", "recipes", "src", "kernels", "tests", "benchmarks", "docs"),
    *("launch.py", "pyproject.toml", "constraints.txt", "Makefile"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
}
WITHOUT_TORCH = [package for package, layer in LAYERS.items() if layer <= 3]


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            if node.module == "mtrain":
                yield from ((f"mtrain.{name.name}", node.lineno) for name in node.names)


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "mtrain" and len(parts) > 1 else None


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_strictly_downward(path: Path) -> None:
    here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if here == "__init__":
        return
    for module, line in imports(path):
        package = package_of(module)
        if package is None or package == here or package == "__version__":
            continue
        assert package in LAYERS, f"{path}:{line}: {package} has no layer; give it one in this test and in the README"
        assert LAYERS[package] < LAYERS[here], (
            f"{path}:{line}: {here} (layer {LAYERS[here]}) imports {module} (layer {LAYERS[package]}). "
            "Imports go downward, and packages of one layer do not know each other."
        )


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_stays_in_its_package(library: str) -> None:
    for path in modules():
        where = str(path.relative_to(SOURCE))
        for module, line in imports(path):
            if module.split(".")[0] == library:
                allowed = any(where.startswith(place) for place in ONLY_IN[library])
                assert allowed, f"{path}:{line}: {library} is imported only in {', '.join(ONLY_IN[library])}"


def test_torch_is_unknown_below_layer_four() -> None:
    for path in modules():
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package in WITHOUT_TORCH:
            for module, line in imports(path):
                assert module.split(".")[0] not in ("torch", "numpy"), (
                    f"{path}:{line}: layers 0 to 3 validate within a second, so they know no torch"
                )


def test_torch_cuda_is_named_in_one_file() -> None:
    for path in modules():
        if path == SOURCE / "devices/cuda.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name)
            assert not (named and node.value.id == "torch"), (  # type: ignore[attr-defined]
                f"{path}:{node.lineno}: torch.cuda is named only in devices/cuda.py; ask the device instead"
            )


def test_kernels_know_neither_mtrain_nor_megatron() -> None:
    for path in sorted(KERNELS.rglob("*.py")):
        for module, line in imports(path):
            assert module.split(".")[0] not in ("mtrain", "megatron"), (
                f"{path}:{line}: mtrain_kernels stands alone, so that others can use it"
            )


def test_no_pickle_is_read() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                spelled = ast.unparse(node.func)
                assert spelled not in ("pickle.load", "pickle.loads", "torch.load", "np.load", "numpy.load"), (
                    f"{path}:{node.lineno}: {spelled} can run what a stranger wrote"
                )


BETWEEN_PROCESSES = ("world/", "launching/local.py", "launching/torchrun.py")
"""Where JSON goes to another process of the same run, which reads what Python adds to it."""
OF_FINITE_VALUES = ("config/", "recipes/", "strict_json.py")


def test_what_a_run_writes_is_json_by_its_standard() -> None:
    for path in modules():
        if str(path.relative_to(SOURCE)).startswith((*BETWEEN_PROCESSES, *OF_FINITE_VALUES)):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump", "dumps"):
                assert any(word.arg == "allow_nan" for word in node.keywords), (
                    f"{path}:{node.lineno}: json.dumps writes NaN, which is no JSON: strict_json.dumps writes null"
                )


def test_an_error_is_given_its_lines_one_by_one() -> None:
    """A line break inside one of them is shown as what it is, since it may come from a file's name."""
    kinds = {"MtrainError", "BadEnvironment", "CorruptData", "TrainingError", "Preempted"}
    for path in modules():
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in kinds:
                texts = [n.value for a in call.args for n in ast.walk(a) if isinstance(n, ast.Constant)]
                split = any(
                    isinstance(n, ast.Attribute) and n.attr == "split" for a in call.args for n in ast.walk(a)
                )
                assert split or not any("\n" in str(t) for t in texts), (
                    f"{path}:{call.lineno}: an argument for each line"
                )


def test_files_and_functions_stay_readable() -> None:
    for path in modules():
        tree = ast.parse(path.read_text())
        lines = len(path.read_text().splitlines())
        assert lines <= 400, f"{path} has {lines} lines: cut it where its ideas part"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{path}:{node.lineno}: {node.name} has {length} lines"


def test_the_top_level_holds_what_it_is_known_to_hold() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {name.partition("/")[0] for name in listed.splitlines() if not name.startswith(".")}
    assert top == TOP_LEVEL, "what is new at the top level is named in TOP_LEVEL with a reason to be there"


def test_contributing_promises_no_time() -> None:
    found = re.findall(r"\w+ (?:minutes?|seconds?)\b", (ROOT / "CONTRIBUTING.md").read_text())
    assert not found, "how long something takes is a machine's: benchmarks/results has it with the machine's name"


def test_no_package_is_named_after_nothing() -> None:
    for path in modules():
        assert not {"utils", "helpers", "common", "manager"} & set(path.with_suffix("").parts), (
            f"{path}: a name says what is in the package"
        )


def test_every_public_thing_says_what_it_is() -> None:
    for path in modules():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in ast.walk(tree):
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and node in tree.body:
                assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"


def test_every_key_is_documented() -> None:
    def walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            inner = [a for a in (field.annotation, *getattr(field.annotation, "__args__", ())) if isinstance(a, type)]
            sections = [a for a in inner if issubclass(a, BaseModel)]
            if not field.description and not sections:
                yield f"{prefix}{name}"
            for section in sections:
                yield from walk(section, f"{prefix}{name}.")

    assert list(walk(documented(), "")) == []


def test_one_file_prints() -> None:
    for path in modules():
        if path == SOURCE / "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            spelled = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert spelled not in ("print", "sys.stdout.write", "sys.stderr.write"), (
                f"{path}:{node.lineno}: text may come from a file; `errors.say` and `say_page` show what a terminal "  # type: ignore[attr-defined]
                "would obey"
            )
