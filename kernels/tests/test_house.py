"""The laws of this package: each failure message is the sentence that explains the law."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "mtrain_kernels").rglob("*.py")) + sorted((ROOT / "bench").rglob("*.py"))
STANDARD = {
    "torch",
    "triton",
    "numpy",
    "mtrain_kernels",
    *(path.stem for path in (ROOT / "bench").glob("*.py")),
}
RIVALS = {
    "liger_kernel",
    "transformer_engine",
    "matplotlib",
    "mamba_ssm",
    "causal_conv1d",
    "flash_attn",
    "flash_attn_interface",
    "fla",
    "transformers",
    "yaml",
}
KERNEL_LINES = 130
FUNCTION_LINES = 80
FILE_LINES = 600


def test_house_files_are_readable() -> None:
    for path in FILES:
        _is_readable(path)


def _is_readable(path: Path) -> None:
    tree = ast.parse(path.read_text())
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES, f"{path} has {lines} lines: cut it where its ideas part"
    assert ast.get_docstring(tree), f"{path} has no docstring"
    assert path.stem not in (
        "utils",
        "helpers",
        "common",
        "manager",
    ), f"{path}: a name says what is in the file"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            kernel = any("jit" in each or each.startswith("kernel") for each in decorators)
            length = (node.end_lineno or 0) - node.lineno + 1
            allowed = KERNEL_LINES if kernel else FUNCTION_LINES
            if isinstance(node, ast.FunctionDef):
                assert length <= allowed, (
                    f"{path}:{node.lineno}: {node.name} has {length} lines, {allowed} are readable"
                )
            if node in tree.body and not node.name.startswith("_"):
                assert ast.get_docstring(node), (
                    f"{path}:{node.lineno}: {node.name} has no docstring"
                )


def test_house_package_stands_alone() -> None:
    """Import rivals only where they are called, so that nobody needs them; mtrain only in the
    benchmark.
    """
    for path in FILES:
        _stands_alone(path)


def _stands_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for module in (name.split(".")[0] for name in modules):
            known = module in STANDARD or module in sys.stdlib_module_names
            asked = module in RIVALS or (module == "mtrain" and path.parent.name == "bench")
            late = asked and node not in tree.body
            assert known or late, (
                f"{path}:{node.lineno} imports {module}; the package needs torch, triton and numpy"
                " only"
            )


def test_house_triton_is_imported_only_by_kernels() -> None:
    """Require imports of Triton only in kernels: without it every op must still import, and run
    through its definition.
    """
    for path in FILES:
        if path.parent.name == "bench" or path.stem.endswith("triton") or path.stem == "runtime":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [name.name for name in node.names]
            else:
                names = []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any("triton" in name.split(".") for name in names), (
                f"{path}:{node.lineno}: import triton inside the function that launches"
            )


def _imported(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of this package that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mtrain_kernels"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names | {str(node.module)}) & modules
    return found


def _in_cycles(imports: dict[str, set[str]]) -> set[str]:
    """Return the names that import each other, or are imported by such: none can come first."""
    left = dict(imports)
    while free := {name for name, needed in left.items() if not (needed - {name}) & left.keys()}:
        for name in free:
            del left[name]
    return set(left)


def test_house_imports_have_no_cycles() -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "mtrain_kernels").rglob("*.py")
    }
    modules = {name: _imported(path, set(paths)) for name, path in paths.items()}
    assert not _in_cycles(modules), f"import in a cycle: {sorted(_in_cycles(modules))}"
    folders: dict[str, set[str]] = {}
    for name, needed in modules.items():
        tops = {".".join(each.split(".")[:2]) for each in needed} - {"mtrain_kernels"}
        folders.setdefault(".".join(name.split(".")[:2]), set()).update(tops)
    assert not _in_cycles(folders), f"import in a cycle: {sorted(_in_cycles(folders))}"


def test_house_import_cycle_is_found() -> None:
    assert _in_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
