"""Repeated application of the first fix: it makes any configuration valid, and never worse."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from mtrain.config.resolve.resolution import Machine
from mtrain.config.rules import apply
from tests.support.configs import LAPTOP, MOE, errors, first_fix, tiny

MACHINES = (LAPTOP, Machine(cpu_cores=8, memory_bytes=1 << 40, gpus=4))
SMALL = st.integers(1, 6)
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "parallel.tp": SMALL,
        "parallel.pp": SMALL,
        "parallel.vpp": st.integers(1, 3),
        "parallel.cp": st.integers(1, 3),
        "parallel.ep": SMALL,
        "parallel.etp": st.sampled_from([None, 1, 2, 3]),
        "parallel.ranks": st.sampled_from([None, 1, 2, 3, 4, 6, 8, 12, 16, 48]),
        "parallel.sequence_parallel": st.booleans(),
        "parallel.distributed_optimizer": st.booleans(),
        "parallel.overlap_param_gather": st.booleans(),
        "parallel.fsdp": st.sampled_from(["none", "fsdp2", "megatron"]),
        "parallel.fsdp_sharding": st.sampled_from([None, "optim"]),
        "parallel.hsdp_replicas": st.integers(1, 4),
        "optim.cpu_offload": st.sampled_from([0.0, 0.5]),
        "optim.exp_avg_dtype": st.sampled_from(["fp32", "bf16", "fp8"]),
        "optim.main_params_dtype": st.sampled_from(["fp32", "bf16"]),
        "optim.store_param_remainders": st.booleans(),
        "kernels.optimizer": st.sampled_from(["auto", "torch", "reference", "triton", "te"]),
        "model.num_layers": st.integers(1, 13),
        "model.num_attention_heads": st.integers(1, 12),
        "model.num_query_groups": st.sampled_from([None, 1, 2, 3, 4]),
        "model.hidden_size": st.sampled_from([64, 96, 250, 256]),
        "model.ffn_hidden_size": st.sampled_from([100, 255, 704]),
        "model.moe": st.sampled_from(
            [
                None,
                MOE,
                {**MOE, "num_experts": 6, "router_topk": 1},
                {**MOE, "shared_expert_intermediate_size": 99, "first_dense_layers": 3},
                {**MOE, "num_experts": 3, "ffn_hidden_size": 35, "router_topk": 4},
                {**MOE, "num_experts": 8, "router_num_groups": 3, "router_group_topk": 4},
            ]
        ),
        "data.seq_length": st.sampled_from([15, 64, 250, 256, 2048]),
        "trainer.global_batch_size": st.integers(1, 40),
        "trainer.micro_batch_size": st.integers(1, 5),
        "trainer.rampup_batch_size": st.none()
        | st.tuples(st.integers(1, 20), st.integers(1, 8), st.just(50)).map(list),
        "trainer.batch_size_schedule": st.sampled_from(
            [None, None, [[3, 500]], [[8, 900], [5, 700]]]
        ),
        "trainer.sample_tokens": st.sampled_from([0, 8]),
        "precision.dtype": st.sampled_from(["fp32", "bf16", "fp16"]),
        "optim.name": st.sampled_from(["adamw", "sgd", "muon"]),
        "optim.muon.momentum": st.sampled_from([None, 0.9]),
        "optim.warmup_iters": st.sampled_from([0, 100]),
        "cluster.device": st.sampled_from(["auto", "cpu", "cuda"]),
        "cluster.nodes": st.sampled_from([1, 2]),
        "cluster.devices_per_node": st.sampled_from([None, 2, 8]),
    },
)


FIXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def _fix_all(change: dict[str, Any], machine: Machine) -> None:
    raw = apply(tiny(), change)
    found = errors(raw, machine)
    for _ in range(len(found)):
        if not found:
            break
        fixable = [p for p in found if p.fix]
        assert fixable, found
        raw = apply(raw, first_fix(fixable[0]))
        after = errors(raw, machine)
        keys = {(p.code, p.path) for p in found}
        assert {(p.code, p.path) for p in after} < keys, (fixable[0], after)
        found = after
    assert found == []


@pytest.mark.full
@given(change=CHANGES, machine=st.sampled_from(MACHINES))
@settings(FIXED, max_examples=40)
def test_rules_first_fix_is_valid(change: dict[str, Any], machine: Machine) -> None:
    _fix_all(change, machine)


@pytest.mark.full
@given(change=CHANGES, machine=st.sampled_from(MACHINES))
@settings(FIXED, max_examples=100)
def test_rules_first_fix_is_often_valid(change: dict[str, Any], machine: Machine) -> None:
    _fix_all(change, machine)
