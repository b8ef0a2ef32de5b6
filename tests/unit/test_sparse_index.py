"""An indexer compared with an independent definition in fp64: its choices, loss and gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtrain.mcore.layers import sparse_index
from mtrain.mcore.layers.sparse_index import Index, Teacher, chosen, marks, taught

S = 11
B = 2
H = 8
D = 8
N = 4
E = 6
TOPK = 4


def _hadamard(x: Tensor) -> Tensor:
    """Multiply by Sylvester's matrix over the root of its size, as DeepSeek-V3.2's code rotates
    queries and keys.
    """
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix / math.sqrt(x.shape[-1])


def _drawn() -> dict[str, Tensor]:
    torch.manual_seed(3)
    sizes = {
        "q": (S, B, H, D),
        "k": (S, B, D),
        "w": (S, B, H),
        "query": (S, B, N, E),
        "key": (S, B, N, E),
    }
    return {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}


def _defined(x: dict[str, Tensor], *, sparse: bool) -> tuple[Tensor, Tensor]:
    """Compute token by token: I = sum_h w_h ReLU(q_h k), the highest of those before, and sum_t
    KL(p_t || softmax I_t).
    """
    q = _hadamard(x["q"])
    k = _hadamard(x["k"])
    keys = torch.zeros(B, S, S, dtype=torch.bool)
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for t in range(S):
            scores = torch.stack(
                [(x["w"][t, b] * (q[t, b] @ k[u, b]).clamp_min(0)).sum() for u in range(t + 1)]
            )
            best = sorted(range(t + 1), key=lambda u: -float(scores[u].detach()))[:TOPK]
            keys[b, t, best] = True
            used = best if sparse else list(range(t + 1))
            logits = torch.stack(
                [x["query"][t, b, n] @ x["key"][used, b, n].T for n in range(N)]
            ) / math.sqrt(E)
            p = logits.softmax(-1).sum(0)
            p = p / p.sum()
            loss = loss + (p * (p.log() - scores[used].log_softmax(0))).sum()
    return keys, loss


def _teacher(x: dict[str, Tensor], *, sparse: bool) -> Teacher:
    return Teacher(x["query"], x["key"], E**-0.5, sparse, lambda summed: summed / N)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("held", [1 << 24, 3 * B * N * S])
def test_sparse_index_equals_definition_with_gradients(
    sparse: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_index, "MOST_SCORES", held)
    x = _drawn()
    leaves = {name: x[name].clone().requires_grad_() for name in ("q", "k", "w")}
    keys, loss = _defined({**x, **leaves}, sparse=sparse)
    expected = torch.autograd.grad(loss, list(leaves.values()))
    index = Index(x["q"], x["k"], x["w"])
    found, value, gradient = taught(index, TOPK, _teacher(x, sparse=sparse), factor=0.5)
    assert torch.equal(found, keys)
    assert torch.equal(marks(index, TOPK), keys)
    torch.testing.assert_close(value, loss.detach())
    for one, other in zip((gradient.q, gradient.k, gradient.w), expected, strict=True):
        torch.testing.assert_close(one, 0.5 * other)


WRONG: dict[str, Any] = {
    "negative products": lambda i: replace(i, q=-i.q),
    "weights of other heads": lambda i: replace(i, w=i.w.roll(1, -1)),
    "keys of other tokens": lambda i: replace(i, k=i.k.roll(1, 0)),
}


@pytest.mark.parametrize("fault", WRONG)
def test_sparse_index_other_index_chooses_differently(fault: str) -> None:
    x = _drawn()
    keys, loss = _defined(x, sparse=False)
    found, value, _ = taught(
        WRONG[fault](Index(x["q"], x["k"], x["w"])), TOPK, _teacher(x, sparse=False)
    )
    assert not torch.equal(found, keys)
    assert abs(float(value - loss)) > 1e-2


def test_sparse_index_future_is_never_chosen_few_all_are() -> None:
    scores = torch.arange(9.0).view(1, 3, 3)
    visible = torch.ones(3, 3, dtype=torch.bool).tril()
    assert chosen(scores, visible, 3)[0].equal(visible)
    assert chosen(scores, visible, 8)[0].equal(visible)
    assert chosen(scores, visible, 1)[0].equal(torch.eye(3, dtype=torch.bool))
