"""Linear layer and cross entropy in one: values, gradients, memory, speed, tensor and sequence
parallelism.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mtrain_kernels.cross_entropy.reference import Terms, capped
from mtrain_kernels.linear_cross_entropy import chunks, op, reference
from mtrain_kernels.parity import caught, check
from torch import Tensor

from tests.support.forked import run_ranks

TERMS = {"plain": {}, "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}}


def inputs(
    tokens: int, width: int, vocab: int, dtype: torch.dtype, weighted: bool = True
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = (0.3 * torch.randn(vocab, width, generator=generator)).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[1::4] = -100
    given = {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_(), "labels": labels}
    if weighted:
        token_weights = torch.rand(tokens, generator=generator) * 1e-3
        token_weights[2::5] = 0
        given["token_weights"] = token_weights.requires_grad_()
    return given


def summed(impl: str, **options: Any) -> Any:
    return lambda **kw: op.linear_cross_entropy(**kw, impl=impl, **options)


def defined(
    hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, **terms: Any
) -> Any:
    classes = {name: terms.pop(name) for name in ("class_weights",) if name in terms}
    held = Terms(weight.shape[0], **terms)
    class_weights = classes.get("class_weights")
    total, losses = reference.linear_cross_entropy(
        hidden, weight, labels, token_weights, held, class_weights
    )
    lse = capped(hidden @ weight.T, held.soft_cap).logsumexp(1)
    return total, losses.detach(), (held.z_loss * lse.square()).where(labels != -100, 0).detach()


def defined_tokens(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    class_weights: Tensor | None = None,
    **terms: Any,
) -> Tensor:
    ones = hidden.new_ones(labels.shape)
    held = Terms(weight.shape[0], **terms)
    return reference.linear_cross_entropy(hidden, weight, labels, ones, held, class_weights)[1]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "chunk"), [(7, 3), (1, None), (0, None)])
def test_linear_cross_entropy_equals_definition_with_gradients(impl, terms, dtype, tokens, chunk):
    # logits in half precision are rounded before the loss, which the definition in fp64 does not do
    tolerance = None if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    given = inputs(tokens, 24, 45, dtype)
    check(
        summed(impl, chunk=chunk, **terms),
        lambda **kw: defined(**kw, **terms),
        given,
        tolerance=tolerance,
    )
    given.pop("token_weights")
    check(
        lambda **kw: op.token_cross_entropy(**kw, chunk=chunk, impl=impl, **terms),
        lambda **kw: defined_tokens(**kw, **terms),
        given,
        tolerance=tolerance,
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "rows"), [(37, 48), (5, 7)])
def test_linear_cross_entropy_rows_beyond_vocabulary_are_unused(impl, terms, dtype, vocab, rows):
    tolerance = None if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    given = inputs(6, 24, rows, dtype)
    given["labels"] = given["labels"].where(given["labels"] < vocab, 0)
    with torch.no_grad():
        given["weight"][vocab:] = torch.inf
    found = summed(impl, chunk=4, vocab_size=vocab, **terms)
    check(
        found,
        lambda weight, **kw: defined(weight=weight[:vocab], **kw, **terms),
        given,
        tolerance=tolerance,
    )
    given.pop("token_weights")
    check(
        lambda **kw: op.token_cross_entropy(**kw, chunk=4, impl=impl, vocab_size=vocab, **terms),
        lambda weight, **kw: defined_tokens(weight=weight[:vocab], **kw, **terms),
        given,
        tolerance=tolerance,
    )


def test_linear_cross_entropy_padding_equals_torch():
    given = inputs(64, 24, 384, torch.float32, weighted=False)
    given["labels"] %= 257
    share = torch.full((64,), 1 / 64)
    total, *_ = op.linear_cross_entropy(**given, token_weights=share, vocab_size=257)
    found = torch.autograd.grad(total, [given["hidden"], given["weight"]])
    wanted = torch.nn.functional.cross_entropy(
        given["hidden"] @ given["weight"][:257].T, given["labels"]
    )
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        found, torch.autograd.grad(wanted, [given["hidden"], given["weight"]])
    )
    assert bool((found[1][257:] == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_cross_entropy_hundreds_of_chunks_are_as_exact(dtype):
    given = inputs(1024, 16, 24, dtype)
    given["hidden"] = given["hidden"].detach() + 1  # parts are not small next to the sum
    given["token_weights"] = torch.ones(1024)

    def gradient(function: Any, weight: Tensor) -> Tensor:
        return torch.autograd.grad(function(**given | {"weight": weight})[0], weight)[0].double()

    exact = given["weight"].detach().double().requires_grad_()
    wanted = gradient(lambda hidden, **kw: defined(hidden=hidden.double(), **kw), exact)
    one, *several = (
        (gradient(summed("reference", chunk=n), given["weight"]) - wanted).norm()
        for n in (1024, 342, 256, 64, 4)
    )
    assert max(several) < 1.6 * one  # each part is rounded, and the sum


def test_linear_cross_entropy_fp64_reference():
    given = {
        k: v.detach().double() if v.is_floating_point() else v
        for k, v in inputs(5, 8, 13, torch.float32).items()
    }
    given = {k: v.requires_grad_(v.is_floating_point()) for k, v in given.items()}
    check(summed("reference", chunk=2), defined, given)


def test_linear_cross_entropy_plain_mask_keeps_other_gradients():
    given = inputs(6, 16, 33, torch.bfloat16)
    mask = torch.tensor([1.0, 1, 0, 1, 0, 1])
    total, *_ = op.linear_cross_entropy(
        given["hidden"], given["weight"], given["labels"], mask, chunk=6
    )
    total.backward()
    kept = mask.bool()
    short, *_ = op.linear_cross_entropy(
        given["hidden"].detach()[kept].requires_grad_(), given["weight"].detach().requires_grad_(),
        given["labels"][kept], mask[kept],
    )  # fmt: skip
    assert torch.equal(total, short)
    assert bool((given["hidden"].grad[~kept] == 0).all())


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_linear_cross_entropy_frozen_input_gets_no_gradient(frozen):
    given = inputs(5, 8, 13, torch.float32)
    given[frozen].requires_grad_(False)
    check(summed("reference"), defined, given)
    given.pop("token_weights")
    check(op.token_cross_entropy, defined_tokens, given)


@pytest.mark.parametrize("parts", [{"chunk": -1}, {"logits": -8}])
def test_linear_cross_entropy_negative_chunk_is_refused(parts):
    with pytest.raises(ValueError, match="must be positive"):
        op.linear_cross_entropy(**inputs(5, 8, 13, torch.float32), **parts)


def test_linear_cross_entropy_second_backward_is_refused():
    total, *_ = op.linear_cross_entropy(**inputs(5, 8, 13, torch.float32))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward"):
        total.backward()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_linear_cross_entropy_passes_opcheck(impl):
    given = inputs(4, 8, 40, torch.float32)
    settings = ("", False, *Terms(40, 0.1, 1e-3, 5.0), 3)
    for wide, classes in ((False, None), (True, torch.rand(40))):
        rest = (*settings, 0, wide, True, True, False, wide, impl)
        torch.library.opcheck(op._linear_cross_entropy.op, (*given.values(), classes, *rest))
    plain = (each.detach() for each in given.values())
    into = (torch.zeros(40, 8), *plain, None, *settings, 0, True, True, impl)
    torch.library.opcheck(op._linear_cross_entropy_into.op, into)
    given.pop("token_weights")
    torch.library.opcheck(op._token_cross_entropy.op, (*given.values(), None, *settings, impl))


def test_linear_cross_entropy_non_finite_shows():
    given = inputs(6, 8, 20, torch.float32)
    with torch.no_grad():
        given["hidden"][0, 0] = torch.nan
        given["hidden"][1] = torch.nan  # ignored
    total, losses, *_ = op.linear_cross_entropy(**given)
    total.backward()
    assert total.isnan()
    assert losses.isnan().tolist() == [True, *[False] * 5]
    assert bool((given["hidden"].grad[1] == 0).all())
    assert bool(given["hidden"].grad[2:].isfinite().all())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gradient.mul_(slope)", "pass"),
        (
            "product(dlogits, weight.T, plain=plain), factors[part]",
            "product(dlogits, weight.T, plain=plain), factors[:1]",
        ),
        ("hidden[part] * factors[part]", "hidden[part] * factors[0]"),
        ("range(0, len(labels), rows)", "range(0, len(labels) - 1, rows)"),
        ("here * factors", "factors"),
    ],
)
def test_linear_cross_entropy_seeded_bug_is_found(old, new):
    import mtrain_kernels.linear_cross_entropy.reference as module

    if old == "here * factors":  # only a part of the vocabulary has labels that are elsewhere
        given = inputs(6, 8, 20, torch.float32)
        weight = given["weight"].detach()

        def local(opened: Any) -> Tensor:
            with torch.no_grad():
                return opened(given["hidden"] @ weight[:10].T, given["labels"], 0, Terms(20))[1](
                    torch.ones(6), torch.ones(6)
                )

        wanted = local(module.ReferenceChunks())
        with caught(module.__name__, old, new):
            assert torch.equal(local(sys.modules[module.__name__].ReferenceChunks()), wanted)
        return
    with caught(module.__name__, old, new):
        variant = sys.modules[module.__name__]
        before = chunks.chunked, chunks.ReferenceChunks
        chunks.chunked = variant.chunked
        chunks.ReferenceChunks = variant.ReferenceChunks
        try:
            for terms in TERMS.values():
                given = inputs(7, 8, 20, torch.float32)
                check(
                    summed("reference", chunk=3, **terms),
                    lambda t=terms, **kw: defined(**kw, **t),
                    given,
                )
        finally:
            chunks.chunked, chunks.ReferenceChunks = before


def sharded(
    given: dict[str, Tensor], sequence_parallel: bool, terms: dict[str, Any], tokens: bool
) -> Any:
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks = dist.get_world_size()
    group = dist.group.WORLD
    weight = given["weight"].detach().chunk(ranks)[rank].clone().requires_grad_()
    hidden = given["hidden"].detach()
    hidden = (hidden.chunk(ranks)[rank] if sequence_parallel else hidden).clone().requires_grad_()
    options = {"group": group, "sequence_parallel": sequence_parallel, "chunk": 3, **terms}
    if tokens:
        losses = op.token_cross_entropy(hidden, weight, given["labels"], **options)
        total = (losses * given["token_weights"].detach()).sum()
    else:
        total, losses, z_losses, hits = op.linear_cross_entropy(
            hidden, weight, given["labels"], given["token_weights"].detach(), ranked=True, **options
        )
        losses = torch.stack([losses, z_losses, hits])
    total.backward()
    return total.detach(), losses.detach(), hidden.grad, weight.grad


@pytest.mark.sampled(9)
@pytest.mark.dist
@pytest.mark.parametrize("tokens", [False, True], ids=["sum", "tokens"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2sp"])
def test_linear_cross_entropy_two_parts_equal_whole(sequence_parallel, tokens):
    given = inputs(8, 24, 46, torch.float32)
    terms = TERMS["all"] | {
        "class_weights": torch.rand(46, generator=torch.Generator().manual_seed(2))
    }
    given["token_weights"] = given["token_weights"].detach() * 1e3
    with (
        torch.no_grad()
    ):  # two columns, in either part, are the largest: the label is one or the other
        given["weight"][30] = given["weight"][5]
        given["hidden"][:4] = 9 * given["weight"][5]
    given["labels"][:4] = torch.tensor([5, 30, 5, 7])
    total, losses, z_losses, hits = op.linear_cross_entropy(**given, ranked=True, **terms)
    assert hits is not None
    assert hits[:4].tolist() == [1, 0, 1, 0]
    losses = losses if tokens else torch.stack([losses, z_losses, hits])
    total.backward()
    parts = run_ranks(2, sharded, given, sequence_parallel, terms, tokens)
    close = {"rtol": 1e-6, "atol": 1e-6}
    for part_total, part_losses, _, _ in parts:
        torch.testing.assert_close(part_total, total.detach(), **close)
        torch.testing.assert_close(part_losses, losses, **close)
    torch.testing.assert_close(torch.cat([p[3] for p in parts]), given["weight"].grad, **close)
    if sequence_parallel:
        torch.testing.assert_close(torch.cat([p[2] for p in parts]), given["hidden"].grad, **close)
    else:
        for part in parts:
            torch.testing.assert_close(part[2], given["hidden"].grad, **close)


def sharded_padding(given: dict[str, Tensor], vocabs: list[int]) -> list[Any]:
    return [
        sharded(
            given, sequence_parallel, {"vocab_size": vocab, "impl": impl, **TERMS["all"]}, False
        )
        for vocab in vocabs
        for impl in ("reference", "triton")
        for sequence_parallel in (False, True)
    ]


@pytest.mark.dist
@pytest.mark.full
def test_linear_cross_entropy_padding_spans_last_ranks():
    # of 4 parts of 12
    given = inputs(8, 24, 48, torch.float32)
    vocabs = [47, 36, 25, 1]
    given["token_weights"] = given["token_weights"].detach() * 1e3
    given["labels"] = given["labels"].where(given["labels"] < 1, 0)
    found = iter(zip(*run_ranks(4, sharded_padding, given, vocabs), strict=True))
    for vocab in vocabs:
        leaves = [given[name].detach().clone().requires_grad_() for name in ("hidden", "weight")]
        total, *_ = defined(
            leaves[0], leaves[1][:vocab], given["labels"], given["token_weights"], **TERMS["all"]
        )
        dhidden, dweight = torch.autograd.grad(total, leaves)
        for _ in ("reference", "triton"):
            for sequence_parallel in (False, True):
                parts = next(found)
                close = {"rtol": 1e-6, "atol": 1e-6}
                torch.testing.assert_close(parts[0][0], total.detach(), **close)
                torch.testing.assert_close(torch.cat([p[3] for p in parts]), dweight, **close)
                whole = torch.cat([p[2] for p in parts]) if sequence_parallel else parts[-1][2]
                torch.testing.assert_close(whole, dhidden, **close)


def test_linear_cross_entropy_buffered_weight_gradient_is_equal():
    given = inputs(7, 24, 45, torch.float32)
    sent = []

    def keep(weight: Tensor, dweight: Tensor, factor: Tensor) -> Tensor:
        sent.append(dweight * factor)
        return torch.zeros_like(weight)

    leaves = [given[name] for name in ("hidden", "weight", "token_weights")]
    plain, apart = (
        torch.autograd.grad(
            3 * op.linear_cross_entropy(**given, impl="reference", **more)[0], leaves
        )
        for more in ({}, {"gradient": keep})
    )
    torch.testing.assert_close((apart[0], sent[0], apart[2]), plain)
    assert not apart[1].any()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_linear_cross_entropy_forward_adds_to_buffer(impl):
    given = inputs(7, 24, 45, torch.float32)
    given["labels"].clamp_(max=40)
    leaves = [given[name] for name in ("hidden", "weight", "token_weights")]
    options = {"chunk": 3, "impl": impl, "vocab_size": 41}
    wanted = torch.autograd.grad(op.linear_cross_entropy(**given, **options)[0], leaves)
    before = torch.randn(45, 24)
    into = before.clone()
    options |= {"gradient": op.Buffer(into, torch.zeros_like)}
    found = torch.autograd.grad(op.linear_cross_entropy(**given, **options)[0], leaves)
    torch.testing.assert_close((found[0], into - before, found[2]), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(into[41:], before[41:])
    assert not found[1].any()
    # An evaluation, and a weight that learns nothing, add nothing.
    into.copy_(before)
    with torch.no_grad():
        op.linear_cross_entropy(**given, **options)
    op.linear_cross_entropy(**given | {"weight": given["weight"].detach()}, **options)[0].backward()
    assert torch.equal(into, before)


def test_linear_cross_entropy_broken_promise_is_refused():
    given = inputs(5, 8, 13, torch.float32)
    options = {"gradient": op.Buffer(torch.zeros(13, 8), torch.zeros_like)}
    with pytest.raises(RuntimeError, match="must be 1"):
        (2 * op.linear_cross_entropy(**given, **options)[0]).backward()
    total, *_ = op.linear_cross_entropy(**given, **options)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="given them away"):
        total.backward()
    for wrong in (torch.zeros(12, 8), torch.zeros(13, 8).half()):
        with pytest.raises(ValueError, match="as large as weight"):
            op.linear_cross_entropy(**given, gradient=op.Buffer(wrong, torch.zeros_like))


MEASURE = """
import re, sys, torch
from pathlib import Path
from torch.nn import functional as F
from mtrain_kernels.linear_cross_entropy.op import linear_cross_entropy
torch.set_num_threads(1)
tokens, width, vocab = map(int, sys.argv[1:])
hidden = torch.randn(tokens, width).bfloat16().requires_grad_()
weight = torch.randn(vocab, width).bfloat16().requires_grad_()
labels = torch.randint(0, vocab, (tokens,))
share = torch.full((tokens,), 1 / tokens)

def kib(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1))

def peak(loss):
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = kib("VmRSS")
    loss().backward()
    hidden.grad = weight.grad = None
    return (kib("VmHWM") - before) / 1024

print(peak(lambda: linear_cross_entropy(hidden, weight, labels, share, impl="reference")[0]))
print(peak(lambda: F.cross_entropy(F.linear(hidden, weight), labels)))
"""


@pytest.mark.full
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads peak memory from Linux's /proc"
)
def test_linear_cross_entropy_logits_are_never_whole():
    tokens = 4096
    width = 64
    vocab = 16000
    said = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tokens), str(width), str(vocab)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    fused, plain = map(float, said.split())
    logits = 2 * tokens * vocab / 2**20  # 125 MiB in bf16
    gradients = 2 * (tokens + vocab) * width / 2**20
    assert plain > 2 * logits, said
    chunk = 6 * chunks.CHUNK_ELEMENTS["cpu"] / 2**20  # logits in bf16 and in fp32
    # 40 MiB: what a first matrix product takes for itself
    assert fused < chunk + 2 * gradients + 40, said
    assert fused < plain / 2, said


@pytest.mark.parametrize("tokens", [2, 5, 100, 1024])
def test_linear_cross_entropy_small_vocabulary_is_chunked_on_cpu(tokens, monkeypatch):
    held = []
    open_chunk = reference.ReferenceChunks.__call__

    def seen(self, logits, *rest):
        held.append(logits.numel())
        return open_chunk(self, logits, *rest)

    monkeypatch.setattr(reference.ReferenceChunks, "__call__", seen)
    hidden = torch.randn(tokens, 8)
    weight = torch.randn(50, 8)
    labels = torch.zeros(tokens, dtype=torch.int64)
    op.linear_cross_entropy(hidden, weight, labels, torch.ones(tokens), impl="reference")
    assert sum(held) == tokens * 50
    assert max(held) <= (tokens + 1) // 2 * 50
