"""Logits and their statistics from one kernel, classes with weights, and the separate parts of a
loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from mtrain_kernels import tuning
from mtrain_kernels.cross_entropy.reference import Terms, row_statistics
from mtrain_kernels.linear_cross_entropy import chunks, op, tiles
from mtrain_kernels.parity import caught, check
from test_linear_cross_entropy import TERMS, defined, defined_tokens, inputs, summed
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
SMALL = tiles.Tile(16, 16, 16, 4, 1)
MODULE = "mtrain_kernels.linear_cross_entropy.triton"


@contextmanager
def by_one_kernel() -> Iterator[None]:
    """Use tiles so small that some tokens and columns have several, whether logits are kept or
    not.
    """
    before = tiles.way_for
    tiles.way_for = lambda *_: SMALL
    try:
        yield
    finally:
        tiles.way_for = before


def classes(vocab: int) -> Tensor:
    """Return weights of classes, one of them 0."""
    found = torch.rand(vocab, generator=torch.Generator().manual_seed(4))
    found[3] = 0
    return found


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("weighed", [False, True], ids=["", "classes"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "chunk"), [(19, 17), (1, None), (0, None)])
def test_linear_cross_entropy_fused_kernel_equals_definition(tokens, chunk, dtype, terms, weighed):
    tolerance = None if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    given = inputs(tokens, 24, 45, dtype)
    more = dict(terms)
    more |= {"class_weights": classes(45)} if weighed else {}
    with by_one_kernel():
        check(
            summed("triton", chunk=chunk, **more),
            lambda **kw: defined(**kw, **more),
            given,
            tolerance=tolerance,
        )
        given.pop("token_weights")
        check(
            lambda **kw: op.token_cross_entropy(**kw, impl="triton", **more),
            lambda **kw: defined_tokens(**kw, **more),
            given,
            tolerance=tolerance,
        )


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_linear_cross_entropy_class_weights_equal_definition(impl, terms):
    more = terms | {"class_weights": classes(45)}
    given = inputs(7, 24, 45, torch.float32)
    check(summed(impl, chunk=3, **more), lambda **kw: defined(**kw, **more), given)


@pytest.mark.sampled
@pytest.mark.parametrize("first", [20, 0, 40])
def test_linear_cross_entropy_column_statistics_know_all_labels(first: int) -> None:
    """Compare labels of another rank, which lie in no column of the last tile, which is not
    full.
    """
    from mtrain_kernels.linear_cross_entropy import triton

    given = inputs(60, 8, 20, torch.float32, weighted=False)
    labels = torch.arange(60)
    terms = Terms(60, 0.1, 0.0, 2.0)
    hidden = given["hidden"].detach()
    weight = given["weight"].detach()
    more = {"class_weights": classes(60), "ranked": True}
    found = triton.product_statistics(
        hidden, weight, labels, first, terms, SMALL, logits=None, **more
    )
    torch.testing.assert_close(
        found, row_statistics(hidden @ weight.T, labels, first, terms, **more)
    )


def test_linear_cross_entropy_class_weights_equal_torch() -> None:
    given = inputs(9, 8, 13, torch.float32)
    leaves = [given["hidden"], given["weight"]]
    more = {"weight": classes(13), "label_smoothing": 0.1, "reduction": "sum"}
    wanted = F.cross_entropy(leaves[0] @ leaves[1].T, given["labels"], **more)
    given["token_weights"] = torch.ones(9)
    found = op.linear_cross_entropy(
        **given, class_weights=more["weight"], label_smoothing=0.1
    ).total
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves)
    )
    with pytest.raises(ValueError, match="13 classes"):
        op.linear_cross_entropy(**given, class_weights=torch.ones(12))


@pytest.mark.sampled(9)
@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["reference", "two passes", "one kernel"])
@pytest.mark.parametrize("gradients", [True, False])
def test_linear_cross_entropy_first_largest_logit_wins(way: str, gradients: bool) -> None:
    """Test ties in every part of the columns; padding takes no part in them, and a cap makes no
    logits equal.
    """
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randint(-2, 3, (24, 4), generator=generator).float()
    weight = torch.randint(-2, 3, (60, 4), generator=generator).float()
    logits = (hidden @ weight.T)[:, :53]
    best = logits.max(1)
    labels = best.indices.clone()
    # the last of those that are the largest
    labels[::3] = logits.flip(1).max(1).indices.neg()[::3] + 52
    labels[1::7] = -100
    wanted = (labels == best.indices).float()
    assert 0 < wanted.sum() < 20
    assert bool(
        (logits.gather(1, labels.clamp(min=0)[:, None])[:, 0] == best.values)[wanted == 0].any()
    )
    impl = "reference" if way == "reference" else "triton"
    given = {
        "token_weights": torch.ones(24),
        "vocab_size": 53,
        "soft_cap": 0.1,
        "ranked": True,
        "z_loss": 0.25,
    }
    weight.requires_grad_(gradients)
    if way == "one kernel":
        with by_one_kernel():
            found = op.linear_cross_entropy(hidden, weight, labels, chunk=17, impl=impl, **given)
    else:
        found = op.linear_cross_entropy(hidden, weight, labels, chunk=17, impl=impl, **given)
    assert torch.equal(found.hits, wanted)
    lse = (0.1 * (logits / 0.1).tanh()).logsumexp(1)
    torch.testing.assert_close(found.z_losses, (0.25 * lse.square()).where(labels != -100, 0))
    plain = op.linear_cross_entropy(
        hidden, weight, labels, impl=impl, **given | {"z_loss": 0.0, "ranked": False}
    )
    torch.testing.assert_close(found.losses - found.z_losses, plain.losses)
    assert plain.hits is None


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x == top[:, None], c[None, :]", "x == top[:, None], r[:, None]"),
        ("tl.exp(x - shift[:, None])", "tl.exp(x - shift[:, None] * 2)"),
        ("c[None, :] == label[:, None])", "c[None, :] == label[:, None] + 1)"),
        ("out_ptr + across.to(tl.int64) * rows + r", "out_ptr + r"),
        ("here = i + inner < k", "here = inner < k"),
        ("begin + inner % rows", "inner % rows"),
    ],
)
def test_linear_cross_entropy_seeded_product_bug_is_found(old: str, new: str) -> None:
    tokens = 300 if "begin" in old else 40  # more tiles of tokens than are done together
    given = inputs(tokens, 24, 45, torch.float32) | {"token_weights": torch.ones(tokens)}
    weight = given["weight"].detach()
    hidden = given["hidden"].detach()
    wanted = ((hidden @ weight.T).argmax(1) == given["labels"]).float()
    with by_one_kernel(), caught(MODULE, old, new):
        found = op.linear_cross_entropy(**given, ranked=True, chunk=tokens, impl="triton")
        torch.testing.assert_close(found.losses, defined(**given)[1])
        assert torch.equal(found.hits, wanted)


def test_linear_cross_entropy_measured_choice_is_taken(
    monkeypatch,
) -> None:
    hidden = torch.empty(10, 4096, dtype=torch.bfloat16, device="meta")
    assert tiles.way_for(hidden, 128256, True) is tiles.APART
    assert tiles.way_for(hidden, 128256, False) == tiles.TILES[0]
    record = {"linear_cross_entropy.kept": {"bfloat16 h4096 v131072": tiles.TILES[1].name}}
    monkeypatch.setattr(tuning, "_used", record)
    assert tiles.way_for(hidden, 128256, True) == tiles.TILES[1]
    assert tiles.way_for(hidden, 128256, False) == tiles.TILES[0]


def test_linear_cross_entropy_chunks_respect_logit_limit() -> None:
    gpu = torch.device("meta")
    assert chunks.chunk_rows(0, 8192, 128256, gpu) == 1024
    assert chunks.chunk_rows(0, 8192, 128256, gpu, 1 << 29) == 4160
    assert chunks.chunk_rows(0, 8192, 128256, gpu, 1) == 64
    assert chunks.chunk_rows(7, 8192, 128256, gpu, 1 << 29) == 7
