"""The gated delta rule: both definitions against loops in numbers and each other, and the calls of
the library.
"""

from __future__ import annotations

import itertools
import math
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from mtrain_kernels import parity
from mtrain_kernels.gated_delta_rule import op, reference
from mtrain_kernels.registry import Unavailable
from torch import Tensor

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"l2norm": True},
    "scaled": {"scale": 0.7},
    "state": {"state": (2, 4, 3, 5)},
    "segments": {"segments": True},
    "all of it": {"l2norm": True, "scale": 0.7, "state": (2, 4, 3, 5), "segments": True},
}


def inputs(
    way: str, times: int = 13, dtype: torch.dtype = torch.float64, heads: int = 2
) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {
        "q": (2, times, heads, 3),
        "k": (2, times, heads, 3),
        "v": (2, times, 4, 5),
        "g": (2, times, 4),
        "beta": (2, times, 4),
    }
    found: dict[str, Any] = {
        n: torch.randn(s, dtype=torch.float64).to(dtype) for n, s in shapes.items()
    }
    found["k"] = found["k"] / 2
    found["g"] = -found["g"].abs()
    found["beta"] = found["beta"].sigmoid()
    for name, value in WAYS[way].items():
        found[name] = (
            torch.randn(value, dtype=torch.float64).to(dtype) if isinstance(value, tuple) else value
        )
    for value in found.values():
        if isinstance(value, Tensor):
            value.requires_grad_()
    if "segments" in found:
        marks = torch.tensor([0, 0, 0, 1, 1, 0, 2, 2, 2, 2, 2, 0, 0])
        found["segments"] = torch.stack([marks, marks.flip(0)])[:, :times]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_gated_delta_rule_recurrence_equals_plain_numbers(way: str) -> None:
    found = inputs(way)
    y, last = reference.gated_delta_rule_sequential(**found)
    given = {name: value.tolist() for name, value in found.items() if isinstance(value, Tensor)}
    for n, h in itertools.product(range(2), range(4)):
        state = given["state"][n][h] if "state" in given else [[0.0] * 5 for _ in range(3)]
        for t in range(13):
            q, k = (list(given[name][n][t][h // 2]) for name in "qk")
            v, g, beta = (given[name][n][t][h] for name in ("v", "g", "beta"))
            if found.get("l2norm"):
                q, k = (
                    [x / math.sqrt(sum(y * y for y in row) + 1e-6) for x in row] for row in (q, k)
                )
            if "segments" in found and t and found["segments"][n, t] != found["segments"][n, t - 1]:
                state = [[0.0] * 5 for _ in range(3)]
            state = [[math.exp(g) * x for x in row] for row in state]
            known = [sum(k[d] * state[d][e] for d in range(3)) for e in range(5)]
            state = [
                [state[d][e] + beta * k[d] * (v[e] - known[e]) for e in range(5)] for d in range(3)
            ]
            for e in range(5):
                wanted = found.get("scale", 3**-0.5) * sum(q[d] * state[d][e] for d in range(3))
                assert math.isclose(
                    wanted, float(y.detach()[n, t, h, e]), rel_tol=1e-9, abs_tol=1e-9
                )
        assert torch.allclose(torch.tensor(state, dtype=torch.float64), last[n, h])


@pytest.mark.sampled
@pytest.mark.parametrize("chunk", [1, 4, 13, 64])
@pytest.mark.parametrize("way", WAYS)
def test_gated_delta_rule_chunks_equal_recurrence_with_gradients(way: str, chunk: int) -> None:
    definition = reference.gated_delta_rule_sequential
    parity.check(partial(reference.gated_delta_rule, chunk=chunk), definition, inputs(way))
    parity.check(partial(op.gated_delta_rule, chunk=chunk), definition, inputs(way))


def test_gated_delta_rule_forgetful_chunk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda system, right, **_: right)
    with pytest.raises(AssertionError):
        parity.check(
            reference.gated_delta_rule, reference.gated_delta_rule_sequential, inputs("plain")
        )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 8e-2)]
)
def test_gated_delta_rule_low_precision_stays_near(dtype: torch.dtype, tolerance: float) -> None:
    # A state remembers many steps: what its inputs' rounding does to it is larger than one step of
    # the dtype.
    definition = reference.gated_delta_rule_sequential
    parity.check(
        op.gated_delta_rule, definition, inputs("all of it", dtype=dtype), tolerance=tolerance
    )


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("times", [0, 1, 5])
def test_gated_delta_rule_any_times_and_heads(times: int, heads: int) -> None:
    found = inputs("normed", times, heads=heads)
    parity.check(
        partial(op.gated_delta_rule, chunk=4), reference.gated_delta_rule_sequential, found
    )


def test_gated_delta_rule_fast_decay_never_overflows() -> None:
    found = inputs("normed", times=200, dtype=torch.float32)
    with torch.no_grad():
        found["g"] -= 30
    y, last = op.gated_delta_rule(**found)
    leaves = [found[n] for n in ("q", "k", "v", "g", "beta")]
    gradients = torch.autograd.grad(y.sum() + last.sum(), leaves)
    assert all(g.isfinite().all() for g in (y, last, *gradients))


def test_gated_delta_rule_packed_equal_separate_and_resume() -> None:
    found = inputs("normed")
    parts = ("q", "k", "v", "g", "beta")
    cut = [
        {n: v[:, i:j] if n in parts else v for n, v in found.items()}
        for i, j in itertools.pairwise((0, 4, 5, 13))
    ]
    alone = [reference.gated_delta_rule(**each, chunk=3)[0] for each in cut]
    marks = torch.tensor([[5] * 4 + [2] + [5] * 8]).expand(2, 13)
    packed = reference.gated_delta_rule(**found, segments=marks, chunk=3)[0]
    torch.testing.assert_close(packed, torch.cat(alone, 1))
    state = None
    ys = []
    for each in cut:
        y, state = reference.gated_delta_rule(**each, state=state)
        ys.append(y)
    whole = reference.gated_delta_rule(**found)
    torch.testing.assert_close((torch.cat(ys, 1), state), whole)


def test_gated_delta_rule_backward_keeps_inputs_only() -> None:
    kept: list[int] = []
    found = inputs("normed", times=128, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        op.gated_delta_rule(**found)
    assert sorted(kept) == sorted(found[n].numel() for n in ("q", "k", "v", "g", "beta"))


def test_gated_delta_rule_single_input_gradient_is_equal() -> None:
    """Differentiate by the query only, which reaches no state: its gradient must not need the
    state's.
    """
    found = inputs("all of it")
    names = [name for name, x in found.items() if isinstance(x, Tensor) and x.requires_grad]
    outputs = op.gated_delta_rule(**found)
    steps = [torch.randn(y.shape, dtype=y.dtype) for y in outputs]
    wanted = torch.autograd.grad(outputs, [found[name] for name in names], steps)
    for name, gradient in zip(names, wanted, strict=True):
        alone = {n: x.detach() if n in names and n != name else x for n, x in found.items()}
        torch.testing.assert_close(
            torch.autograd.grad(op.gated_delta_rule(**alone), found[name], steps)[0], gradient
        )


def fla_stand_in(
    q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
):  # fmt: skip
    assert output_final_state
    assert q.shape[2] == v.shape[2]
    options = {"l2norm": use_qk_l2norm_in_kernel, "scale": scale}
    if cu_seqlens is None:
        return reference.gated_delta_rule(q, k, v, g, beta, state=initial_state, **options)
    assert q.shape[0] == 1
    out = []
    for number, (i, j) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        state = None if initial_state is None else initial_state[number][None]
        out.append(
            reference.gated_delta_rule(
                *(x[:, i:j] for x in (q, k, v, g, beta)), state=state, **options
            )
        )
    ys, states = zip(*out, strict=True)
    return torch.cat(ys, 1), torch.cat(states)


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_gated_delta_rule_library_call_is_valid(
    way: str, edges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = inputs(way, dtype=torch.float32)
    more = {}
    if "segments" in found:
        found = {n: v[:1] if isinstance(v, Tensor) else v for n, v in found.items()}
        if edges:  # then nothing waits for the device
            more = {"edges": torch.tensor([0, 3, 5, 6, 11, 13], dtype=torch.int32)}
            monkeypatch.setattr(torch, "nonzero", None)
    module = ModuleType("stand-in")
    module.chunk_gated_delta_rule = fla_stand_in  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setattr(op, "pick", lambda name, impl, *rest: impl)
    wanted = reference.gated_delta_rule_sequential(**found)
    torch.testing.assert_close(
        op.gated_delta_rule(**found, **more, impl="fla"), wanted, rtol=1e-4, atol=1e-4
    )


def test_gated_delta_rule_named_runs_or_states_reason() -> None:
    found = inputs("all of it", dtype=torch.float32)
    with pytest.raises(Unavailable, match=r"fla"):
        op.gated_delta_rule(**found, impl="fla")
    half = found["v"].half()
    assert "edges" in (op._call_obstacle(half, found["segments"]) or "")
    assert op._call_obstacle(half[:1], found["segments"][:1]) is None
    assert "float32" in (op._call_obstacle(found["v"][:1], None) or ""), "fla asserts another dtype"


def test_gated_delta_rule_unfit_is_refused() -> None:
    found = inputs("all of it")
    for change, said in (
        ({"q": found["q"][0]}, "must both be"),
        ({"v": found["v"][:, 1:]}, "v "),
        ({"q": found["q"][:, :, :0], "k": found["k"][:, :, :0]}, "no multiple"),
        ({"g": found["g"][..., 1:]}, "g "),
        ({"state": found["state"][1:]}, "state"),
        ({"segments": found["segments"][:, 1:]}, "segments"),
    ):
        with pytest.raises(ValueError, match=said):
            op.gated_delta_rule(**found | change)
    with pytest.raises(ValueError, match="given with the segments"):
        op.gated_delta_rule(**found | {"segments": None}, edges=torch.tensor([0, 13]))
    with pytest.raises(ValueError, match="chunk 0"):
        op.gated_delta_rule(**found, chunk=0)
