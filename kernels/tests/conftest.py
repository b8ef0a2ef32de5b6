"""Without a GPU the kernels run in Triton's interpreter, and are compiled for GPUs in a process beside the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # must be said before torch is imported; threads cost more than these tensors
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be said before Triton is imported

COMPILATION = pytest.StashKey[subprocess.Popen[str]]()
PACKAGES = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Compilation starts first and is asked last."""
    items.sort(key=lambda item: item.path.name == "test_aot.py")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the compilation early, unless many workers would each start it."""
    wanted = any("compilation" in getattr(item, "fixturenames", ()) for item in session.items)
    alone = not hasattr(session.config, "workerinput") and not session.config.option.collectonly
    if wanted and alone:
        session.config.stash[COMPILATION] = _compile()


def pytest_unconfigure(config: pytest.Config) -> None:
    """A session that ends early takes the compilation along."""
    if COMPILATION in config.stash:
        config.stash[COMPILATION].terminate()


@pytest.fixture(scope="session")
def compilation(request: pytest.FixtureRequest) -> subprocess.Popen[str]:
    """The process that compiles every kernel and prints rows and faults as JSON."""
    stash = request.config.stash
    return stash[COMPILATION] if COMPILATION in stash else stash.setdefault(COMPILATION, _compile())


def _compile() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "mtrain_kernels.aot", "--json", "--processes", "2"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
