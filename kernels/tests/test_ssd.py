"""The scan: both definitions against loops in numbers, against each other, and the calls of the
libraries.
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
from mtrain_kernels.registry import Unavailable
from mtrain_kernels.ssd import op, reference
from torch import Tensor

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "skip": {"d": (4,)},
    "skip by size": {"d": (4, 3)},
    "bias and softplus": {"dt_bias": (4,), "dt_softplus": True},
    "state": {"state": (2, 4, 3, 5)},
    "segments": {"segments": True},
    "all of it": {
        "d": (4,),
        "dt_bias": (4,),
        "dt_softplus": True,
        "state": (2, 4, 3, 5),
        "segments": True,
    },
}


def inputs(
    way: str, times: int = 13, dtype: torch.dtype = torch.float64, groups: int = 2
) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {
        "x": (2, times, 4, 3),
        "dt": (2, times, 4),
        "a": (4,),
        "b": (2, times, groups, 5),
        "c": (2, times, groups, 5),
    }
    found: dict[str, Any] = {
        n: torch.randn(s, dtype=torch.float64).to(dtype) for n, s in shapes.items()
    }
    found["dt"] = found["dt"].abs()
    found["a"] = -found["a"].abs()
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
def test_ssd_recurrence_equals_plain_numbers(way: str) -> None:
    found = inputs(way)
    y, last = reference.ssd_sequential(**found)
    x, dt, a, b, c = (found[n].detach() for n in ("x", "dt", "a", "b", "c"))
    for n in range(2):
        for h in range(4):
            for p in range(3):
                state = [
                    float(found["state"][n, h, p, s]) if "state" in found else 0.0 for s in range(5)
                ]
                for t in range(13):
                    if (
                        "segments" in found
                        and t
                        and found["segments"][n, t] != found["segments"][n, t - 1]
                    ):
                        state = [0.0] * 5
                    step = float(dt[n, t, h]) + (
                        float(found["dt_bias"][h]) if "dt_bias" in found else 0.0
                    )
                    step = math.log1p(math.exp(step)) if found.get("dt_softplus") else step
                    fade = math.exp(step * float(a[h]))
                    value = step * float(x[n, t, h, p])
                    state = [
                        fade * s + value * float(w)
                        for s, w in zip(state, b[n, t, h // 2], strict=True)
                    ]
                    wanted = sum(s * float(r) for s, r in zip(state, c[n, t, h // 2], strict=True))
                    if "d" in found:
                        skip = found["d"][h] if found["d"].ndim == 1 else found["d"][h, p]
                        wanted += float(skip) * float(x[n, t, h, p])
                    assert math.isclose(wanted, float(y[n, t, h, p]), rel_tol=1e-9, abs_tol=1e-9)
                assert torch.allclose(torch.tensor(state, dtype=torch.float64), last[n, h, p])


@pytest.mark.parametrize("chunk", [1, 4, 13, 64])
@pytest.mark.parametrize("way", WAYS)
def test_ssd_chunks_equal_recurrence_with_gradients(way: str, chunk: int) -> None:
    parity.check(partial(reference.ssd, chunk=chunk), reference.ssd_sequential, inputs(way))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 2e-2), (torch.bfloat16, 6e-2)]
)
def test_ssd_low_precision_stays_near(dtype: torch.dtype, tolerance: float) -> None:
    # A state remembers many steps: what its inputs' rounding does to it is larger than one step of
    # the dtype.
    parity.check(
        op.ssd, reference.ssd_sequential, inputs("all of it", dtype=dtype), tolerance=tolerance
    )


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("times", [0, 1, 5])
def test_ssd_any_times_and_groups(times: int, groups: int) -> None:
    parity.check(
        partial(reference.ssd, chunk=4),
        reference.ssd_sequential,
        inputs("skip", times, groups=groups),
    )


def test_ssd_fast_decay_never_overflows() -> None:
    found = inputs("plain", dtype=torch.float32)
    with torch.no_grad():
        found["a"] -= 200
    y, last = op.ssd(**found)
    leaves = [found[n] for n in ("x", "dt", "a", "b", "c")]
    gradients = torch.autograd.grad(y.sum() + last.sum(), leaves)
    assert all(g.isfinite().all() for g in (y, last, *gradients))


def test_ssd_packed_equal_separate() -> None:
    found = inputs("skip")
    edges = [0, 4, 5, 13]
    alone = [
        reference.ssd(
            **{n: v[:, i:j] if n in ("x", "dt", "b", "c") else v for n, v in found.items()}, chunk=3
        )[0]
        for i, j in itertools.pairwise(edges)
    ]
    marks = torch.tensor([[5] * 4 + [2] + [5] * 8]).expand(2, 13)
    torch.testing.assert_close(
        reference.ssd(**found, segments=marks, chunk=3)[0], torch.cat(alone, 1)
    )


def mamba_stand_in(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")), return_final_states=False,
):  # fmt: skip
    assert return_final_states
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and int(seq_idx[:, 0].sum()) == 0)
    options = {
        "d": D,
        "dt_bias": dt_bias,
        "dt_softplus": dt_softplus,
        "state": initial_states,
        "segments": seq_idx,
    }
    return reference.ssd(x, dt, A, B, C, chunk=chunk_size, **options)


def gla_stand_in(q, k, v, g, scale, initial_state, output_final_state):
    assert output_final_state
    if initial_state is None:
        state = torch.zeros(*q.shape[:1], q.shape[2], q.shape[3], v.shape[3])
    else:
        state = initial_state
    out = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append(scale * torch.einsum("nhk,nhkv->nhv", q[:, t], state))
    return torch.stack(out, 1), state


@pytest.mark.parametrize("library", ["mamba_ssm", "fla"])
@pytest.mark.parametrize("way", [w for w in WAYS if w != "all of it"])
def test_ssd_library_call_is_valid(library: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inputs(way, dtype=torch.float32)
    if library == "fla" and "segments" in found:
        return
    module = ModuleType("stand-in")
    # type: ignore
    module.mamba_chunk_scan_combined = mamba_stand_in
    module.chunk_simple_gla = gla_stand_in
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", module)
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", module)
    monkeypatch.setattr(op, "_library_obstacle", lambda module, device: None)
    monkeypatch.setattr(op, "_pick", lambda impl, *rest: impl)
    wanted = reference.ssd_sequential(**found)
    torch.testing.assert_close(op.ssd(**found, impl=library), wanted, rtol=1e-4, atol=1e-4)


def test_ssd_named_runs_or_states_reason() -> None:
    found = inputs("all of it", dtype=torch.float32)
    with pytest.raises(
        Unavailable, match=r"mamba_ssm (is not installed|does not say|runs on CUDA)"
    ):
        op.ssd(**found, impl="mamba_ssm")
    with pytest.raises(Unavailable, match="fla"):
        op.ssd(**found, impl="fla")
    assert (
        op._call_obstacle("mamba_ssm", found["x"], 48, None, None)
        == "a chunk of 48 is no power of two"
    )
    assert "edges" in (op._call_obstacle("fla", found["x"], 64, None, found["segments"]) or "")


def test_ssd_unfit_is_refused() -> None:
    found = inputs("all of it")
    for change, said in (
        ({"x": found["x"][0]}, "must be"),
        ({"c": found["c"][..., 1:]}, "both be"),
        ({"b": found["b"][:, :, :0], "c": found["c"][:, :, :0]}, "no multiple"),
        ({"a": found["a"][1:]}, "a "),
        ({"d": found["d"][1:]}, "d "),
        ({"state": found["state"][1:]}, "state"),
        ({"segments": found["segments"][:, 1:]}, "segments"),
    ):
        with pytest.raises(ValueError, match=said):
            op.ssd(**found | change)
    with pytest.raises(ValueError, match="chunk 0"):
        op.ssd(**found, chunk=0)
