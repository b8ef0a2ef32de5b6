"""AdamW however its numbers are kept, norm and clipping, Newton-Schulz, and the optimizer for
megatron-core.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mtrain_kernels.optimizer import op, reference, rounding
from mtrain_kernels.optimizer.fused_adam import FusedAdam
from mtrain_kernels.optimizer.reference import Hyper, Lists
from mtrain_kernels.parity import caught
from torch import Tensor

MODULE = "mtrain_kernels.optimizer.triton"
SIZES = (1, 300, 0, 2512)  # the last one is read 16 bytes at a time, the others are not
HYPER = Hyper(1e-2, 0.9, 0.99, 1e-8, 0.1, 1 - 0.9**3, 1 - 0.99**3, True, False, 7, 3)
KINDS = {
    "fp32": (torch.float32, torch.float32, None, torch.float32),
    "master": (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    "remainder": (torch.bfloat16, torch.bfloat16, torch.int16, torch.bfloat16),
    "eight bits": (torch.bfloat16, torch.float32, torch.int16, torch.uint8),
    "bf16": (torch.bfloat16, torch.bfloat16, None, torch.bfloat16),
    "fp16": (torch.float16, torch.float16, torch.float32, torch.float32),
}


def make(kind: str, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Lists:
    generator = torch.Generator().manual_seed(seed)
    p_dtype, g_dtype, master_dtype, moment_dtype = KINDS[kind]

    def random(scale: float) -> list[Tensor]:
        return [torch.randn(n, generator=generator) * scale for n in sizes]

    values = random(0.1)
    grads = [g.to(g_dtype) for g in random(1e-2)]
    moments = [random(1e-2), [v.square() for v in random(1e-2)]]
    kept = []
    scales = []
    for second, xs in enumerate(moments):
        stored = [rounding.store_moment(x, moment_dtype, bool(second)) for x in xs]
        kept.append([s[0].contiguous() for s in stored])
        scales.append([s[1] for s in stored] if moment_dtype == torch.uint8 else [])
    if master_dtype == torch.int16:
        halves = [rounding.split_master(v) for v in values]
        params = [h[0].clone() for h in halves]
        masters = [h[1] for h in halves]
    else:
        params = [v.to(p_dtype) for v in values]
        masters = values if master_dtype else []
    return Lists(params, grads, *kept, masters, *scales)


def step(lists: Lists, hyper: Hyper, impl: str, **options: Any) -> Lists:
    lists = copy.deepcopy(lists)
    op.adamw_(lists, hyper, impl=impl, **options)
    return lists


def assert_same(found: Lists, wanted: Lists) -> None:
    """Assert equality to the last bits of fp32; states in fewer bits are equal unless that tips a
    rounding.
    """
    if found.masters and found.masters[0].dtype == torch.int16:
        found, wanted = (
            lists._replace(
                masters=[
                    rounding.join_master(*x) for x in zip(lists.params, lists.masters, strict=True)
                ]
            )
            for lists in (found, wanted)
        )
    for name, a, b in zip(Lists._fields, found, wanted, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype
            if x.dtype == torch.float32:
                atol = 3e-8 if name in ("params", "masters") else 1e-9
                torch.testing.assert_close(
                    x, y, rtol=2e-6, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
                )
            elif x.numel():
                bits = (
                    t.view(torch.int16 if t.element_size() == 2 else torch.uint8).int()
                    for t in (x, y)
                )
                apart = torch.sub(*bits).abs()
                assert apart.max() <= 1, f"{name}: {apart.max()} steps apart"
                assert (apart > 0).float().mean() < 0.02, (
                    f"{name}: {(apart > 0).float().mean()} differ"
                )


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"grad_scale": torch.tensor(0.3)}], ids=["", "scaled"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_kernel_equals_definition(kind, decoupled, options):
    lists = make(kind)
    hyper = HYPER._replace(decoupled=decoupled)
    assert_same(step(lists, hyper, "triton", **options), step(lists, hyper, "reference", **options))


@pytest.mark.parametrize("kind", ["remainder", "eight bits"])
def test_optimizer_many_chunks_are_whole(kind, monkeypatch):
    from mtrain_kernels.optimizer import triton

    monkeypatch.setattr(triton, "CHUNK", triton.BLOCK)
    lists = make(kind, (5000, 2 * triton.BLOCK))
    hyper = HYPER._replace(stochastic=True)
    assert_same(step(lists, hyper, "triton"), step(lists, hyper, "reference"))
    torch.testing.assert_close(
        op.grad_norm(lists.grads, impl="triton"), reference.grad_norm(lists.grads)
    )


def test_optimizer_nan_stays_in_its_element():
    for kind in ("fp32", "remainder", "eight bits"):
        lists = make(kind, (300,))
        lists.grads[0][7] = torch.nan
        for impl in ("triton", "reference"):
            found = step(lists, HYPER, impl).params[0]
            assert found.isnan().nonzero().tolist() == [[7]], (kind, impl)


def test_optimizer_huge_second_moment_keeps_weight_finite():
    lists = make("fp32", (300,))
    lists.grads[0][7] = 1e25
    found, wanted = (step(lists, HYPER, impl) for impl in ("triton", "reference"))
    assert found.exp_avg_sqs[0][7] == torch.inf
    torch.testing.assert_close(found.params[0], wanted.params[0])


def test_optimizer_stochastic_rounding_is_equal_and_unbiased():
    lists = make("bf16", (2500,))
    hyper = HYPER._replace(stochastic=True)
    found = step(lists, hyper, "triton", streams=[5])
    wanted = step(lists, hyper, "reference", streams=[5])
    assert_same(found, wanted)
    exact = lists._replace(params=[p.float() for p in lists.params])
    mean = torch.stack(
        [step(lists, hyper._replace(seed=s), "reference").params[0].float() for s in range(64)]
    ).mean(0)
    error = (mean - step(exact, HYPER, "reference").params[0]).abs() / mean.abs()
    assert error.mean() < 2**-9 / 4


def test_optimizer_random_numbers_depend_on_place():
    whole = step(
        make("bf16", (2500,)), HYPER._replace(stochastic=True), "triton", streams=[2]
    ).params[0]
    lists = make("bf16", (2500,))
    beside = make("bf16", (77,), seed=1)
    both = Lists(*(b + a for a, b in zip(lists, beside, strict=True)))
    moved = step(both, HYPER._replace(stochastic=True), "triton", streams=[0, 2]).params[1]
    assert torch.equal(whole, moved)


def test_optimizer_philox_equals_publication():
    words = rounding.philox(0, torch.tensor([0]), 0, 0)
    assert [int(w) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = (1 << 64) - 1
    words = rounding.philox(ones, torch.tensor([-1]), 0xFFFFFFFF, 0xFFFFFFFF)
    assert [int(w) for w in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_optimizer_split_master_is_restored_bitwise():
    edges = [
        0x00000000,
        0x80000000,
        0x3F808000,
        0x3F818000,
        0x3F807FFF,
        0x7F7FFFFF,
        0x7F800000,
        0xFF800000,
        0x00008000,
    ]
    bits = torch.cat([torch.tensor(edges), torch.randint(0, 1 << 32, (10000,))])
    master = rounding._as_int32(bits).view(torch.float32)
    master = master[~master.isnan()]
    weight, remainder = rounding.split_master(master)
    assert torch.equal(
        rounding.join_master(weight, remainder).view(torch.int32), master.view(torch.int32)
    )
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~tie], master.bfloat16()[~tie])
    assert rounding.split_master(torch.tensor([torch.nan]))[0].isnan().all()


def test_optimizer_eight_bit_moment_stays_positive():
    v = torch.tensor([1.0, 1e-30, 0.0])
    stored, scale = rounding.store_moment(v, torch.uint8, True)
    assert ((rounding.load_moment(stored, scale, True) > 0) == (v > 0)).all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_optimizer_norm_and_clipping_equal_torch(impl):
    for dtype in (torch.float32, torch.bfloat16):
        grads = [
            torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
            for n in (3, 0, 5000)
        ]
        params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        wanted = torch.nn.utils.clip_grad_norm_(params, 2.0)
        found = op.clip_grad_norm_(grads, 2.0, impl=impl)
        torch.testing.assert_close(
            found, wanted.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
        )
        for p, g in zip(params, grads, strict=True):
            torch.testing.assert_close(g, p.grad)
    assert op.grad_norm([]) == 0
    assert op.grad_norm([torch.tensor([1.0, torch.nan])], impl=impl).isnan()


@pytest.mark.full
@pytest.mark.sampled(9)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_optimizer_passes_opcheck(impl):
    lists = make("eight bits", (3, 200))
    args = (*map(list, lists), [0, 1], torch.tensor(0.5), None, *HYPER, impl)
    torch.library.opcheck(op._adamw.op, args)
    torch.library.opcheck(op._grad_norm.op, (lists.grads, impl))
    torch.library.opcheck(op._scale.op, (lists.grads, torch.tensor(0.5), impl))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("inside = at < size", "inside = at < size - 1", "fp32"),
        ("w *= kept", "pass", "fp32"),
        ("rest2 * (g * g)", "rest2 * g", "fp32"),
        ("+ eps", "* eps", "fp32"),
        ("(upper << 16) +", "(upper << 16) -", "remainder"),
        ("+ 0x8000) >> 16", ") >> 16", "remainder"),
        ("tl.maximum(code, 1)", "code + 1", "eight bits"),
        ("x = tl.sqrt_rn(x)", "x = x", "eight bits"),
        (
            'if MASTER == "fp32":\n            tl.store',
            'if MASTER == "none":\n            tl.store',
            "master",
        ),
        ("array(table_ptr, tensor, 3, 9", "array(table_ptr, tensor, 2, 9", "fp32"),
        ("squares += g * g", "squares += g", "norm"),
        ("g * tl.load(factor_ptr)", "g", "norm"),
        ("word >> 16), (BLOCK", "word & 0xFFFF), (BLOCK", "stochastic"),
    ],
)
def test_optimizer_seeded_bug_is_found(old, new, kind):
    with caught(MODULE, old, new):
        if kind == "norm":
            test_optimizer_norm_and_clipping_equal_torch("triton")
        elif kind == "stochastic":
            test_optimizer_stochastic_rounding_is_equal_and_unbiased()
        else:
            test_optimizer_kernel_equals_definition(kind, True, {})


def test_optimizer_unfit_is_refused():
    lists = make("fp32", (4,))
    with pytest.raises(ValueError, match="0 grads for 1 params"):
        op.adamw_(lists._replace(grads=[]), HYPER)
    with pytest.raises(ValueError, match=r"grads: \(4,\) \(2,\)"):
        op.adamw_(lists._replace(grads=[torch.zeros(8)[::2]]), HYPER)
    with pytest.raises(ValueError, match="2 streams for 1 params"):
        op.adamw_(lists, HYPER, streams=[0, 1])
    with pytest.raises(ValueError, match="belong to bf16"):
        op.adamw_(lists._replace(masters=[torch.zeros(4, dtype=torch.int16)]), HYPER)
    with pytest.raises(ValueError, match="step"):
        op.adamw_(lists, HYPER._replace(step=0))
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdam([torch.nn.Parameter(torch.zeros(1))], amsgrad=True)


def model(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(11)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype))
        for s in ((7, 5), (300,), (1,))
    ]


def train(
    optimizer: Any, params: list[torch.nn.Parameter], steps: range, attribute: str = "grad"
) -> None:
    for i in steps:
        for j, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * i + j)
            g = torch.randn(p.shape, generator=generator) * 0.1
            setattr(p, attribute, g.to(p.dtype) if attribute == "grad" else g)
        optimizer.step()


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("adamw", [True, False])
def test_optimizer_fused_adam_equals_torch(adamw, impl):
    ours = model()
    theirs = model()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    train(FusedAdam(ours, adam_w_mode=adamw, impl=impl, **settings), ours, range(8))
    train((torch.optim.AdamW if adamw else torch.optim.Adam)(theirs, **settings), theirs, range(8))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


PRECISE = {"master_weights": True, "use_decoupled_grad": True}
STORED = {
    "fp32": {},
    "masters": PRECISE,
    "remainders": {**PRECISE, "store_param_remainders": True, "exp_avg_dtype": torch.bfloat16},
    "eight bits": {
        **PRECISE,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.uint8,
    },
    "stochastic": {
        "stochastic_rounding": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", STORED.values(), ids=STORED)
def test_optimizer_resume_is_bitwise(options):
    dtype = torch.float32 if not options else torch.bfloat16
    attribute = "decoupled_grad" if options.get("use_decoupled_grad") else "grad"
    straight = model(dtype)
    resumed = model(dtype)
    optimizer = FusedAdam(straight, lr=1e-2, **options)
    train(optimizer, straight, range(3), attribute)
    saved = copy.deepcopy(optimizer.state_dict())
    assert [g["step"] for g in saved["param_groups"]] == [3]
    assert all("step" not in s for s in saved["state"].values())
    with torch.no_grad():
        for p, q in zip(resumed, straight, strict=True):
            p.copy_(q)
    second = FusedAdam(resumed, lr=1e-2, **options)
    second.load_state_dict(saved)
    train(optimizer, straight, range(3, 6), attribute)
    train(second, resumed, range(3, 6), attribute)
    assert second.param_groups[0]["step"] == 6
    for p, q in zip(resumed, straight, strict=True):
        assert torch.equal(p, q)
    for a, b in zip(
        second.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_optimizer_split_masters_train_equally():
    whole = model(torch.bfloat16)
    halves = model(torch.bfloat16)
    a = FusedAdam(whole, lr=1e-4, **PRECISE)
    b = FusedAdam(halves, lr=1e-4, **PRECISE, store_param_remainders=True)
    train(a, whole, range(5), "decoupled_grad")
    train(b, halves, range(5), "decoupled_grad")
    for p, q in zip(whole, halves, strict=True):
        assert b.state[q]["master_param"].dtype == torch.int16
        assert torch.equal(
            a.get_unscaled_state(p, "master_param"), b.get_unscaled_state(q, "master_param")
        )


@pytest.mark.sampled
@pytest.mark.parametrize("options", STORED.values(), ids=STORED)
def test_optimizer_states_pass_through_fp32(options):
    """Do as a sharded checkpoint does: save every state by name in fp32, and load it into an
    optimizer that has none yet.
    """
    dtype = torch.float32 if not options else torch.bfloat16
    attribute = "decoupled_grad" if options.get("use_decoupled_grad") else "grad"
    params = model(dtype)
    others = model(dtype)
    first = FusedAdam(params, lr=1e-2, **options)
    second = FusedAdam(others, lr=1e-2, **options)
    train(first, params, range(3), attribute)
    for p, q in zip(params, others, strict=True):
        second.initialize_state(q)
        second.set_scaled_state(q, "padding", False)
        names = ["exp_avg", "exp_avg_sq"] + ["master_param"] * bool(options.get("master_weights"))
        assert list(first.state[p]) == names
        for name in first.state[p]:
            value = first.get_unscaled_state(p, name)
            assert value.dtype == torch.float32
            second.set_scaled_state(q, name, value)
            assert torch.equal(second.get_unscaled_state(q, name), value), name
        if options.get("store_param_remainders"):
            assert torch.equal(p, q), "the parameter is the upper half of the master"


def test_optimizer_torch_adamw_state_is_understood():
    theirs = model()
    ours = model()
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1)
    train(optimizer, theirs, range(4))
    saved = copy.deepcopy(optimizer.state_dict())
    shared = torch.tensor(4.0)
    for state in saved["state"].values():
        state["step"] = shared  # one tensor for all: whoever counts in it counts too fast
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    second = FusedAdam(ours, lr=1e-2, weight_decay=0.1)
    second.load_state_dict(saved)
    train(optimizer, theirs, range(4, 8))
    train(second, ours, range(4, 8))
    assert second.param_groups[0]["step"] == 8
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_optimizer_parameter_without_gradient_has_state():
    params = model()
    optimizer = FusedAdam([{"params": params}, {"params": []}], lr=1e-2, weight_decay=0.1)
    before = [p.detach().clone() for p in params]
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert [len(optimizer.state[p]) for p in params] == [2, 2, 2]
    assert [torch.equal(p, q) for p, q in zip(params, before, strict=True)] == [True, False, True]
    assert [type(g["step"]) for g in optimizer.param_groups] == [int, int]
