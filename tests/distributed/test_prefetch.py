"""Samples on their way to the step: what stages need of them, and that reading ahead changes no
bit.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtrain.config.schema.run import RunConfig
from mtrain.data.batch import GlobalBatches
from mtrain.data.samples.mock import MockSamples
from mtrain.errors import CorruptData
from tests.support.commands import SMALL, metrics, wait_for
from tests.support.forked import run_ranks
from tests.support.launched import Launched
from tests.support.patience import patient
from tests.support.runs import tiny_run, train_steps


def of(run: RunConfig, **data: Any) -> RunConfig:
    return run.model_copy(update={"data": run.data.model_copy(update=data)})


def read_by_ranks(run: RunConfig, steps: int) -> tuple[list[tuple[float, float]], int, str]:
    """Return losses and norms, the samples that this rank read, and the needs of its stages; a job
    for a rank.
    """
    from mtrain.data.samples.mock import MockSamples
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    read = []
    real = MockSamples.batch

    def counted(self: MockSamples, numbers: Any) -> Any:
        read.append(len(numbers))
        return real(self, numbers)

    MockSamples.batch = counted  # type: ignore[method-assign]
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        results = [train_step(parts, stop_requested=False) for _ in range(steps)]
        parts.close()
        assert all(0 <= r.data_wait_share <= 1 for r in results)
        assert parts.state.consumed_samples == steps * run.trainer.batch
        return [(r.loss, r.grad_norm) for r in results], sum(read), parts.needs(parts.train_data)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("packed", [False, True])
def test_prefetch_middle_stages_read_only_boundaries(packed: bool) -> None:
    run = of(
        tiny_run(ranks=4, pp=4, trainer={"train_iters": 2}, optim={"warmup_iters": 1}),
        packed=packed,
    )
    alone = run_ranks(
        1,
        train_steps,
        of(tiny_run(ranks=1, trainer={"train_iters": 2}, optim={"warmup_iters": 1}), packed=packed),
        2,
    )[0]
    found = run_ranks(4, read_by_ranks, run, 2)
    middle = frozenset({"cu_seqlens", "documents"} if packed else ())
    assert [needs for _, _, needs in found] == [None, middle, middle, None]
    assert [read for _, read, _ in found] == [16, 16 if packed else 0, 16 if packed else 0, 16]
    for (loss, norm), (expected, expected_norm) in zip(found[0][0], alone, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_prefetch_changes_no_bit_and_rereads_nothing() -> None:
    run = tiny_run(ranks=2, tp=2, trainer={"train_iters": 4}, optim={"warmup_iters": 1})
    ahead, at_once = (run_ranks(2, read_by_ranks, of(run, prefetch=n), 4) for n in (3, 0))
    assert ahead == at_once
    assert ahead[0][1] == 4 * 8


RUN = (
    *SMALL,
    "cluster=cpu",
    "parallel=tp2",
    "trainer.train_iters=100000",
    "log.name=run",
)


@pytest.fixture
def started() -> Iterator[list[Launched]]:
    """Provide a list for processes, which do not outlive the test."""
    launched: list[Launched] = []
    yield launched
    for one in launched:
        one.kill()


def reading(fault: Callable[[], object], rank: int = 1, sample: int = 40) -> Callable[[], None]:
    """Return a patch that calls `fault` when `rank` reads a sample."""

    def patch() -> None:
        from mtrain.data.batch import GlobalBatches

        real = GlobalBatches.microbatches

        def faulty(self: GlobalBatches, consumed: int, size: int | None = None) -> Any:
            if os.environ.get("RANK") == str(rank) and consumed >= sample:
                fault()
            return real(self, consumed, size)

        GlobalBatches.microbatches = faulty  # type: ignore[method-assign]

    return patch


def corrupt() -> None:
    raise CorruptData(
        "corpus.bin: offset 7: token id -1 in document 3; the vocabulary has ids 0 to 299"
    )


def hang() -> None:
    time.sleep(10_000)  # the disk that does not answer


def test_prefetch_read_error_ends_run_as_in_step(tmp_path: Path, started: list[Launched]) -> None:
    started.append(run := Launched(*RUN, cwd=tmp_path, patch=reading(corrupt)))
    assert run.wait() == 4, run.said
    assert "rank 1: corpus.bin: offset 7" in run.said
    assert "Traceback" not in run.said
    assert metrics(tmp_path / "runs/run")[-1]["samples"] == 40, (
        "what was read before it is trained on"
    )


@pytest.mark.full
def test_prefetch_hanging_read_is_named_with_stack(tmp_path: Path, started: list[Launched]) -> None:
    words = (f"trainer.soft_timeout_s={patient(2)}", f"trainer.timeout_s={patient(4)}")
    started.append(run := Launched(*RUN, *words, cwd=tmp_path, patch=reading(hang)))
    assert run.wait() == 5, run.said
    assert re.search(
        r"rank 1 .* is behind, in step 6, data, at prefetch.py:\d+ in take", run.said
    ), run.said
    stacks = (tmp_path / "runs/run/errors/stacks_rank_00001.txt").read_text()
    assert "data ahead, most recent call last" in stacks
    assert "# the disk that does not answer" in stacks


@pytest.mark.full
def test_prefetch_stop_during_read_ends_at_once(tmp_path: Path, started: list[Launched]) -> None:
    slow = reading(lambda: time.sleep(0.3), rank=0, sample=0)
    started.append(run := Launched(*RUN, "data.prefetch=8", cwd=tmp_path, patch=slow))
    wait_for(lambda: len(metrics(tmp_path / "runs/run")) > 3)
    ranks = run.ranks()
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.said
    assert not any(rank.is_running() and rank.status() != "zombie" for rank in ranks)
    shares = [line["data_wait_share"] for line in metrics(tmp_path / "runs/run")]
    assert max(shares[1:]) > 0.2, "a slow disk shows in the log"


def test_prefetch_pins_memory_once_on_its_device() -> None:
    """Reuse a slot only after the device has read it."""
    from mtrain.train.loop.prefetch import BatchPrefetcher, Ring

    done: list[tuple[str, str]] = []
    copied: list[int] = []

    def note(what: str) -> None:
        done.append((what, threading.current_thread().name))

    def pinned(size: int) -> torch.Tensor:
        note("pinned")
        return torch.full((size,), 255, dtype=torch.uint8)

    def event() -> Any:
        copied.append(number := len(copied))
        return SimpleNamespace(synchronize=lambda: note(f"step {number} is read"))

    facts = {
        "pin_memory": True,
        "set_index": lambda rank: note(f"device {rank}"),
        "pinned": pinned,
        "event": event,
    }
    device: Any = SimpleNamespace(**facts)
    grid = SimpleNamespace(cp=1)
    world: Any = SimpleNamespace(
        device=device, local_rank=3, grid=grid, torch_device=torch.device("cpu")
    )
    data = GlobalBatches(MockSamples(8, 1, 50), 4, 2, 0, 1)
    ring = Ring.of(device, 1)
    feed = BatchPrefetcher(data, world, None, lambda place: (sum(place), 4), 1, ring)
    for step in range(7):
        batches = feed.take(4 * step, 4)
        for batch, expected in zip(batches, data.microbatches(4 * step), strict=True):
            assert all(torch.equal(batch[key], expected[key]) for key in expected)  # type: ignore[literal-required]
    feed.close()
    assert {thread for _, thread in done} == {"data ahead"}
    words = [word for word, _ in done]
    assert words[0] == "device 3"
    assert words.count("pinned") == 3, (
        "the step that is taken, the next, and one whose copy is under way"
    )
    waits = [word for word in words if word.endswith("is read")]
    assert waits[:4] == [f"step {n} is read" for n in range(4)]
    assert len(copied) == 7


def test_prefetch_ring_grows_and_keeps_non_tensors() -> None:
    from mtrain.train.loop.prefetch import Ring

    sizes: list[int] = []

    def pinned(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    ring = Ring.of(SimpleNamespace(pin_memory=True, pinned=pinned), 0)  # type: ignore[arg-type]
    assert ring is not None
    small = {
        "a": torch.arange(5),
        "b": torch.ones(3, 2).bfloat16().t(),
        "c": torch.zeros(0),
        "documents": (1, 2),
    }
    large = {"a": torch.arange(3000)}
    for batch in (small, small, large, small, large):
        (placed,), _ = ring.put([batch])
        assert placed["documents"] == (1, 2) if "documents" in batch else len(placed) == 1
        assert all(
            torch.equal(placed[key], value)
            for key, value in batch.items()
            if isinstance(value, torch.Tensor)
        )
    assert sizes == [4096, 4096, 32768]
    assert Ring.of(SimpleNamespace(pin_memory=False), 1) is None  # type: ignore[arg-type]
