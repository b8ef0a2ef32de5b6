"""A trace of sharded, offloaded and dynamic runs has what a real step has at its peak."""

from __future__ import annotations

import pytest

from tests.distributed.test_plan_kept import SHORT, planned
from tests.distributed.test_plan_trace import traced
from tests.support.alive import alive
from tests.support.covering import some
from tests.support.forked import run_ranks

FSDP2 = "parallel.fsdp=fsdp2"
MEGATRON = "parallel.fsdp=megatron"
WIDE = {
    "fsdp2": f"parallel=dp2 {FSDP2} {SHORT}",
    "fsdp2 bf16": f"parallel=dp2 {FSDP2} {SHORT} precision=bf16",
    "fsdp2 replicas": f"parallel=dp4 {FSDP2} {SHORT} parallel.hsdp_replicas=2",
    "fsdp2 recomputation": f"parallel=dp2 {FSDP2} {SHORT} parallel.recompute.granularity=full",
    "fsdp2 experts": f"model=mixtral_tiny parallel=ep2dp2 {FSDP2} {SHORT}",
    "megatron experts": f"model=mixtral_tiny parallel=ep2dp2 {MEGATRON} {SHORT}",
    "megatron": f"parallel=dp2 {MEGATRON} {SHORT}",
    "megatron gradients": f"parallel=dp2 {MEGATRON} {SHORT} parallel.fsdp_sharding=optim_grads",
    "megatron optimizer": f"parallel=dp2 {MEGATRON} {SHORT} parallel.fsdp_sharding=optim",
    "megatron bf16": f"parallel=dp2 {MEGATRON} {SHORT} precision=bf16",
    "offload": f"parallel=dp2 optim.cpu_offload=1.0 {SHORT} precision=bf16",
    "offload half": f"parallel=dp2 optim.cpu_offload=0.5 {SHORT} precision=bf16",
    "dynamic context": (
        f"parallel=dp4 parallel.hybrid_context_parallel=true data.packed=true {SHORT}"
    ),
}


@pytest.mark.parametrize("case", some(WIDE, ["fsdp2 bf16"]))
def test_plan_trace_sharded_peak_equals_real_step(case: str) -> None:
    run = planned(WIDE[case])
    found = traced(run, 0)
    most = run_ranks(run.parallel.ranks or 1, alive, run)[0]
    assert found["peak"]["bytes"] + found["host"] == pytest.approx(most, rel=0.01)
