"""Results of every op in half precision: the exact numbers, rounded at the end, however many rows
there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from mtrain_kernels import registry
from mtrain_kernels.activation import op as activation
from mtrain_kernels.activation import reference as activation_reference
from mtrain_kernels.attention import cpu
from mtrain_kernels.attention import op as attention
from mtrain_kernels.attention import reference as attention_reference
from mtrain_kernels.causal_conv1d import op as conv
from mtrain_kernels.causal_conv1d import reference as conv_reference
from mtrain_kernels.cross_entropy import op as cross_entropy
from mtrain_kernels.cross_entropy import reference as cross_entropy_reference
from mtrain_kernels.cross_entropy.reference import Terms
from mtrain_kernels.gated_delta_rule import op as delta
from mtrain_kernels.gated_delta_rule import reference as delta_reference
from mtrain_kernels.grouped_gemm import op as grouped_gemm
from mtrain_kernels.grouped_gemm import reference as grouped_gemm_reference
from mtrain_kernels.linear_cross_entropy import op as linear_cross_entropy
from mtrain_kernels.linear_cross_entropy import reference as linear_cross_entropy_reference
from mtrain_kernels.moe_permute import op as permute
from mtrain_kernels.moe_permute import reference as permute_reference
from mtrain_kernels.moe_router import op as router
from mtrain_kernels.moe_router import reference as router_reference
from mtrain_kernels.norm import op as norm
from mtrain_kernels.norm import reference as norm_reference
from mtrain_kernels.parity import check_format
from mtrain_kernels.rope import op as rope
from mtrain_kernels.rope import reference as rope_reference
from mtrain_kernels.ssd import op as ssd
from mtrain_kernels.ssd import reference as ssd_reference
from torch import Tensor

ROWS = 1536
HALF = [torch.bfloat16, torch.float16]
ELSEWHERE = {
    "fp8_linear": "its operands are rounded to eight bits: test_fp8_linear",
    "fp8_gradient": "its operands are rounded to eight bits: test_fp8_linear",
    "fp8_grouped": "its operands are rounded to eight bits: test_fp8_grouped",
    "newton_schulz": "it has no gradients: test_newton_schulz",
    "optimizer": "it updates fp32 masters, or rounds as its definition says: test_optimizer",
    "quantize": "rounding is what it defines: test_quantize",
}
"""Ops that have no definition in half precision."""


class Case(NamedTuple):
    """A call of an op, its definition, and the shapes of its inputs, which are drawn around 0.1."""

    call: Callable[..., Any]
    definition: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    roundings: int = 1
    scale: dict[str, float] = {}
    impls: tuple[str, ...] = ("reference", "triton")


def _of(
    op: Any, reference: Any, name: str, shapes: dict[str, tuple[int, ...]], **more: Any
) -> Case:
    """Return a case of a function that op and reference have under one name; `options` go to
    both.
    """
    options = more.pop("options", {})
    fixed = more.pop("fixed", {})

    def call(impl: str, **kw: Any) -> Any:
        return getattr(op, name)(**kw, **fixed, **options, impl=impl)

    return Case(
        call, lambda **kw: getattr(reference, name)(**kw, **fixed, **options), shapes, **more
    )


torch.manual_seed(7)
ANGLES = torch.rand(ROWS, 4)
COPIES = torch.rand(ROWS, 8).topk(6).indices
PLAN = permute_reference.plan(COPIES, 8)
COUNTS = torch.tensor([1200, 0, 336])
LABELS = torch.randint(0, 40, (ROWS,))
X = (ROWS, 32)
W = (32,)
SMALL = {"weight": 0.01}
ZERO = {"eps": 1e-5, "zero_centered": True}
EPS = {"eps": 1e-5}
HEADS = {"q": (1, 2, ROWS, 8), "k": (1, 1, ROWS, 8), "v": (1, 1, ROWS, 8)}
TABLES = {"cos": ANGLES.cos(), "sin": ANGLES.sin()}
SCAN = {
    "x": (1, ROWS, 2, 4),
    "dt": (1, ROWS, 2),
    "b": (1, ROWS, 1, 4),
    "c": (1, ROWS, 1, 4),
    "d": (2,),
}


def _linear_loss(impl: str, **kw: Tensor) -> Tensor:
    share = torch.full((ROWS,), 1 / ROWS)
    return linear_cross_entropy.linear_cross_entropy(
        **kw, labels=LABELS, token_weights=share, impl=impl
    )[0]


def _linear_loss_defined(**kw: Tensor) -> Tensor:
    share = torch.full((ROWS,), 1 / ROWS, dtype=torch.float64)
    return linear_cross_entropy_reference.linear_cross_entropy(
        **kw, labels=LABELS, token_weights=share, terms=Terms(40)
    )[0]


CASES: dict[str, Case] = {
    "norm: rms_norm": _of(norm, norm_reference, "rms_norm", {"x": X, "weight": W}, options=EPS),
    "norm: rms_norm, zero-centered": _of(
        norm, norm_reference, "rms_norm", {"x": X, "weight": W}, options=ZERO, scale=SMALL
    ),
    "norm: layer_norm": _of(
        norm, norm_reference, "layer_norm", {"x": X, "weight": W, "bias": W}, options=EPS
    ),
    "norm: layer_norm, zero-centered": _of(
        norm,
        norm_reference,
        "layer_norm",
        {"x": X, "weight": W, "bias": W},
        options=ZERO,
        scale=SMALL,
    ),
    # the residual is rounded before it is normalised, and two gradients meet in it
    "norm: rms_norm_residual": _of(
        norm,
        norm_reference,
        "rms_norm_residual",
        {"x": X, "residual": X, "weight": W},
        options=EPS,
        roundings=3,
    ),
    "norm: layer_norm_residual": _of(
        norm,
        norm_reference,
        "layer_norm_residual",
        {"x": X, "residual": X, "weight": W, "bias": W},
        options=EPS,
        roundings=3,
    ),
    **{
        f"activation: {kind}": _of(
            activation,
            activation_reference,
            "activation",
            {"x": X, "weight": X[:1]},
            options={"kind": kind},
            impls=("reference", "triton") if kind in ("swiglu", "geglu") else ("reference",),
        )
        for kind in activation_reference.KINDS
    },
    "rope": _of(rope, rope_reference, "rotate", {"x": (ROWS, 2, 12)}, fixed=TABLES),
    "rope: normalised heads": _of(
        rope,
        rope_reference,
        "rotate",
        {"x": (ROWS, 2, 12), "weight": (12,)},
        fixed=TABLES,
        options=EPS,
    ),
    "rope: normalised heads, zero-centered": _of(
        rope,
        rope_reference,
        "rotate",
        {"x": (ROWS, 2, 12), "weight": (12,)},
        fixed=TABLES,
        options=ZERO,
        scale=SMALL,
    ),
    "moe_permute": _of(
        permute, permute_reference, "permute", {"x": (ROWS, 8)}, options={"plan": PLAN}
    ),
    "moe_permute: back": _of(
        permute,
        permute_reference,
        "unpermute",
        {"rows": (len(PLAN.source), 8), "weights": (ROWS, 6)},
        options={"plan": PLAN},
    ),
    **{
        f"moe_router: {name}": Case(
            lambda impl, logits, kw=kw: router.moe_router(logits, 2, impl=impl, **kw)[0],
            lambda logits, kw=kw: router_reference.moe_router(logits, 2, **kw)[0],
            {"logits": (ROWS, 8)},
        )
        for name, kw in {
            "softmax": {},
            "softmax before": {"pre_softmax": True},
            "sigmoid": {"score": "sigmoid"},
        }.items()
    },
    "grouped_gemm": _of(
        grouped_gemm,
        grouped_gemm_reference,
        "grouped_gemm",
        {"x": X, "weight": (3, 16, 32)},
        options={"counts": COUNTS},
        impls=("reference", "triton", "torch"),
    ),
    # the product is rounded before the bias is added, but for the reference's
    "grouped_gemm: with biases": _of(
        grouped_gemm,
        grouped_gemm_reference,
        "grouped_gemm",
        {"x": X, "weight": (3, 16, 32), "bias": (3, 16)},
        options={"counts": COUNTS},
        roundings=2,
        impls=("reference", "triton", "torch"),
    ),
    "causal_conv1d": _of(
        conv, conv_reference, "causal_conv1d", {"x": (2, 4, ROWS), "weight": (4, 4), "bias": (4,)}
    ),
    "gated_delta_rule": _of(
        delta,
        delta_reference,
        "gated_delta_rule",
        {"q": (1, ROWS, 2, 4), "k": (1, ROWS, 2, 4), "v": (1, ROWS, 2, 4), "beta": (1, ROWS, 2)},
        fixed={"g": -torch.linspace(0.5, 2.0, 2 * ROWS).view(1, ROWS, 2)},
        scale={"beta": 0.3},
        options={"l2norm": True},
        impls=("reference",),
    ),
    "ssd": _of(
        ssd,
        ssd_reference,
        "ssd",
        SCAN,
        fixed={"a": torch.tensor([-0.5, -1.0])},
        options={"dt_softplus": True},
        impls=("reference",),
    ),
    "attention: with a sink": _of(
        attention, attention_reference, "attention", {**HEADS, "sink": (2,)}, impls=("reference",)
    ),
    "attention: with a cap": _of(
        attention,
        attention_reference,
        "attention",
        HEADS,
        options={"softcap": 5.0},
        impls=("reference",),
    ),
    # fused kernels round probabilities, and the first queries, which see few keys, show it most
    "attention": _of(
        attention,
        attention_reference,
        "attention",
        HEADS,
        options={"causal": True},
        roundings=16,
        impls=("reference",),
    ),
    "attention: short": Case(
        lambda impl, **kw: cpu.attention(**kw),
        lambda **kw: attention_reference.attention(**kw, causal=True),
        HEADS,
        roundings=16,
        impls=("reference",),
    ),
    "cross_entropy": Case(
        lambda impl, logits: cross_entropy.cross_entropy(logits, LABELS[:96], impl=impl),
        lambda logits: cross_entropy_reference.cross_entropy(logits, LABELS[:96], Terms(40)),
        {"logits": (96, 40)},  # nothing is added up over rows
    ),
    # logits and their gradient are rounded, and so is the sum over chunks; the loss itself is fp32
    "linear_cross_entropy": Case(
        _linear_loss,
        _linear_loss_defined,
        {"hidden": (ROWS, 16), "weight": (40, 16)},
        roundings=4,
        scale={"hidden": 0.3, "weight": 0.3},
        impls=("reference",),
    ),
}


def _inputs(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = {}
    for name, shape in case.shapes.items():
        x = torch.randn(shape, generator=generator) * case.scale.get(name, 1.0)
        drawn[name] = (x + 0.1 * case.scale.get(name, 1.0)).to(dtype).requires_grad_()
    return drawn


CALLS = [
    (name, impl, dtype)
    for name, case in CASES.items()
    for impl in case.impls
    for dtype in (
        HALF if impl == "reference" else HALF[:1]
    )  # kernels have one path for both; bf16 is the coarser
]


@pytest.mark.sampled(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "impl", "dtype"), CALLS, ids=str)
def test_formats_half_is_rounded_only_at_the_end(name: str, impl: str, dtype: torch.dtype) -> None:
    if impl == "triton":
        pytest.importorskip("triton")
    case = CASES[name]
    check_format(
        lambda **kw: case.call(impl, **kw),
        case.definition,
        _inputs(case, dtype),
        roundings=case.roundings,
    )


def test_formats_every_half_definition_is_covered() -> None:
    here = {name.partition(":")[0] for name in CASES}
    assert here | ELSEWHERE.keys() == registry.ops().keys()
    assert not here & ELSEWHERE.keys()
