"""Cross entropy against its definition, PyTorch's, and seeded bugs; the vocabulary whole and in
parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtrain_kernels.cross_entropy import op, reference
from mtrain_kernels.cross_entropy.reference import Terms
from mtrain_kernels.parity import caught, check, layouts
from mtrain_kernels.registry import Unavailable
from torch import Tensor
from torch.nn import functional as F

from tests.support.forked import run_ranks

MODULE = "mtrain_kernels.cross_entropy.triton"
TERMS = {"plain": {}, "all": {"label_smoothing": 0.1, "z_loss": 1e-2, "soft_cap": 3.0}}


def inputs(tokens: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rising = torch.linspace(0, vocab**0.2, vocab)  # so that a later block holds the maximum
    logits = (
        (2 * torch.randn(tokens, vocab, generator=generator) + rising).to(dtype).requires_grad_()
    )
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[1::4] = -100
    return {"logits": logits, "labels": labels}


def defined(logits: Tensor, labels: Tensor, **terms: Any) -> Tensor:
    return reference.cross_entropy(logits, labels, Terms(logits.shape[-1], **terms))


def run(impl: str, **terms: Any) -> Any:
    return lambda logits, labels: op.cross_entropy(logits, labels, impl=impl, **terms)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "vocab"), [(5, 77), (1, 1), (3, 10000), (0, 5)])
def test_cross_entropy_equals_definition_with_gradients(impl, terms, dtype, tokens, vocab):
    check(run(impl, **terms), lambda **kw: defined(**kw, **terms), inputs(tokens, vocab, dtype))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_definition_equals_torch(smoothing):
    given = inputs(6, 50, torch.float64)
    check(
        lambda **kw: defined(**kw, label_smoothing=smoothing),
        lambda logits, labels: F.cross_entropy(
            logits, labels, reduction="none", label_smoothing=smoothing
        ),
        given,
    )


def test_cross_entropy_strides_do_not_matter():
    given = inputs(4, 65, torch.float32)
    for _, logits in layouts(given["logits"]):
        check(run("triton"), defined, {**given, "logits": logits})


def test_cross_entropy_leading_dimensions_are_kept():
    given = inputs(6, 9, torch.float32)
    folded = op.cross_entropy(
        given["logits"].view(2, 3, 9), given["labels"].view(2, 3), impl="triton"
    )
    torch.testing.assert_close(folded.view(6), defined(**given))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_cross_entropy_large_logits_have_a_loss(impl):
    """Test logits as far below zero as above: an exponential of the distance from zero would
    overflow, or give NaN times 0.
    """
    given = inputs(2, 9000, torch.float32)
    with torch.no_grad():
        given["logits"][0] -= 300
        given["logits"][1] += 300
    check(run(impl), defined, given)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_cross_entropy_non_finite_stays_in_its_row(impl):
    given = inputs(6, 40, torch.float32)
    with torch.no_grad():
        given["logits"][0, 3] = torch.nan
        given["logits"][2, 5] = torch.inf
        given["logits"][3, 7] = -torch.inf
        given["logits"][4, :] = -torch.inf
    check(run(impl), defined, given)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_cross_entropy_ignored_row_hides_even_nan(impl):
    given = inputs(6, 40, torch.float32)
    with torch.no_grad():
        given["logits"][1, :] = torch.nan
    losses = op.cross_entropy(**given, impl=impl)
    losses.sum().backward()
    assert losses[1] == 0
    assert bool((given["logits"].grad[1] == 0).all())
    assert losses.isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_cross_entropy_label_outside_vocabulary_gives_nan(impl):
    given = inputs(3, 10, torch.float32)
    given["labels"] = torch.tensor([10, 2, -1])
    losses = op.cross_entropy(**given, impl=impl)
    assert losses.isnan().tolist() == [True, False, True]
    losses[1].backward()
    assert given["logits"].grad[1].isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_cross_entropy_passes_opcheck(impl):
    given = inputs(3, 40, torch.float32)
    torch.library.opcheck(
        op._cross_entropy.op, (*given.values(), "", *Terms(40, 0.1, 1e-3, 5.0), impl)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('mask=column < columns, other=-float("inf")', "mask=column < columns, other=0.0"),
        ("exponentials *= exp2(most * LOG2E - shift)", "exponentials *= 1"),
        (
            "tl.sum(exponentials * exp2(most * LOG2E - largest * LOG2E), axis=0)",
            "tl.sum(exponentials, axis=0)",
        ),
        ("columns // COLUMNS * COLUMNS", "(columns - 1) // COLUMNS * 0"),
        ("tl.where(here, target, 0.0)", "target + 1e-3"),
        ("gradient -= smoothing_share * factor", "gradient -= smoothing_share * factor * 2"),
        ("1.0 + 2.0 * z_loss * lse", "1.0 + z_loss * lse"),
        ("gradient *= bent - bent * bent", "gradient *= bent"),
        ("tl.where(label == ignore_index, 0.0, gradient)", "gradient"),
        ("tl.where(column == place,", "tl.where(column == place + 1,"),
        ("column, mask=inside, other=0.0)", "column, mask=column < columns - 1, other=0.0)"),
    ],
)
def test_cross_entropy_seeded_bug_is_found(old, new):
    with caught(MODULE, old, new):
        for terms in TERMS.values():
            check(
                run("triton", **terms),
                lambda t=terms, **kw: defined(**kw, **t),
                inputs(3, 10000, torch.float32),
            )


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "columns"), [(77, 128), (1, 9)])
def test_cross_entropy_columns_beyond_vocabulary_are_excluded(impl, terms, dtype, vocab, columns):
    given = inputs(5, columns, dtype)
    given["labels"] %= vocab
    given["labels"][1] = -100
    with torch.no_grad():
        given["logits"][:, vocab] += 20  # what padding holds is not seen, however large
        given["logits"][2, -1] = torch.inf
    check(
        run(impl, vocab_size=vocab, **terms),
        lambda logits, labels: defined(logits[:, :vocab], labels, **terms),
        given,
    )
    losses = op.cross_entropy(**given, vocab_size=vocab, impl=impl)
    torch.testing.assert_close(
        losses,
        F.cross_entropy(given["logits"].float()[:, :vocab], given["labels"], reduction="none"),
    )


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_cross_entropy_label_in_padding_gives_nan(impl):
    given = inputs(3, 10, torch.float32)
    given["labels"] = torch.tensor([7, 2, 9])
    assert op.cross_entropy(**given, vocab_size=7, impl=impl).isnan().tolist() == [
        True,
        False,
        True,
    ]


def sharded(
    rank_inputs: dict[str, Tensor], impl: str, terms: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks = dist.get_world_size()
    logits = rank_inputs["logits"].detach().chunk(ranks, dim=1)[rank].clone().requires_grad_()
    losses = op.cross_entropy(
        logits, rank_inputs["labels"], group=dist.group.WORLD, impl=impl, **terms
    )
    (losses * torch.arange(len(losses))).sum().backward()
    return losses.detach(), logits.grad


def sharded_padding(given: dict[str, Tensor], vocabs: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [
        sharded(given, impl, {"vocab_size": vocab, **terms})
        for vocab in vocabs
        for impl in ("reference", "triton")
        for terms in TERMS.values()
    ]


@pytest.mark.full
@pytest.mark.dist
def test_cross_entropy_padding_spans_last_ranks():
    # of 4 parts of 16
    given = inputs(7, 64, torch.float32)
    vocabs = [63, 48, 33, 16, 1]
    given["labels"][0] = 0
    given["labels"] = given["labels"].where(given["labels"] < 1, 0)
    found = iter(zip(*run_ranks(4, sharded_padding, given, vocabs), strict=True))
    weights = torch.arange(7)
    for vocab in vocabs:
        for _ in ("reference", "triton"):
            for terms in TERMS.values():
                logits = given["logits"].detach().clone().requires_grad_()
                losses = defined(logits[:, :vocab], given["labels"], **terms)
                (losses * weights).sum().backward()
                parts = next(found)
                for part, _ in parts:
                    torch.testing.assert_close(part, losses.detach(), rtol=1e-6, atol=1e-6)
                torch.testing.assert_close(
                    torch.cat([g for _, g in parts], 1), logits.grad, rtol=1e-6, atol=1e-6
                )


@pytest.mark.dist
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_cross_entropy_two_vocabulary_parts_equal_whole(terms):
    given = inputs(7, 66, torch.float32)
    with torch.no_grad():
        given["logits"][0, :33] = -torch.inf  # a part without any mass
        given["labels"][0] = 40
    weights = torch.arange(7)
    losses = op.cross_entropy(**given, impl="reference", **terms)
    (losses * weights).sum().backward()
    parts = run_ranks(2, sharded, given, "reference", terms)
    for part, _ in parts:
        torch.testing.assert_close(part, losses.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.cat([g for _, g in parts], 1), given["logits"].grad, rtol=1e-6, atol=1e-6
    )


def test_cross_entropy_unfit_is_refused():
    given = inputs(3, 10, torch.float32)
    with pytest.raises(ValueError, match="one for each row"):
        op.cross_entropy(given["logits"], given["labels"][:2])
    with pytest.raises(ValueError, match="int64"):
        op.cross_entropy(given["logits"], given["labels"].int())
    with pytest.raises(ValueError, match="label_smoothing"):
        op.cross_entropy(**given, label_smoothing=1.0)
    for vocab in (0, 11):
        with pytest.raises(ValueError, match="vocab_size"):
            op.cross_entropy(**given, vocab_size=vocab)
    with pytest.raises(ValueError, match="soft_cap"):
        op.cross_entropy(**given, soft_cap=-1.0)
    with pytest.raises(Unavailable, match="float64"):
        op.cross_entropy(given["logits"].double(), given["labels"], impl="triton")
