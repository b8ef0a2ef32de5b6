"""The disk of a run's checkpoints: planned, and compared with what is free before a run."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.run import RunConfig
from mtrain.launching.preflight import shortages
from mtrain.launching.verdict.figures import nbytes
from mtrain.plan.count import parameters
from mtrain.plan.report import report
from mtrain.plan.storage import at_once, copies, storage
from tests.support.configs import LAPTOP, tiny
from tests.support.saved import manifest_of


def saving(steps: int = 100, **keys: Any) -> RunConfig:
    return resolve(
        tiny(trainer__train_iters=steps, **{f"checkpoint__{k}": v for k, v in keys.items()}), LAPTOP
    )


SAVING: dict[str, tuple[dict[str, Any], int]] = {
    "keep and the draft": ({"save_interval": 10, "keep": 2}, 3),
    "no more than are saved": ({"save_interval": 50, "keep": 7}, 2),
    "the last is one more": ({"save_interval": 40, "keep": 7}, 3),
    "permanent ones": ({"save_interval": 10, "keep": 2, "keep_every": 20}, 8),
    "the best": ({"save_interval": 10, "keep": 2, "keep_best": "valid_loss"}, 4),
    "all": ({"save_interval": 10, "keep": None}, 10),
    "by the clock": ({"save_interval": 0, "save_minutes": 5.0, "keep": 3}, 4),
    "only the last": ({"save_interval": 0}, 1),
    "none": ({"save_interval": 0, "save_final": False}, 0),
}


@pytest.mark.parametrize("name", SAVING)
def test_checkpoint_policy_gives_number_at_once(name: str) -> None:
    keys, number = SAVING[name]
    assert at_once(saving(**keys)) == number


def test_checkpoint_bytes_are_those_of_the_manifest() -> None:
    run = saving(save_interval=10, keep=2)
    found = storage(run)
    assert found is not None
    written = sum(map(nbytes, manifest_of(run)["tensors"].values()))
    assert found.first == found.further == written
    assert found.total == 3 * written


def test_checkpoint_exports_are_counted() -> None:
    plain = saving(save_interval=30, keep=2)
    found = storage(saving(save_interval=30, keep=2, hf_every=2))
    assert found is not None
    # steps 30, 60, 90 and 100 are saved, 60 and 100 exported
    assert found.exports == 2 * 4 * parameters(plain.model)
    assert found.total == found.checkpoints + found.exports


@pytest.mark.parametrize(("layout", "share"), [("dp", 1.0), ("tp", 0.5)])
def test_checkpoint_replicas_of_machines_are_counted(layout: str, share: float) -> None:
    local = {"local_dir": "/dev/shm", "local_interval": 5, "local_replicas": 1}
    keys = {f"checkpoint__{key}": value for key, value in local.items()}
    keys |= {"cluster__nodes": 2, "parallel__ranks": 2}
    run = resolve(tiny(**keys, **({"parallel__tp": 2} if layout == "tp" else {})), LAPTOP)
    saved = report(run)["checkpoint"]
    # each machine holds all, or its half and small weights of which each rank has a copy
    assert saved["local_sent_bytes"] == pytest.approx(share * saved["bytes"], rel=0.01)
    assert saved["local_disk_bytes"] == 8 * saved["local_sent_bytes"]


def test_checkpoint_linked_weights_count_once() -> None:
    run = resolve(tiny(peft__kind="lora", checkpoint__save_interval=10), LAPTOP)
    found = storage(run)
    assert found is not None
    assert found.first - found.further == 4 * parameters(run.model)
    assert found.total == found.first + 2 * found.further


def test_checkpoint_disk_too_small_for_all_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    run = saving(save_interval=10, keep=4)
    machine = Machine(cpu_cores=8, memory_bytes=1 << 45)
    found = storage(run)
    assert found is not None
    disk = SimpleNamespace(total=1 << 50, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)

    def said(run: RunConfig = run) -> list[tuple[bool, str, str]]:
        return [
            (s.warning, s.text, s.fix) for s in shortages(run, machine) if "checkpoint" in s.text
        ]

    disk.free = found.total
    assert said() == []
    disk.free = found.total - 1
    ((warning, text, fix),) = said()
    assert warning
    assert "up to 5 exist at once" in text
    assert fix.startswith("checkpoint.keep=3, or log.runs_dir=FOLDER")
    kept = run.checkpoint.model_copy(update={"keep": 3})
    assert said(run.model_copy(update={"checkpoint": kept})) == []
    # a run that continues has some of them
    resumed = run.checkpoint.model_copy(update={"resume": "latest"})
    assert said(run.model_copy(update={"checkpoint": resumed})) == []
    disk.free = found.first - 1
    ((warning, text, fix),) = said()
    assert not warning
    assert text.startswith("needs ")
    assert "of disk for a checkpoint" in text
    disk.total = 0
    assert said() == []


def test_checkpoint_copies_beyond_the_memory_are_refused() -> None:
    run = saving(async_save=True, staging_mib=64)
    small = Machine(cpu_cores=2, memory_bytes=1 << 20)
    lines = [line for shortage in shortages(run, small) for line in shortage.lines()]
    assert any("checkpoint.staging_mib=64: needs " in line for line in lines)
    assert not any("staging_mib" in str(shortage) for shortage in shortages(run, LAPTOP))
    # The copies are no larger than the state.
    state = copies(run)
    assert state is not None
    assert 0 < state < 64 << 20
    assert copies(saving(async_save=True, staging_mib=1)) == min(state, 1 << 20)
    assert copies(saving(async_save=False)) == 0
