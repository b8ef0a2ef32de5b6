"""The router against loops over tokens, and its kernels against the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from mtrain_kernels import parity
from mtrain_kernels.moe_router import op, reference
from mtrain_kernels.registry import Unavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = "mtrain_kernels.moe_router.triton"
GROUPED = {"groups": 4, "group_topk": 2, "score": "sigmoid"}
WAYS: dict[str, dict[str, Any]] = {
    "softmax": {"topk": 3},
    "one expert": {"topk": 1},
    "all experts": {"topk": 20, "scale": 0.5},
    "softmax before": {"topk": 4, "pre_softmax": True, "scale": 2.0},
    "softmax before, normalised": {"topk": 4, "pre_softmax": True, "normalize": True},
    "sigmoid": {"topk": 4, "score": "sigmoid", "scale": 2.5},
    "sigmoid as it is": {"topk": 2, "score": "sigmoid", "normalize": False},
    "sigmoid of one": {"topk": 1, "score": "sigmoid"},
    "bias": {"topk": 4, "score": "sigmoid", "expert_bias": True},
    "bias before a softmax": {"topk": 4, "expert_bias": True},
    "groups": {"topk": 5, **GROUPED},
    "groups with a bias": {"topk": 5, "scale": 2.5, "expert_bias": True, **GROUPED},
    "groups by their best expert": {"topk": 3, **GROUPED, "group_members": 1},
    "groups of a softmax": {
        "topk": 6,
        "pre_softmax": True,
        "groups": 5,
        "group_topk": 3,
        "group_members": 3,
    },
    "groups of one expert": {"topk": 3, "groups": 20, "group_topk": 3, "group_members": 1},
}


def inputs(
    tokens: int, experts: int, way: str, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "logits": torch.randn(tokens, experts, device=DEVICE).to(dtype).requires_grad_()
    }
    found |= WAYS[way]
    if "expert_bias" in found:
        found["expert_bias"] = torch.linspace(0.1, -0.1, experts, device=DEVICE)
    return found


def compare(found: dict[str, Any], **options: Any) -> None:
    parity.check(partial(op.moe_router, impl="triton"), reference.moe_router, found, **options)


def by_hand(found: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """Follow the sentence, one token after another, by sorting pairs of value and index in fp64."""
    k = found["topk"]
    score = found.get("score", "softmax")
    bias = found.get("expert_bias")
    groups = found.get("groups", 1)
    members = found.get("group_members", 2)
    chosen = []
    weights = []
    for row in found["logits"].detach().double():
        if score == "sigmoid":
            values = row.sigmoid()
        else:
            if found.get("pre_softmax"):
                values = row.softmax(0)
            else:
                values = row
        keys = (values if bias is None else values + bias.double()).tolist()
        size = len(keys) // groups
        worth = [sum(sorted(keys[g * size : (g + 1) * size])[-members:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-worth[g], g))[: found.get("group_topk", 1)]
        open_ = [e for e in range(len(keys)) if e // size in best]
        picked = sorted(open_, key=lambda e: (-keys[e], e))[:k]
        weight = values[picked]
        if score == "softmax" and not found.get("pre_softmax"):
            weight = weight.softmax(0)
        normalize = found.get("normalize", score == "sigmoid" and k > 1)
        weights.append((weight / weight.sum() if normalize else weight) * found.get("scale", 1.0))
        chosen.append(picked)
    return chosen, [w.tolist() for w in weights]


@pytest.mark.parametrize("way", WAYS)
def test_moe_router_definition_equals_token_loop(way: str) -> None:
    found = inputs(13, 20, way)
    weights, indices, counts = reference.moe_router(**found)
    chosen, wanted = by_hand(found)
    assert indices.tolist() == chosen
    torch.testing.assert_close(
        weights.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-6
    )
    assert counts.tolist() == [sum(e in row for row in chosen) for e in range(20)]


@pytest.mark.parametrize(
    "way", ["softmax", "softmax before, normalised", "sigmoid", "groups with a bias"]
)
def test_moe_router_definition_gradient_equals_differences(way: str) -> None:
    found = inputs(3, 20, way)
    logits = found.pop("logits").detach().double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: reference.moe_router(x, **found)[0], (logits,), atol=1e-6
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
def test_moe_router_equals_definition_with_gradients(way: str) -> None:
    compare(inputs(201, 20, way))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["softmax", "softmax before", "bias", "groups"])
def test_moe_router_half_logits_score_in_fp32(way: str, dtype: torch.dtype) -> None:
    # Compared with the definition at the same precision: equals, which half logits have, must not
    # be distinguished.
    compare(inputs(33, 20, way, dtype), upcast=False)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("shape", [(1, 1), (0, 8), (1, 8), (2, 2000), (65, 64)])
def test_moe_router_any_size(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for score in reference.SCORES:
        logits = torch.randn(shape, device=DEVICE, requires_grad=True)
        compare({"logits": logits, "topk": min(3, shape[1]), "score": score})


def test_moe_router_strides_do_not_matter() -> None:
    found = inputs(9, 20, "sigmoid")
    for _, logits in parity.layouts(found["logits"]):
        compare(found | {"logits": logits})
    of_both = (op.moe_router(found["logits"], 3, impl=impl)[1] for impl in ("reference", "triton"))
    assert all(indices.is_contiguous() for indices in of_both), "not parts of all experts' places"


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_moe_router_ties_go_to_lower_index(impl: str) -> None:
    same = torch.zeros(4, 12, device=DEVICE)
    same[1, ::2] = -0.0
    same[2, 5] = 1.0
    same[3] = float("-inf")
    _, indices, counts = op.moe_router(same, 3, score="sigmoid", impl=impl)
    assert indices.tolist() == [[0, 1, 2], [0, 1, 2], [5, 0, 1], [0, 1, 2]]
    assert counts.tolist() == [4, 4, 3, 0, 0, 1, *[0] * 6]
    _, indices, _ = op.moe_router(same[:3], 4, score="sigmoid", groups=4, group_topk=2, impl=impl)
    assert indices.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [5, 0, 1, 2]]


@pytest.mark.parametrize(
    "way", ["softmax", "softmax before", "sigmoid", "groups", "groups with a bias"]
)
def test_moe_router_nan_is_chosen_first_and_shows(way: str) -> None:
    found = inputs(8, 20, way)
    with torch.no_grad():
        found["logits"][1, 7] = float("nan")
        found["logits"][2, 9] = float("inf")
        found["logits"][3, 4] = float("-inf")
        found["logits"][4] = float("-inf")
        found["logits"][5, [3, 11]] = float("nan")
        found["logits"][6] = float("nan")
    weights, indices, _ = op.moe_router(**found, impl="triton")
    compare(found, upcast=False)
    if way != "softmax before":  # where a single one turns every score into NaN
        assert indices[1, 0] == 7
        assert weights[1].isnan().any()


def test_moe_router_bias_gets_no_gradient() -> None:
    found = inputs(5, 20, "bias")
    bias = torch.zeros(20, device=DEVICE, requires_grad=True)
    for impl in ("reference", "triton"):
        plain = op.moe_router(**found | {"expert_bias": None}, impl=impl)[0]
        weights = op.moe_router(**found | {"expert_bias": bias}, impl=impl)[0]
        torch.testing.assert_close(weights, plain)
        assert torch.autograd.grad(weights.sum(), bias, allow_unused=True) == (None,)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask=live, other=0.0).to", "mask=live & (expert < 19), other=0.0).to"),
        ("live = inside & (row[:, None] < tokens)", "live = inside & (row[:, None] < tokens - 1)"),
        (
            "+ tl.load(bias_ptr + expert, mask=inside, other=0.0)",
            "+ 0 * tl.load(bias_ptr + expert, mask=inside)",
        ),
        ("static_range(MEMBERS)", "static_range(1)"),
        ("static_range(GROUP_TOPK)", "static_range(GROUPS)"),
        ("weight * scale, weights", "weight, weights"),
        ("total = tl.sum(weight, 1) + TINY", "total = tl.sum(score, 1) + TINY"),
        ("d[:, None] * scale", "d[:, None]"),
        ("d * score * (1 - score)", "d * score"),
        ("(d - inner[:, None]) / total", "d / total"),
        ("tl.atomic_add(counts_ptr", "tl.store(counts_ptr"),
        ("ceil_div(tokens, t)", "tokens // t"),
    ],
)
def test_moe_router_seeded_bug_is_found(old: str, new: str) -> None:
    with parity.caught(KERNELS, old, new):
        compare(inputs(77, 20, "groups with a bias"))


@pytest.mark.full
def test_moe_router_passes_torch_registration() -> None:
    found = inputs(5, 20, "groups with a bias")
    arguments = (
        found["logits"],
        found["expert_bias"],
        3,
        "sigmoid",
        True,
        2.0,
        found["groups"],
        found["group_topk"],
        2,
    )
    torch.library.opcheck(op._router.op, arguments)


def test_moe_router_unfit_is_refused() -> None:
    logits = torch.zeros(3, 8)
    for arguments, said in (
        ({"topk": 9}, "topk 9"),
        ({"topk": 0}, "topk 0"),
        ({"topk": 2, "score": "tanh"}, "none of softmax, sigmoid"),
        ({"topk": 2, "groups": 3}, "equal groups"),
        ({"topk": 2, "groups": 4, "group_topk": 5}, "group_topk"),
        ({"topk": 5, "groups": 4, "group_topk": 2}, "must be 1 to 4"),
        ({"topk": 2, "groups": 8, "group_topk": 2}, "group_members"),
        ({"topk": 2, "expert_bias": torch.zeros(7)}, "expert_bias"),
    ):
        with pytest.raises(ValueError, match=said):
            op.moe_router(logits, **arguments)
    with pytest.raises(ValueError, match="floating"):
        op.moe_router(logits.int(), 2)
    with pytest.raises(Unavailable, match="float64"):
        op.moe_router(logits.double(), 2, impl="triton")
    assert op.moe_router(logits.double(), 2)[0].dtype == torch.float64
