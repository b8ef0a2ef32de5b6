"""Triton's kernels that `auto` takes: those that a committed result admits on a generation, and no
others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mtrain_kernels import admitted
from mtrain_kernels.registry import ops

from mtrain.config.compose.composer import compose
from mtrain.config.engine import kernels
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.run import RunConfig
from mtrain.plan.report import notes

RESULTS = Path(__file__).parents[2] / "benchmarks/results/gpu"
GPU = Machine(cpu_cores=8, memory_bytes=1 << 40, gpus=1, triton=True)
WITH_TE = Machine(cpu_cores=8, memory_bytes=1 << 40, gpus=1, triton=True, transformer_engine=True)


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """Admit all ops on sm_90, and only norms on sm_80."""
    known: dict[int, dict[str, Any]] = {90: {op: {} for op in ops()}, 80: {"norm": {}}}
    monkeypatch.setattr(admitted, "admitted", lambda: known)
    return known


def _run(words: str, machine: Machine = GPU) -> RunConfig:
    command = (
        "model=mixtral_8x7b parallel=single cluster.devices_per_node=1 data=mock parallel.ranks=1"
    )
    return resolve(compose(f"{command} {words}".split()).run, machine)


def _words(run: RunConfig) -> dict[str, str]:
    return {op.name: getattr(run.kernels, op.name) for op in kernels.OPERATIONS}


def test_admitted_kernels_are_those_that_ran() -> None:
    words = _words(_run("cluster=h100"))
    assert {op for op, word in words.items() if word == "triton"} >= {
        "norm",
        "rope",
        "moe_router",
        "loss",
        "optimizer",
    }
    assert words["attention"] == "torch"


def test_admitted_kernels_untested_generation_runs_others() -> None:
    run = _run("cluster=b200")
    assert "triton" not in _words(run).values()
    assert (run.kernels.norm, run.kernels.attention, run.kernels.optimizer) == (
        "reference",
        "torch",
        "torch",
    )
    why = kernels.reasons(run, GPU)
    assert (
        "no triton: Triton's kernels of norm have not run on sm_100 yet; kernels.norm=triton takes"
        " them anyway" in why["norm"]
    )
    assert "cross_entropy and linear_cross_entropy have not run" in why["loss"]
    assert _run("cluster=b200", WITH_TE).kernels.norm == "te"


def test_admitted_kernels_are_listed_by_op() -> None:
    words = _words(_run("cluster=a100"))
    assert [op for op, word in words.items() if word == "triton"] == ["norm"]


def test_admitted_kernels_unknown_gpu_has_none() -> None:
    run = _run("cluster=h100 cluster.sm=null")
    assert "triton" not in _words(run).values()
    assert "cluster.sm does not say which GPU this is" in kernels.reasons(run, GPU)["norm"]


def test_admitted_kernels_named_runs_anyway() -> None:
    assert _run("cluster=b200 kernels.rope=triton").kernels.rope == "triton"
    words = _words(_run("cluster=b200 kernels=triton"))
    assert (words["norm"], words["loss"]) == ("triton", "triton")


@pytest.mark.parametrize(
    ("words", "needs"), [("", ("grouped_gemm",)), ("precision=fp8_blockwise", ("fp8_grouped",))]
)
def test_admitted_kernels_operation_needs_each_kernel(
    words: str, needs: tuple[str, ...], record: dict[int, dict[str, Any]]
) -> None:
    run = f"cluster=h100 {words} kernels.linear=triton" if words else "cluster=h100"
    assert _run(run).kernels.experts == "triton"
    for op in needs:
        record[90].pop(op)
    assert _run(run).kernels.experts != "triton"


def _results(**more: Any) -> dict[str, Any]:
    made = {
        "date": "2027-01-02",
        "commit": "abc",
        "device": {"name": "a card", "sm": 100},
        "parity": {},
    }
    return made | more


def test_admitted_kernels_op_needs_passed_results() -> None:
    parity = {
        "norm": {"passed": 3, "failed": 0, "failures": []},
        "rope": {"passed": 3, "failed": 1, "failures": [{"unit": "rope tiny", "why": "far off"}]},
        "edges": {
            "passed": 0,
            "failed": 1,
            "failures": [{"unit": "edges of operands", "why": "a byte"}],
        },
        "quantize": {"passed": 3, "failed": 0, "failures": []},
        "nobody's": {"passed": 3, "failed": 0, "failures": []},
    }
    found = admitted.gathered([_results(parity=parity)], ["norm", "rope", "softmax", "quantize"])
    assert found == {"100": {"norm": {"commit": "abc", "date": "2027-01-02", "device": "a card"}}}


def test_admitted_kernels_later_results_count_and_are_recorded() -> None:
    failed = {
        "norm": {
            "passed": 0,
            "failed": 1,
            "failures": [{"unit": "rms_norm_residual_fp8 llama3_8b", "why": ""}],
        }
    }
    first = _results(
        date="2026-11-26", commit="84aa4de2", parity=failed | {"rope": {"passed": 1, "failed": 0}}
    )
    found = admitted.gathered([first], ["norm", "rope"])["100"]
    assert list(found) == ["norm", "rope"]
    assert list(found["norm"]["decided"]) == ["rms_norm_residual_fp8 llama3_8b"]
    later = _results(parity=failed)
    assert list(admitted.gathered([later, first], ["norm", "rope"])["100"]) == ["rope"]


def test_admitted_kernels_cpu_results_admit_nothing() -> None:
    for made in (_results(dry=True), _results(device={"name": "cpu", "sm": None})):
        with pytest.raises(ValueError, match="admits nothing"):
            admitted.gathered([made], ["norm"])


def test_admitted_kernels_record_equals_committed_results() -> None:
    """Compare with the output of `python -m mtrain_kernels.admitted
    benchmarks/results/gpu/*/summary.json`.
    """
    files = sorted(RESULTS.glob("*/summary.json"))
    assert files, f"{RESULTS} has no results"
    made = admitted.gathered((json.loads(path.read_text()) for path in files), ops())
    assert admitted.RECORD.read_text() == admitted.text_of(made)


def test_admitted_kernels_plan_elsewhere_names_unadmitted() -> None:
    laptop = Machine(cpu_cores=2, memory_bytes=1 << 34)
    assert _words(_run("cluster=b200", laptop)) == dict.fromkeys(
        _words(_run("cluster=h100", laptop))
    )
    assert not any("committed results" in note for note in notes(_run("cluster=h100", laptop)))
    (said,) = (note for note in notes(_run("cluster=b200", laptop)) if "committed results" in note)
    assert (
        "on sm_100 others do rope, moe_router, moe_permute, loss, optimizer, unless"
        " kernels.rope=triton" in said
    )
    named = notes(_run("cluster=b200 kernels=triton", laptop))
    assert not any("committed results" in note for note in named)
