"""Checkpoints that a process of each rank writes while training goes on: the same bytes, and no
fault of the writer that goes unnoticed.
"""

from __future__ import annotations

import dataclasses
import errno
import filecmp
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from tests.faults.promises import Record, measured
from tests.support import faulty_writer, grouping_writer
from tests.support.devices import stand_in
from tests.support.forked import run_ranks
from tests.support.patience import slowness
from tests.support.runs import tiny_run, train_steps, whole_tensors

STEPS = 6
EXPERTS = {"moe": {"num_experts": 4, "ffn_hidden_size": 64}}
BIASED = {
    "moe": {
        **EXPERTS["moe"],
        "router_score_function": "sigmoid",
        "router_enable_expert_bias": True,
        "router_bias_update_rate": 1e-2,
        "router_load_balancing_type": "none",
    }
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2dp2 overlapped": {
        "ranks": 4,
        "tp": 2,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "expert bias": {"ranks": 2, "ep": 2, "model": BIASED},
    "low precision": {
        "ranks": 2,
        "dtype": "bf16",
        "distributed_optimizer": True,
        "optim": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    },
    "fsdp2": {"ranks": 2, "fsdp": "fsdp2"},
}


def of(layout: dict[str, Any], **checkpoint: Any) -> RunConfig:
    """Return a run that saves every second step."""
    run = tiny_run(**layout, trainer={"train_iters": STEPS})
    section = {"save_interval": 2, "keep": None, "barrier_timeout_s": 60.0, **checkpoint}
    return run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update=section)})


def fit(
    run: RunConfig,
    root: Path,
    before: Callable[[], None] | None = None,
    device: Any = None,
) -> tuple[list[tuple[float, float]], list[str], str]:
    """Train with the hook that saves; return losses and norms, notes, and the error."""
    from mtrain.ckpt.local import place_of
    from mtrain.errors import MtrainError
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.hooks.base import Hook
    from mtrain.train.hooks.checkpoints import Checkpoints
    from mtrain.train.loop.trainer import Trainer
    from mtrain.world.init import joined

    if before is not None:
        before()
    numbers: list[tuple[float, float]] = []
    notes: list[str] = []

    class Listens(Hook):
        def after_step(self, context: Any, result: Any) -> None:
            numbers.append((result.loss, result.grad_norm))

        def saved(self, context: Any, path: Path) -> None:
            notes.append(f"{context.state.step}: {path.name}")

    quiet: Any = SimpleNamespace(note=notes.append)
    with joined(run) as world:
        if device is not None:
            world = dataclasses.replace(world, device=device)
        context = assemble(run, world, splits_of(run))
        try:
            local = place_of(root.parent, run.checkpoint.local_dir)
            Trainer(context, [Listens(), Checkpoints(root, quiet, {}, local=local)]).fit()
        except MtrainError as error:
            return numbers, notes, f"{type(error).__name__}: {error}"
    return numbers, notes, ""


def small_memory() -> None:
    """Let copies take far less memory than the state has."""
    from mtrain.ckpt.saving import staging

    staging.PART_BYTES = 1 << 14
    staging.capacity_for = lambda nbytes, limit: 1 << 16  # type: ignore[assignment]


def files_of(root: Path) -> dict[str, list[str]]:
    """Return the names of everything in a folder of checkpoints."""
    return {path.name: sorted(os.listdir(path)) for path in sorted(root.iterdir())}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", LAYOUTS)
def test_background_save_equals_save_that_waits(name: str, tmp_path: Path) -> None:
    kinds: dict[str, tuple[bool, Any, Any]] = {
        "waits": (False, None, None),
        "goes on": (True, None, None),
        "in parts": (True, small_memory, None),
        "device": (True, None, stand_in(Counter())),
    }
    roots = {kind: tmp_path / kind for kind in kinds}
    numbers = {}
    for kind, (goes_on, before, device) in kinds.items():
        roots[kind].mkdir()
        run = of(LAYOUTS[name], async_save=goes_on)
        ranks = run_ranks(run.parallel.ranks, fit, run, roots[kind], before, device)
        assert not any(error for _, _, error in ranks), ranks
        # A device that works behind the host adds up the norm of the gradient in another order.
        parts = slice(1) if device is not None else slice(2)
        numbers[kind] = [[step[parts] for step in found] for found, _, _ in ranks]
        expected = [[step[parts] for step in found] for found in numbers["waits"]]
        assert numbers[kind] == expected
    files = files_of(roots["waits"])
    assert [*files] == ["step_00000002", "step_00000004", "step_00000006"]
    for kind in list(kinds)[1:]:
        assert files_of(roots[kind]) == files
        for step, names in files.items():
            pairs = (roots["waits"] / step, roots[kind] / step)
            same = [n for n in names if n not in ("manifest.json", "run.yaml")]
            assert filecmp.cmpfiles(*pairs, same, shallow=False) == (same, [], [])


def test_background_save_is_announced_on_all_ranks_at_once(tmp_path: Path) -> None:
    run = of({"ranks": 2}, async_save=True, save_interval=4)
    notes = [notes for _, notes, _ in run_ranks(2, fit, run, tmp_path)]
    announced = [[note for note in found if "step_" in note and "/" not in note] for found in notes]
    assert announced[0] == announced[1]
    assert [note.partition(": ")[2] for note in announced[0]] == ["step_00000004", "step_00000006"]


@pytest.mark.parametrize(
    ("fault", "at", "rank", "words"),
    [
        pytest.param("kill", 9, 1, "ended with SIGKILL", id="killed"),
        pytest.param("kill", 1, 0, "ended with SIGKILL", id="killed before the folder"),
        pytest.param("stop", 9, 1, "was stopped by SIGSTOP", id="stopped"),
        pytest.param("error", 9, 1, "No space left on device", id="disk full"),
        pytest.param(
            "error",
            2,
            0,
            "No space left on device",
            id="disk full for the folder",
            marks=pytest.mark.full,
        ),
    ],
)
def test_background_save_fault_names_the_writer(
    fault: str, at: int, rank: int, words: str, tmp_path: Path, record_property: Record
) -> None:
    run = of({"ranks": 2}, async_save=True)
    root = tmp_path / "checkpoints"
    root.mkdir()
    fired = tmp_path / "fired"

    def broken() -> None:
        faulty_writer.use(fault, at, rank, errno=errno.ENOSPC, once=fired)

    ranks = run_ranks(2, fit, run, root, broken)
    took_s = time.time() - fired.stat().st_mtime
    measured(record_property, writer_s=took_s)
    assert took_s < 5 * slowness()
    for _, _, error in ranks:
        assert error.startswith("TrainingError: the checkpoint ")
        assert words in error
        assert "step_00000002" in error
    assert files_of(root) == {}


def test_background_save_failure_may_be_survived(tmp_path: Path) -> None:
    run = of({"ranks": 2}, async_save=True, on_failure="continue")

    def broken() -> None:
        faulty_writer.use("kill", 9, 1)

    for numbers, _, error in run_ranks(2, fit, run, tmp_path, broken):
        # The writer that follows fails at the same call, and the last save has no later one.
        assert len(numbers) == STEPS
        assert "step_00000006 is not complete: the writer of rank 1" in error
    assert files_of(tmp_path) == {}


@pytest.mark.full
def test_background_save_full_disk_may_be_survived(tmp_path: Path) -> None:
    run = of({"ranks": 2}, async_save=True, on_failure="continue")

    def broken() -> None:
        faulty_writer.use("error", 9, 1, errno=errno.ENOSPC, once=tmp_path / "fired")

    for numbers, _, error in run_ranks(2, fit, run, tmp_path / "checkpoints", broken):
        assert len(numbers) == STEPS
        assert error == ""
    assert (tmp_path / "fired").exists()
    assert [*files_of(tmp_path / "checkpoints")] == ["step_00000004", "step_00000006"]


@pytest.mark.full
def test_background_save_of_last_step_is_tried_again_at_the_end(tmp_path: Path) -> None:
    run = of({"ranks": 2}, async_save=True, on_failure="continue", save_interval=STEPS)

    def broken() -> None:
        faulty_writer.use("kill", 9, 1, once=tmp_path / "fired")

    for _, _, error in run_ranks(2, fit, run, tmp_path / "checkpoints", broken):
        assert error == ""
    assert (tmp_path / "fired").exists()
    assert [*files_of(tmp_path / "checkpoints")] == ["step_00000006"]


@pytest.mark.full
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_background_save_retries_end_without_a_checkpoint(number: int, tmp_path: Path) -> None:
    run = of({"ranks": 1}, async_save=True, retries=1, save_interval=STEPS)

    def broken() -> None:
        faulty_writer.use("errors", 7, 0, errno=number)

    ((_, _, error),) = run_ranks(1, fit, run, tmp_path, broken)
    assert os.strerror(number) in error
    assert "step_00000006 cannot be written" in error
    assert files_of(tmp_path) == {}


def test_background_save_retry_writes_the_same(tmp_path: Path) -> None:
    run = of({"ranks": 1}, async_save=True, retries=1, save_interval=STEPS)

    def broken() -> None:
        faulty_writer.use("error", 7, 0, errno=errno.EIO)

    (found,) = run_ranks(1, fit, run, tmp_path / "retried", broken)
    assert found[2] == ""
    run_ranks(1, fit, of({"ranks": 1}, async_save=False, save_interval=STEPS), tmp_path / "plain")
    name = "step_00000006/rank_00000.safetensors"
    assert filecmp.cmp(tmp_path / "retried" / name, tmp_path / "plain" / name, shallow=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["dp2", "expert parallel", "distributed optimizer"])
def test_background_save_ranks_share_replicas_evenly(name: str, tmp_path: Path) -> None:
    from mtrain.ckpt.folder import parse_manifest

    layouts: dict[str, dict[str, Any]] = {
        "dp2": {"ranks": 2},
        "expert parallel": {"ranks": 4, "ep": 2, "model": EXPERTS},
        "distributed optimizer": {"ranks": 2, "distributed_optimizer": True, "dtype": "bf16"},
    }
    run = of(layouts[name], async_save=True, save_interval=STEPS)
    assert not any(error for _, _, error in run_ranks(run.parallel.ranks, fit, run, tmp_path))
    saved = tmp_path / f"step_{STEPS:08d}"
    sizes = [path.stat().st_size for path in saved.glob("rank_*.safetensors")]
    assert max(sizes) < 1.15 * min(sizes)
    for key, entry in parse_manifest(saved)["tensors"].items():
        places = [(p["offset"], p["shape"], p["flat"]) for p in entry["pieces"]]
        assert len(places) == len({str(place) for place in places}), key


def test_background_save_fills_no_moments_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def shards_twice() -> int:
        from mtrain.mcore.state.sharding import optimizer_shards
        from mtrain.train.assemble import assemble, splits_of
        from mtrain.world.init import joined

        run = of({})
        with joined(run) as world:
            state = assemble(run, world, splits_of(run)).state
            made = len(optimizer_shards(state.chunks, state.optimizer))
            monkeypatch.delattr(torch, "zeros_like")
            assert len(optimizer_shards(state.chunks, state.optimizer)) == made
        return made

    assert run_ranks(1, shards_twice)[0] > 0


@pytest.mark.full
def test_background_save_of_groups_equals_one_index(tmp_path: Path) -> None:
    kinds = {"whole": (True, None), "groups": (True, grouping_writer.use)}
    kinds["waits"] = (False, grouping_writer.use)
    layout = {"ranks": 4, "tp": 2, "distributed_optimizer": True}
    for kind, (goes_on, before) in kinds.items():
        (tmp_path / kind).mkdir()
        run = of(layout, async_save=goes_on, save_interval=STEPS)
        ranks = run_ranks(4, fit, run, tmp_path / kind, before)
        assert not any(error for _, _, error in ranks), ranks
    paths = {kind: tmp_path / kind / f"step_{STEPS:08d}" for kind in kinds}
    expected = whole_tensors(paths["whole"])
    for kind in ("groups", "waits"):
        names = {"index_00000.json", "index_00001.json", *os.listdir(paths["whole"])}
        assert set(os.listdir(paths[kind])) == names
        found = whole_tensors(paths[kind])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], one) for key, one in expected.items())
    # another layout reads it
    run = tiny_run(ranks=2, tp=2)
    run_ranks(2, lambda: train_steps(run, 1, load_from=paths["groups"]))
