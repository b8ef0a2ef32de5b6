"""Attention over a ring of ranks: a block is computed while the next one is under way, tables are
made once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import tiny
from tests.support.covering import some
from tests.support.forked import run_ranks

TOKENS = 24
HEADS = 4
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "p2p": (3, {"cp_comm_type": "p2p"}),
    "a2a+p2p": (4, {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}),
}


def _modules(cp: int, options: dict[str, Any], layers: int = 1) -> list[Any]:
    from mtrain.mcore import api
    from mtrain.mcore.layers.attention import CoreAttention

    tiny.start_world(cp=cp, cp_sizes=options.get("hierarchical_context_parallel_sizes"))
    config = tiny.config(context_parallel_size=cp, **options)
    return [CoreAttention(config, 1 + i, api.AttnMaskType.causal, "self") for i in range(layers)]


def _inputs(cp: int) -> list[torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    return [torch.randn(TOKENS // cp, 2, HEADS, 8).requires_grad_() for _ in range(3)]


def _attended(cp: int, options: dict[str, Any], waits: bool) -> list[torch.Tensor]:
    """Return output and gradients; with `waits`, wait for each exchange before anything is
    computed.
    """
    from mtrain.mcore.layers import context

    (module,) = _modules(cp, options)
    if waits:
        start = context._Exchange.start
        finish = context._Exchange.finish

        def start_and_wait(self: Any, x: torch.Tensor, step: int) -> torch.Tensor:
            got = start(self, x, step)
            finish(self)
            return got

        context._Exchange.start = start_and_wait  # type: ignore[method-assign]
        context._Exchange.finish = lambda self: None  # type: ignore[method-assign]
    inputs = _inputs(cp)
    out = module(*inputs, None)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("kind", some(KINDS, ["p2p"]))
def test_ring_overlap_is_bitwise_equal(kind: str) -> None:
    cp, options = KINDS[kind]
    for apart, together in zip(
        *(run_ranks(cp, _attended, cp, options, waits) for waits in (True, False)), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


class _Told(torch.autograd.Function):
    """Says when the backward of what gave a tensor begins."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, said: list[str]) -> torch.Tensor:
        ctx.said = said
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.said.append("compute")
        return grad, None


def _order(cp: int) -> tuple[list[str], list[str]]:
    from mtrain.mcore.layers import attention

    (module,) = _modules(cp, {"cp_comm_type": "p2p"})
    said: list[str] = []
    send = dist.batch_isend_irecv
    compute = attention.partial_attention

    class Told:
        def __init__(self, request: Any) -> None:
            self.request = request

        def wait(self) -> None:
            self.request.wait()
            said.append("wait")

    def told(operations: Any) -> list[Any]:
        said.append("start")
        first, *others = send(operations)
        return [Told(first), *others]

    def computed(*args: Any, **more: Any) -> Any:
        said.append("compute")
        out, lse = compute(*args, **more)
        return _Told.apply(out, said), lse

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", told)
        patch.setattr(attention, "partial_attention", computed)
        out = module(*_inputs(cp), None)
        forward = list(said)
        said.clear()
        out.sum().backward()
    return forward, list(said)


def test_ring_computes_while_next_block_travels() -> None:
    for forward, backward in run_ranks(3, _order, 3):
        assert forward == ["start", "compute", "wait", "start", "compute", "wait", "compute"]
        assert backward == ["compute", "start", "compute", "wait", "start", "compute", "wait"]


def _builds(packed: bool) -> list[tuple[int, int]]:
    """Count, in each of three micro-batches of three layers, how often positions and edges were
    worked out.
    """
    from mtrain.mcore import api
    from mtrain.mcore.layers import context

    modules = _modules(2, {"cp_comm_type": "p2p"}, layers=3)
    counts = {"positions": 0, "edges": 0}
    positions = context.context_positions
    bucketize = torch.bucketize

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            counts[name] += 1
            return real(*args, **more)

        return call

    found = []
    edges = torch.tensor([0, 8, TOKENS], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "context_positions", counted("positions", positions))
        patch.setattr(torch, "bucketize", counted("edges", bucketize))
        for _ in range(3):
            params = api.PackedSeqParams(qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges)
            q, k, v = _inputs(2)
            for module in modules:
                if packed:
                    module(*(x[:, 0] for x in (q, k, v)), None, packed_seq_params=params)
                else:
                    module(q, k, v, None)
            found.append((counts["positions"], counts["edges"]))
            counts.update(positions=0, edges=0)
            edges[1] += 4  # the next micro-batch in the same memory
    return found


@pytest.mark.parametrize(
    ("packed", "first", "later"), [(True, (1, 4), (1, 4)), (False, (1, 0), (0, 0))]
)
def test_ring_tables_are_made_once_per_micro_batch(
    packed: bool, first: tuple[int, int], later: tuple[int, int]
) -> None:
    """Build masks once: packed, each of two blocks of keys has one, from the owners of queries and
    of keys.
    """
    for found in run_ranks(2, _builds, packed):
        assert found == [first, later, later]
