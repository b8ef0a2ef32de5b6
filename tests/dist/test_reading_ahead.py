"""Samples on their way to the step: what stages need of them, and that reading ahead changes no bit."""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.run import RunConfig
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps


def of(run: RunConfig, **data: Any) -> RunConfig:
    return run.model_copy(update={"data": run.data.model_copy(update=data)})


def read_by_ranks(run: RunConfig, steps: int) -> tuple[list[tuple[float, float]], int, str]:
    """A job: losses and norms, the samples that this rank read, and what its stages need."""
    from mtrain.data.mock import MockSamples
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.step import train_step
    from mtrain.world.init import joined

    read, real = [], MockSamples.batch

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
        return [(r.loss, r.grad_norm) for r in results], sum(read), parts.needs.value


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_stages_in_between_read_no_tokens_and_learn_where_documents_begin(packed: bool) -> None:
    run = of(tiny_run(ranks=4, pp=4, trainer={"train_iters": 2}, optim={"warmup_iters": 1}), packed=packed)
    alone = run_ranks(1, train_steps, of(tiny_run(ranks=1, trainer={"train_iters": 2}, optim={"warmup_iters": 1}), packed=packed), 2)[0]
    found = run_ranks(4, read_by_ranks, run, 2)
    middle = "bounds" if packed else "nothing"
    assert [needs for _, _, needs in found] == ["all", middle, middle, "all"]
    assert [read for _, read, _ in found] == [16, 16 if packed else 0, 16 if packed else 0, 16]
    for (loss, norm), (expected, expected_norm) in zip(found[0][0], alone, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_reading_ahead_changes_no_bit_and_reads_nothing_twice() -> None:
    run = tiny_run(ranks=2, tp=2, trainer={"train_iters": 4}, optim={"warmup_iters": 1})
    ahead, at_once = (run_ranks(2, read_by_ranks, of(run, prefetch=n), 4) for n in (3, 0))
    assert ahead == at_once
    assert ahead[0][1] == 4 * 8
