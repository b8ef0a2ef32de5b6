"""The op over attention's backends: each against the definition, the choice against its rules."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from mtrain_kernels import admitted, parity
from mtrain_kernels.attention import backends, op
from mtrain_kernels.attention.backends import RULES, Call
from mtrain_kernels.registry import Unavailable
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = ["cpu", "flash", "math", "reference"]  # those that run on a CPU too, without an interpreter
EDGES = [0, 4, 5, 12]
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "scale": 0.2},
    "window": {"causal": True, "window": (3, 0)},
    "window to both sides": {"window": (2, 4)},
    "packed": {"causal": True, "cu_seqlens": EDGES, "max_seqlen": 7},
    "packed, window": {"window": (2, 2), "cu_seqlens": EDGES},
    "mask": {"mask": True},
    "sink": {"causal": True, "sink": True},
    "cap": {"causal": True, "softcap": 0.7},
    "all of it": {
        "causal": True,
        "window": (5, 0),
        "sink": True,
        "softcap": 1.5,
        "cu_seqlens": EDGES,
        "scale": 1.0,
    },
}
H100 = Call(
    "cuda",
    (9, 0),
    torch.bfloat16,
    1,
    32,
    8,
    4096,
    4096,
    128,
    128,
    (-1, 0),
    False,
    False,
    0.0,
    0.0,
    False,
)


def inputs(
    way: str, dtype: torch.dtype = torch.float32, sizes: tuple[int, int] = (16, 16)
) -> dict[str, Any]:
    torch.manual_seed(0)
    shapes = {"q": (1, 4, 12, sizes[0]), "k": (1, 2, 12, sizes[0]), "v": (1, 2, 12, sizes[1])}
    found: dict[str, Any] = {
        n: torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for n, s in shapes.items()
    }
    found |= WAYS[way]
    if "cu_seqlens" in found:
        found["cu_seqlens"] = torch.tensor(EDGES, dtype=torch.int32, device=DEVICE)
    if "mask" in found:
        found["mask"] = torch.rand(12, 12, device=DEVICE) < 0.6
        found["mask"].fill_diagonal_(True)
    if "sink" in found:
        found["sink"] = torch.linspace(-1, 2, 4, device=DEVICE).to(dtype).requires_grad_()
    return found


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Compute unfused scores, with a loop over pairs for visibility."""
    s = q.shape[2]
    owner = [
        0 if cu_seqlens is None else sum(i >= edge for edge in cu_seqlens.tolist())
        for i in range(s)
    ]
    left, right = (s if limit < 0 else limit for limit in window)
    pairs = [
        [
            owner[i] == owner[j] and -left <= j - i <= right and not (causal and j > i)
            for j in range(s)
        ]
        for i in range(s)
    ]
    seen = torch.tensor(pairs, device=q.device) if mask is None else mask
    k = k.repeat_interleave(2, 1)
    v = v.repeat_interleave(2, 1)
    z = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    z = softcap * (z / softcap).tanh() if softcap else z
    z = z.masked_fill(~seen, float("-inf"))
    if sink is not None:
        z = torch.cat([z, sink.view(1, -1, 1, 1).expand(1, 4, s, 1)], -1)
    return z.softmax(-1)[..., :s] @ v


@pytest.mark.parametrize("impl", ["auto", *HERE])
@pytest.mark.parametrize("way", WAYS)
def test_attention_backends_equal_definition(way: str, impl: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        found = inputs(way, dtype)
        try:
            op.explain(**found, impl=impl)
        except Unavailable:
            return
        # Torch's own kernels round more often on the way back than one step of the dtype.
        tolerance = 3e-2 if dtype == torch.bfloat16 else None
        parity.check(partial(op.attention, impl=impl), definition, found, tolerance=tolerance)


@pytest.mark.parametrize("way", ["full", "packed, window", "sink"])
@pytest.mark.parametrize("sizes", [(12, 5), (5, 12)])
def test_attention_values_may_have_another_width(sizes: tuple[int, int], way: str) -> None:
    parity.check(op.attention, definition, inputs(way, sizes=sizes))


def test_attention_strides_do_not_matter() -> None:
    found = inputs("packed")
    layouts = {n: dict(parity.layouts(found[n])) for n in ("q", "k", "v")}
    for name in layouts["q"]:
        parity.check(
            op.attention, definition, found | {n: other[name] for n, other in layouts.items()}
        )


def test_attention_choice_is_explained() -> None:
    found = op.explain(**inputs("sink"))
    assert found.chosen == "math" if DEVICE == "cpu" else found.chosen in RULES
    assert "flash" in found.rejected
    assert all(reason for reason in found.rejected.values())
    assert str(found).startswith(f"attention by {found.chosen}: the first that can")
    assert op.explain(**inputs("full"), impl="reference") == op.Explanation(
        "reference", "named", {}
    )
    assert op.explain(**inputs("cap")).chosen == "reference"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("impl", RULES)
def test_attention_unusable_named_backend_states_reason(impl: str, way: str) -> None:
    found = inputs(way)
    try:
        assert op.explain(**found, impl=impl).chosen == impl
        return
    except Unavailable as error:
        said = str(error)
    assert impl != "reference"
    assert len(said) > len(f"attention: {impl} cannot run: ")
    with pytest.raises(Unavailable, match=impl):
        op.attention(**found, impl=impl)


def changed(**fields: Any) -> Call:
    return H100._replace(**fields)


@pytest.mark.parametrize(
    ("call", "chosen"),
    [
        (H100, "cudnn"),
        (changed(capability=(8, 0)), "flash"),
        (changed(size=256, value_size=256), "flash"),
        (changed(size=192), "flash"),
        (changed(window=(1024, 0)), "flash"),
        (changed(packed=True), "flash"),
        (changed(packed=True, dropout_p=0.1), "efficient"),
        (changed(masked=True, window=(-1, -1)), "efficient"),
        (changed(sink=True), "triton"),
        (changed(sink=True, dropout_p=0.1), "efficient"),
        (changed(sink=True, masked=True), "efficient"),
        (changed(dtype=torch.float32), "efficient"),
        (changed(dtype=torch.float32, window=(1024, 0)), "triton"),
        (changed(dtype=torch.float64), "math"),
        (changed(size=100, value_size=100), "triton"),
        (changed(size=264, value_size=264, sink=True), "efficient"),
        (changed(softcap=30.0), "triton"),
        (changed(softcap=30.0, dropout_p=0.1), "reference"),
        (changed(softcap=30.0, capability=(10, 0)), "reference"),  # where ours has not been run
        (changed(sink=True, capability=(8, 0)), "efficient"),
        (changed(device="cpu"), "flash"),
        (changed(device="cpu", sink=True), "math"),
    ],
)
def test_attention_choice_follows_rules(
    call: Call, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "HAS_VARLEN", True)
    monkeypatch.setattr(backends, "HAS_FLASH3", False)
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    monkeypatch.setattr(admitted, "admitted", lambda: {90: {"attention": {}}})
    found = op._decide.__wrapped__(call, "auto")
    assert found.chosen == chosen
    assert "not installed" in found.rejected["flash3"]


def test_attention_windows_and_packing_use_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "HAS_FLASH3", False)
    monkeypatch.setattr(backends, "HAS_VARLEN", False)
    for call in (
        changed(window=(1024, 0)),
        changed(packed=True),
        changed(packed=True, dtype=torch.float16),
    ):
        for there, chosen in ((True, "triton"), (False, "efficient")):
            monkeypatch.setattr(backends, "HAS_TRITON", there)
            assert op._decide.__wrapped__(call, "auto").chosen == chosen


def test_attention_flash3_is_first_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "HAS_FLASH3", True)
    for call in (
        H100,
        changed(softcap=30.0),
        changed(packed=True, window=(512, 0)),
        changed(size=192),
    ):
        assert op._decide.__wrapped__(call, "auto").chosen == "flash3"
    for call in (
        changed(capability=(10, 0)),
        changed(sink=True),
        changed(dropout_p=0.1),
        changed(dtype=torch.float32),
    ):
        assert "flash3" in op._decide.__wrapped__(call, "auto").rejected


def rows_of(x: Tensor, cu_seqlens: Tensor, i: int) -> Tensor:
    return x[cu_seqlens[i] : cu_seqlens[i + 1]].transpose(0, 1)[None]


def stand_in(
    q,
    k,
    v,
    cu_q,
    cu_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    **options,
):
    """Attend by the definition over packed rows, with the signature of the libraries."""
    assert max(cu_q.diff()) <= max_q
    assert max(cu_k.diff()) <= max_k
    assert v.shape[-1] == q.shape[-1]
    parts = []
    for i in range(len(cu_q) - 1):
        q_part = rows_of(q, cu_q, i)
        k_part = rows_of(k, cu_k, i)
        v_part = rows_of(v, cu_k, i)
        out = definition(q_part, k_part, v_part, window=window_size, scale=scale, **options)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(
    "way", ["causal", "window", "window to both sides", "packed", "packed, window"]
)
def test_attention_torch_varlen_call_is_valid(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    found = inputs(way, sizes=(16, 8))
    call = op._call(
        found.get("q"),
        found.get("k"),
        found.get("v"),
        found.get("causal", False),
        found.get("window"),
        None,
        None,
        0.0,
        0.0,
        found.get("cu_seqlens"),
    )
    out = backends.by_varlen(
        found["q"],
        found["k"],
        found["v"],
        call,
        found.get("cu_seqlens"),
        found.get("max_seqlen"),
        found.get("scale"),
    )
    torch.testing.assert_close(out, definition(**found))


@pytest.mark.parametrize("way", ["full", "causal", "window", "packed", "packed, window", "cap"])
def test_attention_flash3_call_is_valid(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        *,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
    ):
        options = {
            "scale": softmax_scale,
            "window_size": window_size,
            "softcap": softcap,
            "causal": causal,
        }
        return stand_in(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, **options), None

    def dense(q, k, v, *, softmax_scale, causal, window_size, softcap):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return definition(
            q, k, v, causal, window_size, None, None, softcap, softmax_scale
        ).transpose(1, 2)

    library = ModuleType("flash_attn_interface")
    # type: ignore[attr-defined]
    library.flash_attn_func = dense
    library.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    monkeypatch.setitem(RULES, "flash3", lambda call: iter(()))
    op._decide.cache_clear()
    found = inputs(way, sizes=(16, 8))
    torch.testing.assert_close(op.attention(**found, impl="flash3"), definition(**found))
    op._decide.cache_clear()


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["causal", "packed, window", "cap"])
def test_attention_compiled_gradient_is_equal(way: str) -> None:
    found = inputs(way)
    leaves = [found[n] for n in "qkv"]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return op.attention(**found | {"q": q, "k": k, "v": v}).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    plain = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), plain)


def test_attention_unfit_is_refused() -> None:
    found = inputs("full")
    mask = torch.ones(12, 12, dtype=torch.bool, device=DEVICE)
    edges = torch.tensor(EDGES, device=DEVICE)
    for change, said in (
        ({"mask": mask, "window": (1, 1)}, "no window"),
        ({"mask": mask, "cu_seqlens": edges}, "no packed sequences"),
        (
            {"k": found["k"][:, :, 1:], "v": found["v"][:, :, 1:], "window": (1, 1)},
            "as many queries",
        ),
        ({"cu_seqlens": edges.float()}, "integers as their edges"),
        ({"q": found["q"].half()}, "one dtype"),
        ({"sink": torch.zeros(3, device=DEVICE)}, "one logit for each head"),
        ({"softcap": -1.0}, "negative"),
        ({"softcap": float("nan")}, "softcap nan"),
        ({"dropout_p": 1.5}, "dropout_p 1.5"),
        ({"window": (1,)}, r"window \(1,\)"),
        ({"q": found["q"].int(), "k": found["k"].int(), "v": found["v"].int()}, "a floating one"),
        ({"k": found["k"][:, :0], "v": found["v"][:, :0]}, "0 key heads"),
        ({"impl": "flash4"}, "no backend 'flash4'"),
        ({"v": found["v"][:, :1]}, "do not belong together"),
    ):
        with pytest.raises(ValueError, match=said):
            op.attention(**found | change)


def test_attention_excess_heads_avoid_triton() -> None:
    many, most = (torch.empty(rows, 1, 1, 8, device="meta") for rows in (1 << 16, (1 << 16) - 1))
    with pytest.raises(Unavailable, match="65535 heads"):
        op.attention(many, many, many, impl="triton")
    assert op.attention(most, most, most, impl="triton").shape == most.shape
    assert op.explain(many, many, many, softcap=1.0).chosen == "reference"
    assert op.explain(most, most, most, softcap=1.0).chosen == "triton"
    assert (op.fuses_parts(many, many), op.fuses_parts(most, most)) == (False, True)
