"""Machines with too few GPUs refuse to run a configuration, which may still be looked at for
another machine.
"""

from __future__ import annotations

import pytest

from mtrain.api import TooFewDevices, load
from mtrain.cli.explain import _raised
from mtrain.config.machine.nvml import Gpu
from mtrain.config.machine.visible import shown
from mtrain.config.messages.codes import codes
from mtrain.config.resolve.resolution import Machine
from mtrain.errors import BadEnvironment, ConfigError
from tests.support.configs import LAPTOP

CUDA = "cluster.device=cuda"
OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}


def machine(gpus: int, visible: str | None = None) -> Machine:
    """Return a machine with so many H200, some of which CUDA_VISIBLE_DEVICES may hide."""
    seen = shown(
        [
            Gpu("NVIDIA H200", f"GPU-{number}{number}aa", 90, 1 << 37, 1 << 37)
            for number in range(gpus)
        ],
        visible,
    )
    return Machine(cpu_cores=16, memory_bytes=1 << 36, gpus=seen.count, nvidia=seen)


def refused(here: Machine, *words: str, machines: int | None = None, **environment: str) -> str:
    """Return the text with which a machine refuses to run a configuration."""
    with pytest.raises(BadEnvironment) as caught:
        load(["data=mock", *words], here, environment, machines=machines)
    assert caught.value.exit_code == 3
    return str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "words", "needs"),
    [
        (
            0,
            (CUDA, "parallel=single"),
            "1 GPU on this machine; here: 0\n      fix: a machine with GPUs, or cluster.device=cpu",
        ),
        (0, (CUDA, "parallel=auto"), "1 GPU on this machine; here: 0"),
        (0, (CUDA, "cluster.nodes=2", "parallel=tp4"), "2 GPUs on this machine; here: 0"),
        (
            2,
            (CUDA, "parallel.ranks=4"),
            "4 GPUs on this machine; here: 2\n      fix: a layout of 2 ranks, more machines, or",
        ),
        (2, (CUDA, "parallel=tp4pp2"), "8 GPUs on this machine; here: 2"),
        (
            1,
            (CUDA, "parallel=tp2dp2"),
            "4 GPUs on this machine; here: 1\n      fix: a layout of 1 rank, more machines",
        ),
    ],
)
def test_launching_devices_too_few_are_an_environment_fault(
    gpus: int, words: tuple[str, ...], needs: str
) -> None:
    said = refused(machine(gpus), *words)
    assert f"[MT051] needs {needs}" in said
    assert "fix: " in said
    with pytest.raises(
        ConfigError
    ):  # it may be looked at for another machine, where it has to say how many are there
        load(["data=mock", *words], machine(gpus), {}, to_run=False)


@pytest.mark.parametrize("visible", ["", "0,0", "GPU-99aa", "0,GPU-99aa"])
def test_launching_devices_hiding_variable_is_named_with_count(visible: str) -> None:
    said = refused(machine(4, visible), CUDA, "parallel=tp2")
    assert "[MT051] needs 2 GPUs on this machine" in said
    assert "[MT052] CUDA_VISIBLE_DEVICES" in said
    assert (
        "fix: unset CUDA_VISIBLE_DEVICES, or list each GPU once: CUDA_VISIBLE_DEVICES=0,1,2,3"
        in said
    )


def test_launching_devices_other_errors_are_reported_too() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["data=mock", CUDA, "parallel=tp3"], LAPTOP, {})
    codes = {problem.code for problem in caught.value.problems if problem.severity == "error"}
    assert {"MT101", "MT113"} <= codes
    with pytest.raises(ConfigError, match="MT012"):
        load(["data=mock", CUDA, "optim.lrr=1"], LAPTOP, {})


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((CUDA, "parallel=tp4", "cluster.devices_per_node=2"), "MT112"),
        ((CUDA, "parallel.ranks=3", "parallel=tp2"), "MT112"),
        ((CUDA, "parallel.ranks=4", "cluster.nodes=3"), "MT114"),
        (("cluster=cpu", "parallel.ranks=4", "cluster.nodes=3"), "MT114"),
        (("cluster.device=musa",), "MT113"),
    ],
)
def test_launching_devices_unfixable_layout_is_a_config_fault(
    words: tuple[str, ...], code: str
) -> None:
    with pytest.raises(ConfigError, match=code):
        load(["data=mock", *words], machine(2), {})


def test_launching_devices_launcher_ranks_count_by_machine() -> None:
    assert "[MT051] needs 4 GPUs on this machine; here: 2" in refused(
        machine(2), CUDA, machines=1, **OF_TORCHRUN
    )
    with pytest.raises(ConfigError, match=r"cluster\.nodes=2"):
        load(["data=mock", CUDA], machine(2), OF_TORCHRUN, machines=2)


def test_launching_devices_code_page_shows_example_everywhere() -> None:
    with pytest.raises(TooFewDevices):
        load([CUDA], LAPTOP, {})
    (problem,) = _raised(codes()["MT113"])
    assert "device cuda" in problem.rule
