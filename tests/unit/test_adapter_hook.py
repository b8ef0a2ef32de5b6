"""The import hook: what is rewritten, what is not, and that neither torch nor a
traceback notices.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain.config.engine import release
from mtrain.devices import registry
from mtrain.mcore.adapter import hook
from mtrain.mcore.patches.apply import apply_patches
from tests.support.tables import tables

TABLES = tables("adapter_hook")

CPU = registry.get("cpu")
ELSEWHERE = dataclasses.replace(
    CPU,
    name="musa",
    torch_type="musa",
    type_prefix="torch.musa.",
    pin_memory=True,
    namespace=SimpleNamespace(nvtx=SimpleNamespace(range_pop=7)),
)


def _rewritten(source: str, device: Any = CPU) -> str:
    return ast.unparse(hook.rewrite(source.encode(), "x.py", device)[0])


@pytest.mark.parametrize(
    ("source", "on_cpu", "on_musa"),
    TABLES["spellings"],
)
def test_adapter_hook_rewrites_each_cuda_spelling(source: str, on_cpu: str, on_musa: str) -> None:
    assert _rewritten(source) == on_cpu
    assert _rewritten(source, ELSEWHERE) == on_musa


@pytest.mark.parametrize(
    "source",
    [
        "x = 'nccl'",
        "f(backend='ucc')",
        "x = 'cuda_graph'",
        "x = 'a cuda'",
        "cuda = 1",
        "f(device='cpu')",
        "torch.cpu()",
        "self.cuda_graphs",
        "f'a cuda:{i}'",
        "mod.cuda",
    ],
)
def test_adapter_hook_keeps_other_words(source: str) -> None:
    assert _rewritten(source) == source
    assert not hook.rewrite(source.encode(), "x.py", CPU)[1]


def test_adapter_hook_moves_indexes_and_picks() -> None:
    adapter = hook._Adapter(CPU)
    elsewhere = hook._Adapter(ELSEWHERE)
    tensor = torch.zeros(2)
    assert adapter.move(tensor, CPU.namespace.current_device(), non_blocking=True) is tensor
    assert adapter.indexed(CPU.namespace.current_device()) == "cpu"
    assert elsewhere.indexed(3) == "musa:3"
    assert elsewhere.pick("nvtx.range_pop") == 7
    held = (
        adapter.to_host(tensor),
        adapter.to_host(tensor, "cpu", non_blocking=True),
        adapter.to_host(tensor, device="cpu"),
    )
    assert all(copy is not tensor and copy.data_ptr() != tensor.data_ptr() for copy in held)
    layer = torch.nn.Linear(1, 1)
    assert adapter.to_host(layer).weight is layer.weight
    with pytest.raises(ImportError, match=r"musa.*nvtx\.nothing"):
        elsewhere.pick("nvtx.nothing")


def _core_folder() -> Path:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "core"


def test_adapter_hook_uses_group_backend_of_device() -> None:
    assert _rewritten("f(backend='nccl')") == "f(backend='gloo')"


REWRITES = {
    (0, 16, 1): {
        "namespace": 450,
        "device string": 98,
        "is_cuda": 24,
        "cuda()": 21,
        "pin_memory": 14,
        "import": 10,
        "type string": 9,
        "backend": 2,
        "host copy": 46,
    },
    (0, 19, 2): {
        "namespace": 603,
        "device string": 114,
        "is_cuda": 68,
        "cuda()": 21,
        "pin_memory": 36,
        "import": 8,
        "type string": 9,
        "backend": 4,
        "host copy": 83,
    },
}


def test_adapter_hook_counts_rewrites_of_tested_releases() -> None:
    """Count again: another number means another megatron-core, whose changes must be read before
    this one is changed.
    """
    total: Counter[str] = Counter()
    for path in sorted(_core_folder().rglob("*.py")):
        source = path.read_bytes()
        if any(word in source for word in hook.WORDS):
            total += hook.rewrite(source, str(path), CPU)[1]
    assert dict(total) == REWRITES[release.release() or (0, 0, 0)]


def _run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **env},
    )


OPEN = (
    "from mtrain.devices import registry; import mtrain.mcore as m;"
    " m.install(registry.get('cpu'))\n"
)


@pytest.mark.full
def test_adapter_hook_installed_twice_keeps_torch_and_tracebacks(tmp_path: Path) -> None:
    code = (
        OPEN + "import sys, traceback, linecache, torch\nm.install(registry.get('cpu'))\nassert"
        " torch.cuda.__name__ == 'torch.cuda' and 'megatron' not in"
        " torch.cuda.current_device.__module__\nassert not any(n.startswith('transformer_engine')"
        " for n in sys.modules)\nassert"
        " m.rewrites()['megatron.core.tensor_parallel.random']['import'] == 2\nfrom mtrain.mcore"
        " import api\ntry: api.get_cuda_rng_tracker().fork('no such state').__enter__()\nexcept"
        " Exception as e: last = traceback.extract_tb(e.__traceback__)[-1]\nassert 'is not added'"
        " in linecache.getline(last.filename, last.lineno), last\ntry:"
        " m.install(registry.get('cpu'), without=('mla-flag',))\nexcept RuntimeError as e:"
        " print(e)\n"
    )
    for _ in range(2):  # the second time from the code cache
        done = _run(code, MTRAIN_CACHE=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert "other patches" in done.stdout
        assert not done.stderr, "the expected warnings are filtered"
    kept = [*(tmp_path / "code").iterdir()]
    assert len(kept) > 50
    assert stat.S_IMODE((tmp_path / "code").stat().st_mode) == 0o700


@pytest.mark.full
def test_adapter_hook_binds_third_device_to_its_namespace() -> None:
    code = (
        "import dataclasses, types\nfrom mtrain.devices import registry, cpu_namespace\nimport"
        " mtrain.mcore as m\nasked = []\nnamespace ="
        " types.SimpleNamespace(**vars(cpu_namespace))\nnamespace.current_device = lambda:"
        " asked.append('current_device') or"
        " cpu_namespace.current_device()\nm.install(dataclasses.replace(registry.get('cpu'),"
        " name='toy', namespace=namespace))\nfrom megatron.core.utils import"
        " GlobalMemoryBuffer\nGlobalMemoryBuffer().get_tensor((2, 2), __import__('torch').float32,"
        " 'x')\nassert asked and m.require_installed().name == 'toy'\n"
    )
    done = _run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import mtrain.mcore.api", r"call mtrain\.mcore\.install\(device\) first"),
        (
            "import mtrain.mcore as m; m.require_installed()",
            r"call mtrain\.mcore\.install\(device\) first",
        ),
        (
            "import sys; sys.modules['megatron.core'] = sys\n" + OPEN,
            "was imported before mtrain.mcore.install",
        ),
        (
            "import mtrain.mcore as m; m.engine.release = lambda: (0, 17, 0)\n" + OPEN,
            r"is 0\.17\.0; .*checked against 0\.16\.1 and 0\.19\.2 only",
        ),
    ],
)
def test_adapter_hook_misuse_is_reported(code: str, said: str) -> None:
    done = _run(code)
    assert done.returncode != 0
    assert re.search(said, done.stderr.splitlines()[-1]), done.stderr


def test_adapter_hook_unknown_fix_cannot_be_excluded() -> None:
    with pytest.raises(ValueError, match="no such patches: nothing"):
        apply_patches(CPU, frozenset({"nothing"}))


def test_adapter_hook_removes_stale_cached_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTRAIN_CACHE", str(tmp_path))
    code = compile("1", "x.py", "exec")
    for name in ("old", "loaded"):
        hook.store(name, code, {})
        os.utime(tmp_path / "code" / name, (0, 0))
    assert hook.load("loaded") is not None
    hook.store("new", code, {})
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == ["loaded", "new"]


def test_adapter_hook_reads_code_only_from_private_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTRAIN_CACHE", str(tmp_path))
    code = compile("1", "x.py", "exec")
    hook.store("key", code, {"namespace": 1})
    assert hook.load("key") == (code, {"namespace": 1})
    file = tmp_path / "code" / "key"
    file.chmod(0o666)
    assert hook.load("key") is None
    file.chmod(0o600)
    (tmp_path / "code").chmod(0o777)
    assert hook.load("key") is None
    hook.store("other", code, {})
    assert not (tmp_path / "code" / "other").exists()
    (tmp_path / "code").chmod(0o700)
    file.write_bytes(b"no code")
    assert hook.load("key") is None
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert hook.load("key") is None


QUIET = """
import importlib
from mtrain import mcore
from mtrain.config.engine import release as engine
from mtrain.devices.cpu import CPU
mcore.install(CPU)
importlib.import_module("mtrain.train.assemble")
importlib.import_module("mtrain.models.gpt.build")
# as after the installation of a package that is being compiled
for folder in (engine.folder(), "elsewhere"):
    compile("'\\\\-'", f"{folder}/escapes.py", "exec")
"""


@pytest.mark.engine
def test_adapter_hook_import_prints_nothing_unfixable(tmp_path: Path) -> None:
    shown = [f"-Wdefault::{kind}" for kind in ("UserWarning", "SyntaxWarning")]
    shown.append("-Wdefault:invalid escape:DeprecationWarning")  # what Python 3.11 calls it
    done = subprocess.run(
        [sys.executable, *shown, "-c", QUIET],
        env={**os.environ, "MTRAIN_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert [line for line in said if "megatron" in line] == []
    assert any(line.startswith("elsewhere/escapes.py") for line in said), (
        "of others it is still said"
    )
