"""Fixtures of the kernels' tests: without a GPU they run in Triton's interpreter, and are compiled
for GPUs in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = (
    "1"  # must be said before torch is imported; threads cost more than these tensors
)
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be said before Triton is imported

COMPILATION = pytest.StashKey[subprocess.Popen[str]]()
HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Test the compilation last; of each product of sizes, formats and ways, test every pair."""
    items.sort(key=lambda item: item.path.name == "test_aot.py")
    for item in items:
        # a comparison of paths takes seconds for all the tests of the repository
        if item.nodeid.startswith("kernels/tests/"):
            item.add_marker(pytest.mark.covering)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the compilation early, unless many workers would each start it."""
    alone = not hasattr(session.config, "workerinput") and not session.config.option.collectonly
    if alone and (words := _wanted(session)):
        session.config.stash[COMPILATION] = _compile(words)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the compilation with a session that ends early."""
    if COMPILATION in config.stash:
        config.stash[COMPILATION].terminate()


@pytest.fixture(scope="session")
def compilation(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return rows and faults of every kernel, compiled in a separate process for the generations
    that are tested.
    """
    stash = request.config.stash
    process = stash[COMPILATION] if COMPILATION in stash else _compile(_wanted(request.session))
    out, err = process.communicate()
    assert out, err
    said: dict[str, Any] = json.loads(out)
    return said


def _wanted(session: pytest.Session) -> list[str]:
    """Return the generations of GPUs that the tests need, as words for `aot`; with `--once` if no
    test needs variants.
    """
    asking = (item for item in session.items if "compilation" in getattr(item, "fixturenames", ()))
    asked = [item.callspec.params for item in asking if isinstance(item, pytest.Function)]
    archs = ",".join(sorted({str(params["arch"]) for params in asked}))
    once = [] if any(params["variants"] for params in asked) else ["--once"]
    return ["--archs", archs, *once] if asked else []


def _compile(words: list[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{PACKAGES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "mtrain_kernels.aot", "--json", "--processes", "2", *words]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
