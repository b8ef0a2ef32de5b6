"""Profiles of a run's steps: by its configuration and on request, over ranks with skewed clocks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mtrain.views.profiles import (
    CLOCK,
    PARTS,
    Request,
    facts_file,
    folder_of,
    measure,
    merge,
    traces,
)
from mtrain.world.labels import Labels, labelled
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run

REQUEST = {"id": "asked", "steps": 2, "ranks": None, "content": ["torch", "shapes"]}
SKEW_NS = 1_700_000_000
MOST_APART_US = 1000


def job(home: Path, ranks: int, **parallel: Any) -> None:
    """Train on some ranks, the clock of each behind that of the one before, with a profile of step
    2 and a request that the run finds after its first step.
    """

    def rank() -> bool:
        from mtrain.train.run import Paths, train
        from mtrain.world import clocks

        real = clocks.now_ns
        clocks.now_ns = lambda: real() - SKEW_NS * dist.get_rank()
        # A store as a run has it: that of these ranks polls files, every few milliseconds.
        first = dist.get_rank() == 0
        opened = partial(dist.TCPStore, "127.0.0.1", wait_for_workers=False)
        served = opened(0, is_master=True) if first else None
        port = [served.port if served is not None else 0]
        dist.broadcast_object_list(port)
        own = served or opened(port[0])
        measured = clocks.offset_ns
        clocks.offset_ns = lambda _, *more: measured(own, *more)
        keys = {"train_iters": 5, "eval_iters": 0, "profile_step": 2, "sample_tokens": 0}
        run = tiny_run(trainer=keys, optim={"warmup_iters": 1}, ranks=ranks, **parallel)
        train(run, lambda _: Paths(home), lambda *_: None)
        return Labels.now is None

    (home / "profile.request").write_text(json.dumps(REQUEST))
    assert run_ranks(ranks, rank, timeout_s=240) == [True] * ranks


def check(home: Path, ranks: int) -> None:
    """Check the profiles of `job`: clocks, parts, labels, and what the run left behind."""
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "lr" in line}
    assert [step for step, line in steps.items() if "profiled" in line] == [2, 3, 4]
    assert not list(home.glob("*request*"))
    assert len(list((home / "profiles").iterdir())) == 2
    for first, last in ((2, 2), (3, 4)):
        folder = folder_of(home, first)
        found = traces(folder)
        # By the key only rank 0 writes a trace, on request all ranks.
        assert len(found) == (ranks if first == 3 else 1)
        measure(found)
        assert sum(found[0].parts.values()) / 1e6 == pytest.approx(steps[last]["step_s"], rel=0.02)
        for one in found:
            assert sum(one.parts.values()) / 1e6 == pytest.approx(one.step_s, rel=0.02)
            assert set(one.parts) == set(PARTS)
            assert min(one.parts.values()) >= 0 < one.parts["gemm"]
        if ranks > 1:
            assert found[0].parts["tp"] > 0
        # Without the skew, the clock of this machine is the same for all ranks; that of the
        # profiler is not, by some milliseconds.
        shifts = []
        for one in found:
            facts = json.loads(facts_file(folder, one.rank).read_text())
            name = f"{CLOCK} {facts['mark']}"
            (mark,) = (event for event in one.events if event.get("name") == name)
            there = facts["clock_ns"] + SKEW_NS * one.rank
            shifts.append(mark["ts"] + mark["dur"] / 2 - there / 1e3)
        assert max(shifts) - min(shifts) <= MOST_APART_US
        merged = json.loads(gzip.decompress(merge(folder, found).read_bytes()))["traceEvents"]
        names = {event.get("name") for event in merged}
        for label in ("mtrain:step", "mtrain:forward 1", "mtrain:backward 1", "mtrain:optimizer"):
            assert label in names


@pytest.mark.full
def test_profiled_steps_on_request_and_by_key(tmp_path: Path) -> None:
    job(tmp_path, 2, tp=2)
    check(tmp_path, 2)


@pytest.mark.full
def test_profiled_steps_of_four_skewed_ranks_agree(tmp_path: Path) -> None:
    job(tmp_path, 4, tp=2, pp=2)
    check(tmp_path, 4)


def test_profiled_steps_nsys_marks_ranges(tmp_path: Path) -> None:
    """Mark with a namespace that notes what torch.cuda would do."""
    import_engine()
    from mtrain.train.hooks.profile import _Making

    done: list[str] = []

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        done.append(name)
        yield
        done.append("end")

    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: done.append("start"), cudaProfilerStop=lambda: done.append("stop")
    )
    namespace = SimpleNamespace(nvtx=SimpleNamespace(range=marked), cudart=lambda: runtime)
    device = SimpleNamespace(namespace=namespace, dump_memory=None)
    world = SimpleNamespace(rank=0, store=dist.HashStore(), coords={"pp": 0}, device=device)
    context: Any = SimpleNamespace(world=world)
    making = _Making(tmp_path, Request("", 1, 1, (0,), ("nsys",)), context)
    with labelled("optimizer"):
        pass
    making.finish(1.0)
    with labelled("data"):
        pass
    assert done == ["start", "mtrain:optimizer", "end", "stop"]
    assert Labels.now is None
    assert not list(tmp_path.rglob("*.gz"))


def test_profiled_steps_snapshot_the_allocator(tmp_path: Path) -> None:
    """Write what a device of torch.cuda would dump; a CPU dumps nothing."""
    from mtrain.train.hooks.profile import _Making

    called: list[Any] = []
    memory = SimpleNamespace(_record_memory_history=lambda **keys: called.append(keys))
    devices = {
        "gpu": SimpleNamespace(
            namespace=SimpleNamespace(memory=memory), dump_memory=lambda to: Path(to).touch()
        ),
        "cpu": SimpleNamespace(namespace=SimpleNamespace(), dump_memory=None),
    }
    for name, device in devices.items():
        world = SimpleNamespace(rank=0, store=dist.HashStore(), coords={"pp": 0}, device=device)
        context: Any = SimpleNamespace(world=world)
        making = _Making(tmp_path / name, Request("", 1, 1, (0,), ("memory",)), context)
        making.finish(1.0)
    assert [file.parts[-4] for file in tmp_path.rglob("memory_rank0.pickle")] == ["gpu"]
    assert [keys.get("enabled", "on") for keys in called] == ["on", None]
