"""The laws of the architecture: each failure message is the sentence that explains the law."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from pydantic import BaseModel

from mtrain.config.messages.describe import documented
from tests.architecture.sources import ROOT, nodes_of, text_of, tree_of

SOURCE = ROOT / "src/mtrain"
KERNELS = ROOT / "kernels/mtrain_kernels"

LAYERS = {
    "errors": 0,
    "processes": 0,
    "units": 0,
    "strict_json": 0,
    "object_store": 1,
    "pages": 1,
    "config": 2,
    "durable": 2,
    "startup": 2,
    "layout": 3,
    "locks": 3,
    "clusters": 3,
    "recipes": 3,
    "models": 3,
    "events": 4,
    "goodput": 4,
    "plan": 4,
    "devices": 5,
    "views": 5,
    "mcore": 6,
    "report": 6,
    "world": 7,
    "data": 8,
    "assembly": 9,
    "ckpt": 9,
    "convert": 10,
    "train": 11,
    "launching": 12,
    "doctor": 13,
    "loading": 13,
    "api": 14,
    "cli": 15,
    "__main__": 16,
}
FOLDED = {
    re.compile(r"mtrain\.models\.\w+\.(config|rules)\b"): "config",
    re.compile(r"mtrain\.models\.\w+\.hf_config\b"): "recipes",
    re.compile(r"mtrain\.models\.(\w+\.(build|data|layers|hf|hf_files)|table)\b"): "assembly",
}
"""Modules of a family -> the package whose layer they are on. The keys and rules of a family
are a part of `config`, its readers of `config.json` a part of `recipes`; the modules that build it,
feed it or rename its weights need torch.
"""
ONLY_IN = {
    "click": ("cli/",),
    "hydra": ("config/compose/hydra_source.py", "config/compose/grammar.py"),
    "omegaconf": ("config/compose/hydra_source.py",),
    "pydantic": ("config/", "models/"),
    "megatron": ("mcore/",),
    "transformer_engine": ("mcore/",),
    "safetensors": ("ckpt/",),
    "tokenizers": ("data/",),
}
TOP_LEVEL = {
    "conf",
    "recipes",
    "src",
    "kernels",
    "tests",
    "benchmarks",
    "docs",
    "examples",
    "launch.py",
    "conftest.py",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "mkdocs.yml",
}
SPECIFICATIONS = "config/optimizers/"
"""Modules of layer 1 whose functions build what they describe: those import torch and layers below
`build`.
"""
SEARCH = "plan/tune/costs.py"
"""Sums over thousands of layouts, with numpy; loaded only where a layout is searched."""
BUILDERS = LAYERS["mcore"] + 1
DEVICE_WORDS = {"cuda", "cpu"}
KNOWS_DEVICES = ("devices/", "config/machine/devices.py", "mcore/adapter/hook.py")
"""Devices themselves, their facts, and the hook that rewrites the word in megatron-core's source.
"""


@cache
def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Return every module that a file imports, with the line."""
    found: list[tuple[str, int]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node.lineno))
            found += ((f"{node.module}.{name.name}", node.lineno) for name in node.names)
    return found


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a name or of attributes of one, "" for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def name_of(path: Path) -> str:
    """Return `mtrain.config.compose.yaml_reader` of its file; a package has the name of its
    folder.
    """
    return ".".join(("mtrain", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def inside_functions(path: Path) -> set[int]:
    """Return the lines of a specification that run when it builds, not when it is imported; none
    for other files.
    """
    if not str(path.relative_to(SOURCE)).startswith(SPECIFICATIONS):
        return set()
    functions = [node for node in tree_of(path).body if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "mtrain" and len(parts) > 1 else None


def layer_of(module: str) -> int:
    """Return the layer of a module, or of a name in one; -1: of `mtrain` itself."""
    package = package_of(module)
    if package is None or package == "__version__":
        return -1
    return LAYERS[home(module)]


def home(module: str) -> str:
    """Return the package that a module belongs to: that of its folder, or of its kind in a
    family.
    """
    folded = (package for place, package in FOLDED.items() if place.match(module))
    return next(folded, package_of(module) or "")


def test_law_imports_go_downward() -> None:
    for path in modules():
        _imports_go_downward(path)


def _imports_go_downward(path: Path) -> None:
    here = layer_of(name_of(path))
    package = package_of(name_of(path))
    for module, line in imports(path):
        if module.partition(".")[0] != "mtrain":
            continue
        known = package_of(module) in {None, "__version__", *LAYERS}
        assert known, (
            f"{path}:{line}: {module} has no layer; give its package one here and in"
            " docs/concepts/architecture.md"
        )
        there = layer_of(module)
        below = BUILDERS if line in inside_functions(path) else here
        together = package_of(module) == package or home(module) == home(name_of(path))
        assert there < below or (there == here and together), (
            f"{path}:{line}: {package} (layer {here}) imports {module} (layer {there}). "
            "Imports go downward, and packages of one layer do not know each other."
        )


def test_law_family_builders_stand_above_plan() -> None:
    assert (
        layer_of("mtrain.models.gpt.build.chunk")
        == layer_of("mtrain.assembly.model")
        > LAYERS["mcore"]
    )
    assert (
        layer_of("mtrain.models.gpt.count")
        == layer_of("mtrain.models.registry.builder")
        < LAYERS["plan"]
    )


def uses(name: str, nodes: Iterable[ast.AST], known: Collection[str]) -> set[str]:
    """Return the modules that one imports, on load or later inside of a function.

    That `a.b.c` loads the packages `a` and `a.b` first is left out: there is no way around it.
    """
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}.intersection(known)
            found |= inner or {str(node.module)}
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return found.intersection(known) - {name}


def circle(modules_by_name: Mapping[str, Iterable[ast.AST]]) -> list[str]:
    """Return modules of which each imports the next and the last the first; [] without a cycle."""
    graph = {
        name: uses(name, nodes, modules_by_name.keys()) for name, nodes in modules_by_name.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_law_no_import_cycle() -> None:
    found = circle({name_of(path): nodes_of(path) for path in modules()})
    assert not found, (
        f"{' <- '.join(found)}: modules that need each other are one; move what both need below"
        " them, or hand it over as an argument. An import inside of a function counts as well"
    )


def test_law_import_cycle_inside_function_is_found() -> None:
    texts = {
        "m.a": "from m.b import x",
        "m.b": "import m.c",
        "m.c": "def f():\n    from m import a",
        "m.d": "import m.a",
    }

    def found(**changed: str) -> list[str]:
        changes = {name.replace("_", "."): text for name, text in changed.items()}
        parsed = {name: ast.parse(text) for name, text in (texts | changes).items()}
        return circle({name: list(ast.walk(tree)) for name, tree in parsed.items()})

    assert set(found()) == {"m.a", "m.b", "m.c"}
    assert found(m_c="") == []
    assert found(m_c="import importlib\nimportlib.import_module('m.a')")


INSTALLS = ("install", "install_reader", "adapt")
"""Last names of the calls after which megatron-core is adapted to the device of a process."""


def when_loaded(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes of a module that run when it is imported."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not typing and not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            waiting += ast.iter_child_nodes(node)


def imported_by(node: ast.AST) -> set[str]:
    """Return the modules that one statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def loading_megatron(trees: Mapping[str, ast.Module]) -> set[str]:
    """Return the modules whose import loads megatron-core, directly or through others."""
    loads = {
        name: set().union(*map(imported_by, when_loaded(tree))) for name, tree in trees.items()
    }
    found: set[str] = set()
    while more := {
        name
        for name, used in loads.items()
        if name not in found
        and any(one.partition(".")[0] == "megatron" or one in found for one in used)
    }:
        found |= more
    return found


def too_early(tree: ast.Module, heavy: set[str]) -> Iterator[tuple[str, int]]:
    """Yield imports of modules that load megatron-core in a function that has not installed the
    adapter before.
    """
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        ready = [call.lineno for call in calls if dotted(call.func).rpartition(".")[2] in INSTALLS]
        for node in ast.walk(function):
            if imported_by(node) & heavy and min(ready, default=node.lineno) >= node.lineno:  # type: ignore[attr-defined]
                yield function.name, node.lineno  # type: ignore[attr-defined]


def test_law_adapter_before_megatron() -> None:
    """Check the source: earlier tests of a process may have installed the adapter; a user's shell
    has not.
    """
    trees = {name_of(path): tree_of(path) for path in modules()}
    heavy = loading_megatron(trees)
    for path in modules():
        if package_of(name_of(path)) in ("cli", "convert"):
            assert name_of(path) not in heavy, (
                f"{path}: importing it loads megatron-core, before a verb can say for which device"
            )
            for name, line in too_early(tree_of(path), heavy):
                raise AssertionError(
                    f"{path}:{line}: {name} loads megatron-core; install its adapter first"
                )


def test_law_early_megatron_import_is_found() -> None:
    texts = {
        "m.low": "from megatron.core import x",
        "m.mid": "import m.low",
        "m.late": "def f():\n    import m.low",
        "m.typed": "if TYPE_CHECKING:\n    import m.low",
    }
    assert loading_megatron({name: ast.parse(text) for name, text in texts.items()}) == {
        "m.low",
        "m.mid",
    }
    early = "def f():\n    from m.mid import y\n    adapter.install(d)"
    late = "def f():\n    adapter.install(d)\n    from m.mid import y"
    assert [list(too_early(ast.parse(text), {"m.mid"})) for text in (early, late)] == [
        [("f", 2)],
        [],
    ]


@pytest.mark.parametrize("library", ONLY_IN)
def test_law_library_in_its_package(library: str) -> None:
    for path in modules():
        where = str(path.relative_to(SOURCE))
        for module, line in imports(path):
            if module.split(".")[0] == library:
                allowed = any(where.startswith(place) for place in ONLY_IN[library])
                assert allowed, (
                    f"{path}:{line}: {library} is imported only in {', '.join(ONLY_IN[library])}"
                )


def test_law_no_torch_below_layer_four() -> None:
    for path in modules():
        if layer_of(name_of(path)) <= 3:
            for module, line in imports(path):
                heavy = (
                    ("torch",) if str(path.relative_to(SOURCE)) == SEARCH else ("torch", "numpy")
                )
                assert module.split(".")[0] not in heavy or line in inside_functions(path), (
                    f"{path}:{line}: layers 0 to 3 validate within a second, so they know no torch"
                )


def test_law_torch_cuda_in_one_file() -> None:
    for path in modules():
        if path == SOURCE / "devices/cuda.py":
            continue
        for node in nodes_of(path):
            named = (
                isinstance(node, ast.Attribute)
                and node.attr == "cuda"
                and isinstance(node.value, ast.Name)
            )
            assert not (named and node.value.id == "torch"), (  # type: ignore[attr-defined]
                f"{path}:{node.lineno}: torch.cuda is named only in devices/cuda.py; ask the device"  # type: ignore[attr-defined]
                " instead"
            )


def words_compared(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield constants that decide something: sides of a comparison, patterns of a match, keys of a
    table, prefixes.
    """
    for node in nodes:
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            parts = [node.pattern]
        elif isinstance(node, ast.Dict):
            parts = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith", "get", "__eq__"):
                parts = list(node.args)
            else:
                parts = []
        for inner in (inner for part in parts for inner in ast.walk(part)):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                yield inner.value, inner.lineno


def test_law_no_device_compared_by_name() -> None:
    for path in modules():
        if str(path.relative_to(SOURCE)).startswith(KNOWS_DEVICES):
            continue
        for word, line in words_compared(nodes_of(path)):
            assert word not in DEVICE_WORDS, (
                f"{path}:{line}: {word!r} decides something: name a fact in "
                "config/machine/devices.py, so that a new device states it and nothing else changes"
            )


@pytest.mark.parametrize(
    "text",
    [
        "x == 'cuda'",
        "x in ('cpu', y)",
        "{'cuda': 1}[x]",
        "match x:\n case 'cpu': pass",
        "x.startswith('cuda')",
    ],
)
def test_law_device_comparison_is_found(text: str) -> None:
    assert DEVICE_WORDS & {word for word, _ in words_compared(ast.walk(ast.parse(text)))}


def test_law_every_device_field_is_read() -> None:
    import dataclasses

    from mtrain.config.machine.devices import DeviceFacts
    from mtrain.devices.base import Device

    read = {
        node.attr
        for path in modules()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    for kind in (Device, DeviceFacts):
        unread = {field.name for field in dataclasses.fields(kind)} - read
        assert not unread, (
            f"{kind.__name__}: nobody reads {sorted(unread)}; a plug-in would fill it in vain"
        )


def test_law_no_optimizer_compared_by_name() -> None:
    from mtrain.config.optimizers import OPTIMIZERS

    for path in modules():
        if str(path.relative_to(SOURCE)).startswith(SPECIFICATIONS):
            continue
        for word, line in words_compared(nodes_of(path)):
            assert word not in OPTIMIZERS, (
                f"{path}:{line}: {word!r} decides something: its specification in {SPECIFICATIONS}"
                " says what differs"
            )


def test_law_kernels_import_neither_mtrain_nor_megatron() -> None:
    for path in sorted(KERNELS.rglob("*.py")):
        for module, line in imports(path):
            assert module.split(".")[0] not in (
                "mtrain",
                "megatron",
            ), f"{path}:{line}: mtrain_kernels is self-contained, so that others can use it"


def test_law_no_pickle() -> None:
    for path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                spelled = dotted(node.func)
                assert spelled not in (
                    "pickle.load",
                    "pickle.loads",
                    "torch.load",
                    "np.load",
                    "numpy.load",
                ), f"{path}:{node.lineno}: {spelled} can run what a stranger wrote"


BETWEEN_PROCESSES = ("world/", "launching/local.py", "launching/torchrun.py")
"""Modules that send JSON to another process of the same run, which reads Python's additions to
it.
"""
OF_FINITE_VALUES = ("config/", "recipes/", "strict_json.py")


def test_law_runs_write_standard_json() -> None:
    for path in modules():
        if str(path.relative_to(SOURCE)).startswith((*BETWEEN_PROCESSES, *OF_FINITE_VALUES)):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and dotted(node.func) in (
                "json.dumps",
                "json.dump",
                "dumps",
            ):
                assert any(word.arg == "allow_nan" for word in node.keywords), (
                    f"{path}:{node.lineno}: json.dumps writes NaN, which is no JSON:"
                    " strict_json.dumps writes null"
                )


def test_law_errors_take_one_argument_per_line() -> None:
    """Pass each text as an argument: a line break inside one is escaped, since it may come from a
    file's name.
    """
    kinds = {"MtrainError", "BadEnvironment", "CorruptData", "TrainingError", "Preempted"}
    for path in modules():
        for call in (n for n in nodes_of(path) if isinstance(n, ast.Call)):
            if isinstance(call.func, ast.Name) and call.func.id in kinds:
                texts = [
                    n.value for a in call.args for n in ast.walk(a) if isinstance(n, ast.Constant)
                ]
                split = any(
                    isinstance(n, ast.Attribute) and n.attr == "split"
                    for a in call.args
                    for n in ast.walk(a)
                )
                assert split or not any("\n" in str(t) for t in texts), (
                    f"{path}:{call.lineno}: an argument for each line"
                )


def test_law_lengths_of_files_and_functions() -> None:
    for path in modules():
        lines = len(text_of(path).splitlines())
        assert lines <= 600, f"{path} has {lines} lines: cut it where its ideas part"
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 80, f"{path}:{node.lineno}: {node.name} has {length} lines"


def test_law_known_top_level() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    top = {name.partition("/")[0] for name in listed.splitlines() if not name.startswith(".")}
    assert top == TOP_LEVEL, (
        "what is new at the top level is named in TOP_LEVEL with a reason to be there"
    )


def test_law_no_meaningless_package_name() -> None:
    for path in modules():
        assert not {"utils", "helpers", "common", "manager"} & set(path.with_suffix("").parts), (
            f"{path}: a name says what is in the package"
        )


def test_law_every_public_name_has_a_docstring() -> None:
    for path in modules():
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith("_"):
                assert ast.get_docstring(node), (
                    f"{path}:{node.lineno}: {node.name} has no docstring"
                )


def test_law_every_key_is_documented() -> None:
    def walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            inner = [
                a
                for a in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if isinstance(a, type)
            ]
            sections = [a for a in inner if issubclass(a, BaseModel)]
            if not field.description and not sections:
                yield f"{prefix}{name}"
            for section in sections:
                yield from walk(section, f"{prefix}{name}.")

    assert list(walk(documented(), "")) == []


def test_law_one_file_prints() -> None:
    for path in modules():
        if path == SOURCE / "errors.py":
            continue
        for node in nodes_of(path):
            spelled = dotted(node.func) if isinstance(node, ast.Call) else ""
            line = getattr(node, "lineno", 0)
            assert spelled not in ("print", "sys.stdout.write", "sys.stderr.write"), (
                f"{path}:{line}: the text may come from a file; print it with `errors.say` or "
                "`say_page`, which escape what a terminal would obey"
            )


def test_law_later_release_tests_are_in_engine_sample() -> None:
    said = (ROOT / "Makefile").read_text()
    sample = said.partition("ENGINE_SAMPLE :=")[2].partition("\n\n")[0]
    files = (ROOT / "tests/distributed").glob("test_*.py")
    waiting = [path for path in files if "skipif(not release.at_least" in path.read_text()]
    assert len(waiting) > 2
    for path in waiting:
        name = path.stem.removeprefix("test_")
        assert re.search(rf"\b{name}\b", sample), (
            f"{path.name} is skipped on the oldest release: add it to ENGINE_SAMPLE"
        )


NAME_LENGTH = 60


def units_of(stem: str) -> list[str]:
    """Return the units that tests of a file may name: runs of words of its name, as patterns."""
    words = [f"{word.removesuffix('s')}s?" for word in stem.removeprefix("test_").split("_")]
    size = len(words)
    return ["_".join(words[i:j]) for i in range(size) for j in range(i + 1, size + 1)]


def misnamed(stem: str, names: list[str]) -> list[str]:
    """Return the names of a file's tests that are too long, or all where no unit begins each."""
    long = [name for name in names if len(name) > NAME_LENGTH]
    shared = any(
        all(re.match(rf"test_{unit}_\w", name) for name in names) for unit in units_of(stem)
    )
    return long if shared else names


def test_law_tests_name_unit_condition_and_result() -> None:
    folders = (ROOT / "tests", ROOT / "kernels/tests")
    for path in (path for folder in folders for path in sorted(folder.rglob("test_*.py"))):
        names = [
            node.name
            for node in tree_of(path).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert not misnamed(path.stem, names), (
            f"{path}: {misnamed(path.stem, names)}: name a test test_<unit>_<condition>_<result>,"
            f" at most {NAME_LENGTH} characters; the unit is a part of the file's name"
        )


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (["test_fixes_missing_file_suggests_similar", "test_fixes_first_is_valid"], 0),
        (["test_fixes_missing_file_suggests_similar", "test_a_missing_file_is_named"], 2),
        (["test_fixes_" + "x" * 50], 1),
    ],
)
def test_law_misnamed_tests_are_found(names: list[str], wrong: int) -> None:
    assert len(misnamed("test_rules_fixes", names)) == wrong
