"""Every patch of `mtrain.mcore.patches.apply` is needed, and is enough."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtrain.config.engine import release
from mtrain.mcore.patches.apply import PATCHES
from tests.support import tiny
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.patch_cases import CASES, FINE, outcome
from tests.support.patience import patient

pytestmark = [pytest.mark.dist, pytest.mark.engine]


@pytest.fixture(scope="module")
def without(request: pytest.FixtureRequest) -> dict[str, str]:
    """Return the result of each case without its patch, from one process that imports megatron-core
    and forks each.
    """
    names = [
        item.callspec.params["name"]  # type: ignore[attr-defined]
        for item in request.session.items
        if "without" in item.fixturenames  # type: ignore[attr-defined]
    ]  # type: ignore[attr-defined]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.patch_cases", *names],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


HERE = [patch.name for patch in PATCHES if release.release() in patch.versions]
# Later releases offload tensors of CUDA only, so that case cannot run there.
RUNNABLE = [name for name in CASES if name != "evaluated-offload" or name in HERE]
PLAIN = [name for name in HERE if not name.startswith("fsdp-")]


@pytest.mark.parametrize("name", some(HERE, always=PLAIN[::6]))
def test_adapter_patches_without_fix_shows_defect(name: str, without: dict[str, str]) -> None:
    assert re.search(CASES[name].symptom, without[name]), without[name]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUNNABLE)
def test_adapter_patches_with_fix_removes_defect(name: str) -> None:
    assert outcome(CASES[name]) == FINE


def test_adapter_patches_every_fix_has_a_case() -> None:
    assert [patch.name for patch in PATCHES] == list(CASES)


def test_adapter_patches_offloading_takes_torch_parameters() -> None:
    from mtrain.mcore import api

    def stepped() -> list[float]:
        tiny.start_world()
        found = []
        for form in (
            lambda p: [p],
            lambda p: iter([p]),
            lambda p: [{"params": p}],
            lambda p: [{"params": iter([p])}],
        ):
            weight = torch.nn.Parameter(torch.ones(4))
            optimizer = api.HybridDeviceOptimizer(
                form(weight),
                1.0,
                torch.optim.SGD,
                torch.optim.SGD,
                pin_cpu_grads=False,
                pin_cpu_params=False,
                lr=0.5,
            )
            weight.grad = torch.ones(4)
            optimizer.step()
            found.append(weight[0].item())
        return found

    assert run_ranks(1, stepped)[0] == [0.5] * 4


def test_adapter_patches_projection_coexists_with_modelopt() -> None:
    from megatron.core.transformer import multi_latent_attention

    from mtrain.mcore.layers.portable import DuplicatedLinear

    known = [multi_latent_attention.Linear]
    assert DuplicatedLinear in known
    theirs = importlib.import_module("megatron.core.post_training.modelopt.layers").Linear
    assert theirs in known or release.at_least(0, 19), (
        "since 0.19 it is known only with TransformerEngine"
    )
    assert torch.nn.Linear not in known
