"""The permutation of tokens by expert against lists of rows, and its kernels against the
definition.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels import parity
from mtrain_kernels.moe_permute import op, reference
from mtrain_kernels.moe_permute.reference import Plan, plan
from mtrain_kernels.registry import Unavailable
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.moe_permute.triton"
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"pad_to": 16},
    "capacity": {"capacity": 4},
    "capacity, padded": {"capacity": 5, "pad_to": 4},
    "rows known": {"rows": 40},
    "nothing kept": {"capacity": 0},
}


def impls(tokens: int, k: int, experts: int) -> Tensor:
    """Return different experts for each token, some of them dropped; expert 1 gets nothing."""
    torch.manual_seed(0)
    chosen = torch.rand(tokens, experts, device=DEVICE)
    chosen[:, 1] = -1
    found = chosen.topk(k).indices
    found[torch.rand(tokens, k, device=DEVICE) < 0.15] = -1
    return found


def by_hand(
    indices: Tensor, experts: int, capacity: int | None = None, pad_to: int = 1
) -> tuple[list[int], list[int]]:
    """Return the copy that each row holds, and the number of rows of each expert, from lists."""
    flat = indices.flatten().tolist()
    source = []
    counts = []
    for expert in range(experts):
        mine = [copy for copy, owner in enumerate(flat) if owner == expert][:capacity]
        mine += [-1] * (-len(mine) % pad_to)
        source += mine
        counts.append(len(mine))
    return source, counts


@pytest.mark.parametrize("way", PLANS)
@pytest.mark.parametrize(("tokens", "k", "experts"), [(17, 3, 7), (1, 1, 2), (0, 2, 4), (30, 2, 3)])
def test_moe_permute_plan_equals_lists(tokens: int, k: int, experts: int, way: str) -> None:
    indices = impls(tokens, k, experts)
    found = plan(indices, experts, **PLANS[way])
    limits = {name: value for name, value in PLANS[way].items() if name != "rows"}
    source, counts = by_hand(indices, experts, **limits)
    if "rows" in PLANS[way]:
        assert found.source.shape == (40,)
    assert len(source) <= found.source.shape[0] or "rows" in PLANS[way]
    wanted = (source + [-1] * found.source.shape[0])[: found.source.shape[0]]
    assert found.source.tolist() == wanted
    assert found.counts.tolist() == counts
    assert found.position.flatten().tolist() == [
        wanted.index(c) if c in wanted else -1 for c in range(tokens * k)
    ]


@pytest.mark.parametrize("room", [0, 3, 9, 40])
@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize(("tokens", "k"), [(17, 3), (0, 2), (30, 2)])
def test_moe_permute_expert_blocks_have_own_rows(
    tokens: int, k: int, capacity: int | None, room: int
) -> None:
    indices = impls(tokens, k, 6)
    blocks = 3
    found = plan(indices, 6, rows=blocks * room, blocks=blocks, capacity=capacity)
    wanted: list[int] = []
    for block in range(blocks):
        owned = torch.where(indices // 2 == block, indices - 2 * block, -1)  # of two experts each
        wanted += (by_hand(owned, 2, capacity)[0] + [-1] * room)[:room]
    assert found.source.tolist() == wanted
    assert found.counts.tolist() == by_hand(indices, 6, capacity)[1]
    assert found.position.flatten().tolist() == [
        wanted.index(c) if c in wanted else -1 for c in range(tokens * k)
    ]


def test_moe_permute_blocks_divide_experts_and_rows() -> None:
    for experts, more in ((6, {"blocks": 4}), (6, {"blocks": 3, "rows": 10}), (6, {"blocks": 0})):
        with pytest.raises(ValueError, match="do not divide"):
            plan(impls(4, 2, experts), experts, **more)
    assert plan(impls(4, 2, 6), 6, blocks=3).source.shape == (3 * 8,)


def inputs(
    way: str = "plain", dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (17, 3, 7, 37)
) -> Any:
    tokens, k, experts, hidden = sizes
    made = plan(impls(tokens, k, experts), experts, **PLANS[way])
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype).requires_grad_()
    rows = torch.randn(made.source.shape[0], hidden, device=DEVICE).to(dtype).requires_grad_()
    weights = torch.rand(tokens, k, device=DEVICE).requires_grad_()
    return {"x": x, "plan": made}, {"rows": rows, "plan": made, "weights": weights}


def compare(forth: dict[str, Any], back: dict[str, Any]) -> None:
    parity.check(partial(op.permute, impl="triton"), reference.permute, forth)
    parity.check(partial(op.unpermute, impl="triton"), reference.unpermute, back)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_moe_permute_equals_definition_with_gradients(way: str, dtype: torch.dtype) -> None:
    forth, back = inputs(way, dtype)
    compare(forth, back)
    compare(forth, back | {"weights": None})
    compare(forth, back | {"weights": back["weights"].detach().to(dtype).requires_grad_()})


@pytest.mark.parametrize(
    "sizes", [(1, 1, 2, 1), (0, 2, 4, 8), (5, 2, 4, 0), (2, 2, 4, 9000), (200, 1, 3, 8)]
)
def test_moe_permute_any_size(sizes: tuple[int, ...]) -> None:
    compare(*inputs("plain", sizes=sizes))


def test_moe_permute_strides_do_not_matter() -> None:
    forth, back = inputs()
    layouts = [dict(parity.layouts(v)) for v in (forth["x"], back["rows"], back["weights"])]
    for name, x in layouts[0].items():
        compare(forth | {"x": x}, back | {"rows": layouts[1][name], "weights": layouts[2][name]})
    turned = Plan(
        forth["plan"].position.T.contiguous().T, forth["plan"].source, forth["plan"].counts
    )
    compare(forth | {"plan": turned}, back | {"plan": turned})


def test_moe_permute_nan_stays_with_its_token() -> None:
    forth, back = inputs()
    with torch.no_grad():
        forth["x"][2, 5] = float("nan")
        forth["x"][4, 1] = float("inf")
        back["rows"][3, 0] = float("nan")
        back["weights"][5, 0] = float("-inf")
    compare(forth, back)


def test_moe_permute_dropped_copy_adds_nothing() -> None:
    made = plan(torch.tensor([[0, -1]], device=DEVICE), 2)
    weights = torch.tensor([[2.0, float("nan")]], device=DEVICE, requires_grad=True)
    for impl in ("reference", "triton"):
        out = op.unpermute(torch.ones(2, 3, device=DEVICE), made, weights, impl=impl)
        assert out.tolist() == [[2.0] * 3]
        assert torch.autograd.grad(out.sum(), weights)[0].tolist() == [[3.0, 0.0]]


def test_moe_permute_round_trip_is_identity() -> None:
    x = torch.randn(9, 12, device=DEVICE)
    made = plan(torch.rand(9, 5, device=DEVICE).topk(2).indices, 5, pad_to=16)
    weights = torch.tensor([[0.25, 0.75]], device=DEVICE).expand(9, 2)
    for impl in ("reference", "triton"):
        back = op.unpermute(op.permute(x, made, impl=impl), made, weights, impl=impl)
        torch.testing.assert_close(back, x)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("held = source >= 0", "held = source > 0"),
        ("source // K", "source % K"),
        ("value * weight[:, None], 0.0", "value, 0.0"),
        ("dot += tl.sum", "dot = tl.sum"),
        ("torch.zeros_like(weights)", "torch.empty_like(weights)"),
        ("range(K)", "range(K - 1)"),
        ("total += value", "total = value"),
        ("value = value * weight[:, None]\n        total", "value = value\n        total"),
        ("kept = position >= 0", "kept = position > 0"),
        ("ceil_div(count, r)", "count // r"),
        ("ceil_div(hidden, h)", "hidden // h"),
    ],
)
def test_moe_permute_seeded_bug_is_found(old: str, new: str) -> None:
    with parity.caught(KERNELS, old, new):
        compare(*inputs(sizes=(5, 3, 5, 4100)))
        compare(*inputs())


@pytest.mark.full
def test_moe_permute_passes_torch_registration() -> None:
    forth, back = inputs()
    made = forth["plan"]
    torch.library.opcheck(op._permute.op, (forth["x"], made.position, made.source))
    torch.library.opcheck(
        op._unpermute.op, (back["rows"], made.position, made.source, back["weights"])
    )


@pytest.mark.full
def test_moe_permute_compiled_round_trip() -> None:
    def loss(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        made = plan(indices, 7, pad_to=4)
        rows = op.permute(x, made, impl="triton")
        return op.unpermute(rows.square(), made, weights, impl="triton").sum()

    forth, back = inputs()
    arguments = (forth["x"], impls(17, 3, 7), back["weights"])
    plain = torch.autograd.grad(loss(*arguments), [forth["x"], back["weights"]])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*arguments), [forth["x"], back["weights"]]), plain
    )


def test_moe_permute_unfit_is_refused() -> None:
    forth, back = inputs()
    with pytest.raises(ValueError, match="tokens of the plan"):
        op.permute(forth["x"][1:], forth["plan"])
    with pytest.raises(ValueError, match=r"int64 .* must be floating"):
        op.permute(forth["x"].long(), forth["plan"])
    with pytest.raises(ValueError, match=r"int64 .* must be floating"):
        op.unpermute(back["rows"].long(), back["plan"])
    with pytest.raises(ValueError, match="rows of the plan"):
        op.unpermute(back["rows"][1:], back["plan"])
    with pytest.raises(ValueError, match="one for each copy"):
        op.unpermute(back["rows"], back["plan"], back["weights"][:, 1:])
    with pytest.raises(ValueError, match="integers"):
        plan(torch.zeros(2, 2), 3)
    with pytest.raises(ValueError, match="pad_to 0"):
        plan(torch.zeros(2, 2, dtype=torch.int64), 3, pad_to=0)
    with pytest.raises(Unavailable, match="float64"):
        op.permute(forth["x"].double(), forth["plan"], impl="triton")


def by_index(weights: Tensor, plan: Plan) -> Tensor:
    held = plan.source >= 0
    return torch.where(held, weights.flatten()[plan.source.clamp_min(0).long()], 0.0)


@pytest.mark.parametrize("way", PLANS)
def test_moe_permute_row_has_weight_of_its_copy(way: str) -> None:
    _, back = inputs(way)
    found = {"weights": back["weights"], "plan": back["plan"]}
    parity.check(op.row_weights, by_index, found, exact=True)
    with pytest.raises(ValueError, match="one for each copy"):
        op.row_weights(back["weights"][:, 1:], back["plan"])
    if way == "nothing kept":  # then no gradient is wrong
        return
    with parity.caught(
        "mtrain_kernels.moe_permute.op",
        "return _taken(d_rows, ctx",
        "return _taken(d_rows * 2, ctx",
    ):
        parity.check(
            importlib.import_module("mtrain_kernels.moe_permute.op").row_weights, by_index, found
        )
