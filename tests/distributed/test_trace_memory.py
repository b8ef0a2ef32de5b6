"""Freed memory in a trace: no storage outlives its use in a step."""

from __future__ import annotations

import pytest

from mtrain.plan.rank import stage_memories
from tests.distributed.test_plan_kept import planned
from tests.distributed.test_plan_trace import traced
from tests.support.forked import run_alone

AGAIN = "parallel=tp2sp model.num_layers=2 precision=bf16 parallel.recompute.granularity=selective "


def test_trace_memory_recomputed_tensors_are_freed() -> None:
    """Expect as much memory after each micro-batch as after the one before it: no storage stays."""
    run = planned(f"{AGAIN} parallel.recompute.modules=[layernorm]")
    run = run.model_copy(
        update={"trainer": run.trainer.model_copy(update={"global_batch_size": 8})}
    )

    def job() -> list[int]:
        from mtrain.train.trace import trace

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "microbatches", lambda *_: 4)
            segments = trace.trace(run, 0).recorder.segments
        return [one.before for one in segments if one.place.phase == "forward"]

    before = run_alone(job)
    stream = 2 * 64 // 2 * 256 * 2  # bytes of what a norm gives on a rank
    assert len(before) == 4
    assert before[3] - before[2] < stream


@pytest.mark.full
def test_trace_memory_two_traces_are_equal() -> None:
    """Trace runs with experts and different numbers of layers: the second trace has no losses of
    the first.
    """
    run = planned("model=mixtral_tiny parallel=ep2 model.num_layers=2 precision=bf16")
    other = planned("model=mixtral_tiny parallel=single model.num_layers=3")

    def job() -> list[int]:
        from mtrain.train.trace.trace import trace

        return [trace(one, 0).recorder.peak.bytes for one in (run, other, run)]

    first, _, again = run_alone(job)
    assert first == again


def test_trace_memory_overlapped_sends_are_kept() -> None:
    """Keep memory that a send may still read, with virtual stages; the plan counts it and the trace
    finds it.
    """
    run = planned("parallel=pp2vpp2 model.num_layers=8")
    stage = stage_memories(run)[0]
    sent = stage.parts["communication"]
    one = run.trainer.micro * run.data.length * run.model.hidden_size * 4
    assert sent == one * sum(stage.in_flight[1])
    assert abs(traced(run, 0)["difference_percent"]["peak"]) < 3


def test_trace_memory_product_and_view_share_storage() -> None:
    """Record `_unsafe_view`, an alias although its schema declares none; a repeated call gives the
    same result as the first.
    """
    import torch

    from mtrain.train.trace.recorder import Recorder

    recorder = Recorder()
    with recorder.recording():
        for _ in range(3):
            x = torch.empty(4, 8)
            y = torch.ops.aten._unsafe_view(x, [2, 16])
            assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
            z = torch.nn.functional.pad(y, (0, 1)) + 1
            assert z.shape == (2, 17)
            assert (z.to(torch.int32) * 1.5).dtype is torch.float32
            assert (z.to(torch.int32) * 2).dtype is torch.int32
            assert torch.mm(y, y.T, out=torch.empty(2, 2)).shape == (2, 2)
        assert recorder.peak.bytes < 3 * 3 * 4 * 34
