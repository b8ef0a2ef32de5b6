"""One release of megatron-core continues the runs of another: the same losses, and checkpoints bit
for bit.

`make engines` runs this on 0.19, next to the release that is installed.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.engine import release
from tests.support.engine_runs import (
    CASES,
    IN_HALVES,
    SAVED,
    STEPS,
    in_other_release,
    resumed,
    trained,
)
from tests.support.runs import whole_tensors

_INSTALLED = Path(sysconfig.get_path("purelib"))
pytestmark = pytest.mark.skipif(
    "MTRAIN_TWO_ENGINES" not in os.environ,
    reason="one megatron-core is expected here: `make engines` has two",
)
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return a folder with the runs of each release, the numbers of this one, and those of the
    other.
    """
    folder = release.folder()
    assert folder is not None
    assert _INSTALLED not in folder.parents, (
        "PYTHONPATH has to hold another megatron-core than the installed one"
    )
    home = tmp_path_factory.mktemp("engines")
    here = {name: {"trained": trained(home / "here", name)} for name in CASES}
    answer = in_other_release(home)
    if answer["release"] == release.words(release.release() or release.SUPPORTED[0]):
        pytest.fail("both megatron-core are the same release")
    for name in CASES:
        here[name]["resumed"] = resumed(home / "there", name)
    return home, here, answer["cases"]


def _far(left: Any, right: Any) -> float:
    pairs = [pair for a, b in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(a / b - 1) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_engines_have_equal_losses_over_twenty_steps(name: str, both: Any) -> None:
    _, here, there = both
    assert len(here[name]["trained"]) == STEPS
    assert _far(here[name]["trained"], there[name]["trained"]) < TOLERANCE


@pytest.mark.parametrize("name", IN_HALVES)
def test_engines_hybrid_equals_gpt_of_other_release(name: str, both: Any) -> None:
    home, here, there = both
    for left, right in ((here, there), (there, here)):
        assert _far(left[f"{name}, hybrid"]["trained"], right[name]["trained"]) < TOLERANCE
    step = f"step_{SAVED:08d}"
    for side in ("here", "there"):
        one, other = (
            whole_tensors(home / side / case / step) for case in (name, f"{name}, hybrid")
        )
        assert {key: (t.shape, t.dtype) for key, t in one.items()} == {
            key: (t.shape, t.dtype) for key, t in other.items()
        }


@pytest.mark.parametrize("name", CASES)
def test_engines_resume_each_other(name: str, both: Any) -> None:
    _, here, there = both
    assert _far(there[name]["resumed"], here[name]["trained"][SAVED:]) < TOLERANCE
    assert _far(here[name]["resumed"], there[name]["trained"][SAVED:]) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("saved_by", ["here", "there"])
def test_engines_read_each_other_bitwise(name: str, saved_by: str, both: Any) -> None:
    step = f"step_{SAVED:08d}"
    saved, again = (
        whole_tensors(folder / name / step)
        for folder in (both[0] / saved_by, both[0] / saved_by / "again")
    )
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[key], value) for key, value in again.items())
