"""The portable layers on two gloo ranks give what one rank gives."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mtrain.errors import BadEnvironment
from tests.support import tiny
from tests.support.forked import run_ranks

pytestmark = pytest.mark.dist


def _train(degrees: dict[str, int], over: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    tiny.start_world(**degrees)
    cfg = tiny.config(
        tensor_model_parallel_size=degrees.get("tp", 1),
        expert_model_parallel_size=degrees.get("ep", 1),
        **over,
    )
    model = tiny.model(cfg)
    loss = tiny.accumulate_gradients(model, cfg)
    return loss, tiny.gradients(model)


def _assert_equal(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((found - expected).norm() / expected.norm().clamp_min(1e-12)).item()
    assert error < 1e-5, f"{name}: relative error {error:.1e}"


@cache
def _alone(over: str) -> tuple[float, dict[str, torch.Tensor]]:
    (found,) = run_ranks(1, _train, {}, json.loads(over))
    return found


def _compare_whole_parameters(
    degrees: dict[str, int], over: dict[str, Any], many: dict[str, Any]
) -> set[str]:
    """Train on one rank and on two; compare losses and the gradients of parameters that are whole
    on every rank.
    """
    loss, expected = _alone(json.dumps(over))
    compared = set()
    for rank_loss, found in run_ranks(2, _train, degrees, over | many):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in found.items():
            if gradient.shape == expected[name].shape:
                _assert_equal(name, gradient, expected[name])
                compared.add(name)
    return compared


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_adapter_backend_sequence_parallel_norms_match_one_rank(
    kind: str,
) -> None:
    over = {"normalization": kind, "layernorm_zero_centered_gamma": True}
    compared = _compare_whole_parameters({"tp": 2}, over, {"sequence_parallel": True})
    assert {"decoder.final_layernorm.weight", "decoder.layers.0.input_layernorm.weight"} <= compared


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True])
def test_adapter_backend_mla_tp2_matches_one_rank(sequence_parallel: bool) -> None:
    compared = _compare_whole_parameters(
        {"tp": 2}, tiny.MLA, {"sequence_parallel": sequence_parallel}
    )
    assert "decoder.layers.0.self_attention.linear_kv_down_proj.weight" in compared
    assert "decoder.layers.0.self_attention.kv_layernorm.weight" in compared


def test_adapter_backend_unusable_named_kernel_states_reason() -> None:
    from mtrain.mcore.layers import backend

    choices = {**vars(tiny.REFERENCE), "attention": "te", "norm": "te"}
    with pytest.raises(
        BadEnvironment, match=r"kernels\.norm, kernels\.attention = te.*transformer_engine"
    ):
        backend.provider(SimpleNamespace(**choices))
    with pytest.raises(ValueError, match=r"kernels\.linear = 'auto'"):
        backend.provider(SimpleNamespace(**(vars(tiny.REFERENCE) | {"linear": "auto"})))


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True])
def test_adapter_backend_qk_norms_tp2_match_one_rank(
    sequence_parallel: bool,
) -> None:
    compared = _compare_whole_parameters(
        {"tp": 2}, {"qk_layernorm": True}, {"sequence_parallel": sequence_parallel}
    )
    assert "decoder.layers.0.self_attention.q_layernorm.weight" in compared


def test_adapter_backend_mtp_tp2_matches_one_rank() -> None:
    over = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
    compared = _compare_whole_parameters({"tp": 2}, over, {"sequence_parallel": True})
    assert "mtp.layers.0.enorm.weight" in compared


def _stock_mla() -> dict[str, torch.Tensor]:
    from mtrain.mcore import api
    from mtrain.mcore.layers import backend

    tiny.start_world(tp=2)
    cfg = tiny.config(tensor_model_parallel_size=2, **tiny.MLA)
    stock = backend.one_layer_spec(cfg, backend.provider(tiny.REFERENCE), moe=False)
    layers = stock.submodules.self_attention.submodules
    layers.linear_q_down_proj = layers.linear_kv_down_proj = api.ColumnParallelLinear
    model = tiny.model(cfg, stock)
    tiny.accumulate_gradients(model, cfg)
    return tiny.gradients(model)


def test_adapter_backend_stock_mla_projection_is_still_wrong() -> None:
    """Show why `DuplicatedLinear` exists; if this fails after an upgrade of megatron-core, it can
    go.
    """
    _, expected = _alone(json.dumps(tiny.MLA))
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    whole = torch.cat([gradients[name] for gradients in run_ranks(2, _stock_mla)])
    assert (whole - expected[name]).norm() / expected[name].norm() > 1e-4


def _train_experts(ep: int, grouped: bool) -> tuple[float, dict[str, torch.Tensor]]:
    tiny.start_world(ep=ep)
    cfg = tiny.config(**tiny.MOE, moe_grouped_gemm=grouped, expert_model_parallel_size=ep)
    model = tiny.model(cfg)
    tiny.redraw_matrices(model)
    loss = tiny.accumulate_gradients(model, cfg)
    return loss, tiny.gradients(model)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("grouped", [False, True])
def test_adapter_backend_experts_on_two_ranks_match_one_rank(grouped: bool) -> None:
    ((loss, expected),) = run_ranks(1, _train_experts, 1, False)
    compared = set()
    for rank_loss, found in run_ranks(2, _train_experts, 2, grouped):
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in found.items():
            _assert_equal(name, gradient, expected[name])
        compared |= found.keys()
    assert compared == expected.keys()


def test_adapter_backend_grouped_experts_equal_sequential() -> None:
    ((loss, expected),) = run_ranks(1, _train_experts, 1, False)
    ((grouped_loss, found),) = run_ranks(1, _train_experts, 1, True)
    assert grouped_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        _assert_equal(name, gradient, expected[name])


def _moe_steps(grouped: bool, dtype: torch.dtype) -> list[float]:
    from mtrain.mcore import api

    tiny.start_world(ep=2)
    cfg = tiny.config(
        **tiny.MOE,
        moe_grouped_gemm=grouped,
        expert_model_parallel_size=2,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    model = tiny.model(cfg, wrap=False)
    if cfg.bf16:
        model = api.Float16Module(cfg, model)
    ddp = api.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    model = api.DistributedDataParallel(cfg, ddp, model)
    optimizer = api.get_megatron_optimizer(
        api.OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            clip_grad=1.0,
            use_distributed_optimizer=True,
            bf16=cfg.bf16,
            params_dtype=dtype,
        ),
        [model],
    )
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(tiny.accumulate_gradients(model, cfg))
        optimizer.step()
    return losses


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_backend_experts_learn_with_sharded_optimizer(dtype: torch.dtype) -> None:
    for losses in run_ranks(2, _moe_steps, True, dtype):
        assert losses[-1] < losses[0] - 0.3, losses


HEADS = 4
GROUPS = 2
LENGTH = 32
ATTENTION_CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"mask": "no_mask"},
    "sliding window": {"window_size": (5, 0)},
    "narrow values": {"value_size": 4},
    "packed": {"cu_seqlens": [0, 8, 24, 32]},
    "packed, sliding window": {"cu_seqlens": [0, 8, 24, 32], "window_size": (3, 0)},
    "learnable sink": {"softmax_type": "learnable"},
}


CONTEXT_KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "all_gather": (2, {"cp_comm_type": "all_gather"}),
    "p2p": (2, {"cp_comm_type": "p2p"}),
    "a2a": (2, {"cp_comm_type": "a2a"}),
    "p2p on 4": (4, {"cp_comm_type": "p2p"}),
    "a2a+p2p on 4": (4, {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}),
}


def _attend(cp: int, case: dict[str, Any]) -> list[torch.Tensor]:
    """Return the output and gradients of q, k, v (and the sink), each at its place in the whole
    sequence, zero elsewhere.
    """
    from mtrain.mcore import api
    from mtrain.mcore.layers.attention import CoreAttention
    from mtrain.mcore.layers.context import context_positions

    tiny.start_world(cp=cp, cp_sizes=case.get("hierarchical_context_parallel_sizes"))
    case = dict(case)
    bounds = case.pop("cu_seqlens", None)
    value_size = case.pop("value_size", 8)
    mask_type = api.AttnMaskType[case.pop("mask", "causal")]
    cfg = tiny.config(context_parallel_size=cp, **case)
    module = CoreAttention(cfg, 1, mask_type, "self", softmax_scale=0.4)
    if module.softmax_offset is not None:
        torch.nn.init.constant_(module.softmax_offset, 0.7)
    draw = torch.Generator().manual_seed(3)
    batch = () if bounds else (3,)
    whole = [
        torch.randn(LENGTH, *batch, heads, size, generator=draw)
        for heads, size in ((HEADS, 8), (GROUPS, 8), (GROUPS, value_size))
    ]
    weight = torch.randn(LENGTH, *batch, HEADS * value_size, generator=draw)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    packed = bounds and api.PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
    )
    rank = dist.get_rank() if cp > 1 else 0
    mine = context_positions(LENGTH, cp, cu_seqlens)[rank] if cp > 1 else torch.arange(LENGTH)
    local = [x[mine].requires_grad_() for x in whole]
    out = module(*local, None, packed_seq_params=packed)
    order = context_positions(LENGTH, cp, cu_seqlens).flatten() if cp > 1 else mine
    _compare_rows(module, local, whole[2][order], packed, mine, out)
    (out * weight[mine]).sum().backward()
    placed = []
    for value in (out.detach(), *(x.grad for x in local)):
        full = torch.zeros(LENGTH, *value.shape[1:])
        full[mine] = value
        placed.append(full)
    if module.softmax_offset is not None:
        placed.append(module.softmax_offset.grad)
    return placed


def _compare_rows(
    module: Any,
    local: list[torch.Tensor],
    values: torch.Tensor,
    packed: Any,
    mine: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compare the output with that of the logits of sampled queries: three, or all of them."""
    if values.dim() == 3:
        values = values.unsqueeze(1)
    spread = values.permute(1, 2, 0, 3).repeat_interleave(HEADS // GROUPS, dim=1)
    for most in (3, LENGTH):
        logits, here = module.sampled_logits(most, *local[:2], None, packed_seq_params=packed)
        rows = (torch.arange(most) + 1) * LENGTH // most - 1
        assert torch.equal(here, torch.isin(rows, mine))
        if module.softmax_offset is not None:
            sink = module.softmax_offset.detach()[:, None, None].expand(len(logits), -1, most, 1)
            logits = torch.cat([logits, sink], -1)
        shares = torch.softmax(logits, -1)[..., : spread.shape[2]]
        found = (shares @ spread).permute(2, 0, 1, 3).flatten(2)[here]
        places = [int((mine == row).nonzero()) for row in rows[here]]
        expected = out.detach()[places].view_as(found)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@cache
def _attended_alone(name: str) -> list[torch.Tensor]:
    (found,) = run_ranks(1, _attend, 1, ATTENTION_CASES[name])
    return found


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", CONTEXT_KINDS)
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_adapter_backend_attention_cp_equals_one_rank(name: str, kind: str) -> None:
    case = ATTENTION_CASES[name]
    cp, context = CONTEXT_KINDS[kind]
    expected = _attended_alone(name)
    ranks = run_ranks(cp, _attend, cp, {**case, **context})
    for what, whole, parts in zip(
        ("output", "q", "k", "v", "sink"), expected, zip(*ranks, strict=True), strict=False
    ):
        torch.testing.assert_close(
            sum(parts), whole, atol=2e-6, rtol=1e-5, msg=lambda m, w=what: f"{w}: {m}"
        )


def _packed_and_alone() -> tuple[torch.Tensor, torch.Tensor]:
    from mtrain.mcore import api
    from mtrain.mcore.layers.attention import CoreAttention

    tiny.start_world()
    module = CoreAttention(tiny.config(), 1, api.AttnMaskType.causal, "self")
    q, k, v = (torch.randn(12, heads, 8) for heads in (HEADS, GROUPS, GROUPS))
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    together = module(
        q, k, v, None, packed_seq_params=api.PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds)
    )
    parts = [slice(0, 5), slice(5, 12)]
    alone = [module(q[p, None], k[p, None], v[p, None], None).squeeze(1) for p in parts]
    return together, torch.cat(alone)


def test_adapter_backend_packed_sequences_are_isolated() -> None:
    ((together, alone),) = run_ranks(1, _packed_and_alone)
    torch.testing.assert_close(together, alone)


def _default_path_calls() -> list[dict[str, Any]]:
    from mtrain.mcore import api
    from mtrain.mcore.layers.attention import CoreAttention

    tiny.start_world()
    module = CoreAttention(tiny.config(), 1, api.AttnMaskType.causal, "self")
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def record(
        q: Any, k: Any, v: Any, mask: Any, dropout_p: float, causal: bool, **kwargs: Any
    ) -> Any:
        calls.append({"mask": mask, "causal": causal})
        return original(q, k, v, mask, dropout_p, causal, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = record
    module(torch.randn(6, 2, 4, 8), torch.randn(6, 2, 2, 8), torch.randn(6, 2, 2, 8), None)
    return calls


def test_adapter_backend_causal_attention_builds_no_mask() -> None:
    assert run_ranks(1, _default_path_calls) == [[{"mask": None, "causal": True}]]


def _dropout_twice() -> tuple[bool, bool]:
    from mtrain.mcore import api
    from mtrain.mcore.layers.attention import CoreAttention

    tiny.start_world(tp=2)
    cfg = tiny.config(attention_dropout=0.5, tensor_model_parallel_size=2)
    module = CoreAttention(cfg, 1, api.AttnMaskType.causal, "self")
    q = torch.ones(6, 2, 2, 8)
    before = torch.get_rng_state()
    out = module(q, q, q, None)
    state_kept = torch.equal(before, torch.get_rng_state())
    both = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(both, out)
    return state_kept, torch.equal(both[0], both[1])


def test_adapter_backend_attention_dropout_differs_by_tp_rank() -> None:
    assert run_ranks(2, _dropout_twice) == [(True, False), (True, False)]
