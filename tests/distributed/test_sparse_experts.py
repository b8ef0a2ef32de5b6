"""Experts that are routed to by lists compute what megatron-core computes by maps, wherever tokens
go.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.config.engine import release
from mtrain.config.schema.moe import MoEConfig
from mtrain.config.schema.run import RunConfig
from tests.support import interpreted, synchronised, tiny
from tests.support.commands import STEPS_ONLY
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps

TP2 = {"ranks": 2, "tp": 2, "sequence_parallel": True}
EP2 = {"ranks": 2, "ep": 2}
BOTH = {"ranks": 4, "tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}
GROUPS = {
    "num_experts": 8,
    "router_num_groups": 4,
    "router_group_topk": 2,
    "router_score_function": "sigmoid",
}
BIAS = {
    "router_enable_expert_bias": True,
    "router_topk_scaling_factor": 2.5,
    "router_load_balancing_type": "none",
}
SHARED = {"shared_expert_intermediate_size": 32, "shared_expert_overlap": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({"z_loss_coeff": 0.01}, {}),
    "one rank, sequences balanced": ({"router_load_balancing_type": "seq_aux_loss"}, {}),
    "tp2": ({}, TP2),
    "groups and bias, ep2": ({**GROUPS, **BIAS}, EP2),
    "groups, balanced, ep2": ({**GROUPS, "router_pre_softmax": False}, EP2),
    "shared experts meanwhile, ep2": (SHARED, EP2),
    "gathered, ep2": ({"token_dispatcher_type": "allgather"}, EP2),
    "tp2 ep2 etp1": ({}, {"ranks": 2, "tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
    "one expert a rank": ({"num_experts": 2}, EP2),
    "tp2 ep2 etp2": ({}, BOTH),
    "gathered, tp2 ep2 etp2": ({"token_dispatcher_type": "allgather"}, BOTH),
    "weighed inputs": (
        {"router_topk": 1, "apply_probs_on_input": True, "router_pre_softmax": True},
        {},
    ),
}
ALWAYS = ["one rank, sequences balanced", "groups and bias, ep2", "tp2 ep2 etp2", "gathered, ep2"]


def run_of(name: str) -> RunConfig:
    moe, parallel = CASES[name]
    more = MoEConfig(**({"num_experts": 4, "ffn_hidden_size": 32} | moe))
    return tiny_run(model={"num_layers": 1, "moe": more}, **parallel)


def steps(run: RunConfig, lists: bool) -> list[tuple[float, float]]:
    def job() -> Any:
        from mtrain.assembly import model

        model.routes_by_lists = lambda _: lists
        return train_steps(run, 2)

    return run_ranks(run.parallel.ranks, job)[0]  # type: ignore[no-any-return]


def test_sparse_experts_kernels_follow_maps_as_megatron() -> None:
    """Compare with dropped tokens: our overrides give the results of megatron-core's own
    operations.
    """
    run = run_of("one rank")
    moe = {"moe": run.model.moe.model_copy(update={"expert_capacity_factor": 1.0})}  # type: ignore[union-attr]
    run = run.model_copy(update={"model": run.model.model_copy(update=moe)})

    def job(ours: bool) -> Any:
        from mtrain.mcore.adapter import op_overrides

        if ours:
            for each in op_overrides.OVERRIDES["moe_permute"]:
                setattr(each.module, each.name, partial(each.ours, impl="reference"))
            op_overrides.override_operations = lambda *_: None
        return [number for step in train_steps(run, 2) for number in step]

    assert run_ranks(1, job, True)[0] == pytest.approx(run_ranks(1, job, False)[0], rel=1e-6)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", some(CASES, ALWAYS))
def test_sparse_experts_lists_equal_maps(name: str) -> None:
    run = run_of(name)
    for (loss, norm), (right, right_norm) in zip(steps(run, True), steps(run, False), strict=True):
        assert loss == pytest.approx(right, rel=1e-6)
        assert norm == pytest.approx(right_norm, rel=1e-5)


def _gradients(ep: int, kind: str, lists: bool, fault: str) -> dict[str, Tensor]:
    from mtrain.mcore import api
    from mtrain.mcore.layers import dispatch

    tiny.start_world(ep=ep)
    type_ = "allgather" if kind == "allgather" else "alltoall"
    cfg = tiny.config(**(tiny.MOE | {"moe_token_dispatcher_type": type_}), moe_grouped_gemm=True)
    cfg.expert_model_parallel_size = ep
    cfg.sparse_experts = (
        api.Sparse("reference", "reference", padded=kind == "padded") if lists else None
    )
    if fault:
        right = dispatch.row_weights
        dispatch.row_weights = lambda weights, plan: right(weights.flip(0), plan)
    model = tiny.model(cfg)
    tiny.redraw_matrices(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.weight"):
                parameter[:] = 0.0  # equal scores: all tokens go to the first two of four experts
                parameter[2:] = -10.0 * torch.sign(parameter[2:] + 1)
    tiny.accumulate_gradients(model, cfg)
    return tiny.gradients(model)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", ["alltoall", "allgather", "padded"])
def test_sparse_experts_empty_rank_takes_part(kind: str) -> None:
    (expected,) = run_ranks(1, _gradients, 1, "alltoall", False, "")
    for found in run_ranks(2, _gradients, 2, kind, True, ""):
        for name, gradient in found.items():
            error = (gradient - expected[name]).norm() / expected[name].norm().clamp_min(1e-9)
            assert error < 1e-5, (name, error)
    if kind == "alltoall":
        wrong = run_ranks(2, _gradients, 2, kind, True, "weights of other rows")[0]
        assert any(not torch.allclose(wrong[n], expected[n], rtol=1e-3, atol=1e-6) for n in wrong)


def test_sparse_experts_weights_equal_those_without_kernels() -> None:
    run = tiny_run(
        model={"num_layers": 1, "moe": MoEConfig(num_experts=4, ffn_hidden_size=32)}, **EP2
    )

    def shards(word: str) -> dict[str, Any]:
        from mtrain.assembly.model import build_model
        from mtrain.mcore.state.sharding import model_shards
        from mtrain.world.init import joined

        words = {"experts": word, "moe_router": word, "moe_permute": word}
        other = run.model_copy(update={"kernels": run.kernels.model_copy(update=words)})
        with joined(other) as world:
            chunks = build_model(other, world)
            (kind,) = {
                type(m).__name__
                for m in chunks[0].modules()
                if type(m).__name__.endswith("Experts")
            } or {""}
            held = {
                (s.key, s.offset): (s.global_shape, s.tensor.clone()) for s in model_shards(chunks)
            }
        return {"kind": kind, "held": held}

    for ours, plain in zip(
        run_ranks(2, shards, "triton"), run_ranks(2, shards, "reference"), strict=True
    ):
        assert (ours["kind"], plain["kind"]) == ("GroupedExperts", "")
        assert ours["held"].keys() == plain["held"].keys()
        for key, (shape, tensor) in ours["held"].items():
            assert shape == plain["held"][key][0]
            assert torch.equal(tensor, plain["held"][key][1])


SMALL = (
    "data=mock",
    "data.seq_length=32",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=2",
    "model.num_layers=2",
    "model.vocab_size=128",
)
MIXTRAL = ("model=mixtral_tiny", *SMALL)
PADDED = "model.moe.pad_alltoall=true"
FACTOR = "model.moe.alltoall_capacity_factor=1.5"
MORE = ("model.moe.shared_expert_intermediate_size=64", "model.moe.shared_expert_overlap=true")
FULL = "parallel.recompute.granularity=full"
HYBRID = ("model.hybrid.pattern=*E", "+model.moe={num_experts: 4, ffn_hidden_size: 32}")
STEPS = {
    "dense": ["kernels=triton", "parallel=tp2sp", *SMALL],
    "dense in 8 bits": ["kernels=triton", "parallel=tp2sp", "precision=fp8_blockwise", *SMALL],
    "experts": ["kernels=triton", "parallel=single", *MIXTRAL],
    "groups": ["kernels=triton", "parallel=single", "model=deepseek_tiny", *SMALL],
    "experts, tp2": ["kernels=triton", "parallel=tp2sp", *MIXTRAL],
    "experts, gathered": [
        "kernels=triton",
        "parallel=ep2",
        "model.moe.token_dispatcher_type=allgather",
        *MIXTRAL,
    ],
    "experts, exchanged": ["kernels=triton", "parallel=tp2ep2sp", *MIXTRAL],
    "experts, padded": ["kernels=triton", "parallel=tp2ep2sp", *MIXTRAL, PADDED, *MORE],
    "padded by a factor, again": ["kernels=triton", "parallel=ep2", *MIXTRAL, PADDED, FACTOR, FULL],
    "muon": ["kernels=triton", "parallel=single", "optim=muon", *SMALL],
    "a hybrid": ["kernels=triton", "parallel=single", "model=nemotron_h_tiny", *SMALL, *HYBRID],
    "documents, a part of each": ["kernels=triton", "parallel=cp2", "data.packed=true", *SMALL],
    "maps": ["kernels=reference", "parallel=single", *MIXTRAL],
}
WAITS = {"experts, exchanged": {"rows that are exchanged": 2}}
"""Number of waits for the device, and their reason: an exchange has to know the destinations of
rows, once in each of two layers.
"""


NORM = "aten._local_scalar_dense.default clip_grads.py get_grad_norm_fp32"
"""megatron-core brings the gradient's norm to the host, that of experts which other ranks hold one
by itself.
"""


@pytest.mark.full
def test_sparse_experts_step_waits_only_where_documented() -> None:
    found = synchronised.waits(STEPS)
    norms = {name: waits.pop(NORM, 0) for name, waits in found.items()}
    assert norms == {
        name: 2 if any("ep2" in word for word in words) else 1 for name, words in STEPS.items()
    }
    waiting = sum(found.pop("maps").values())
    assert (waiting >= 4) != release.at_least(0, 19), (
        "megatron-core's maps wait until 0.19, and this test sees it"
    )
    assert found == {name: WAITS.get(name, {}) for name in found}


TRAINED = (
    "data=mock",
    "data.seq_length=16",
    "trainer.train_iters=10",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=2",
    *STEPS_ONLY,
    "model=mixtral_tiny",
    "model.num_layers=1",
    "model.hidden_size=64",
    "model.moe.ffn_hidden_size=32",
    "model.vocab_size=128",
    "model.moe.num_experts=4",
    "parallel=tp2ep2sp",
)


@pytest.mark.full
def test_sparse_experts_triton_tp2_ep2_equals_reference() -> None:
    kinds = {k: [*TRAINED, f"kernels={k}"] for k in ("reference", "triton")}
    padded = {f"{k}, padded": [*words, PADDED] for k, words in kinds.items()}
    values = interpreted.trained(kinds | padded, timeout_s=500)
    ours = values["triton"]
    right = values["reference"]
    assert len(ours) == len(right) == 20
    assert ours == pytest.approx(right, rel=1e-4)
    assert ours != right, "not one bit differs, so Triton did nothing"
    assert values["triton, padded"] == ours, "the same rows in the same order"
    assert values["reference, padded"] == pytest.approx(right, rel=1e-6)
