"""Parts of a step that differ where CUDA graphs hold them compute what they compute elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.forked import run_alone

pytestmark = pytest.mark.dist
TOKENS = 12
EXPERTS = 3
CAPACITY = 5
WIDTH = 4


def _permuted(drop_and_pad: bool) -> dict[str, Any]:
    """Return rows, their weights and what leads back, from a map in which every expert has as many
    tokens, with gradients.
    """
    from mtrain.mcore.adapter.op_overrides import permuted, unpermuted

    torch.manual_seed(3)
    # Some token has all experts, and some has none.
    columns = [torch.randperm(TOKENS - 1)[:CAPACITY] for _ in range(EXPERTS)]
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    for expert, tokens in enumerate(columns):
        chosen[tokens, expert] = True
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    probs = torch.rand(TOKENS, EXPERTS).mul(chosen).requires_grad_()
    given = {"drop_and_pad": drop_and_pad, "num_out_tokens": EXPERTS * CAPACITY}
    rows, weights, plan = permuted(x, chosen, probs, impl="reference", **given)[:3]
    back = unpermuted(rows * weights[:, None], plan, x.shape, impl="reference")
    back.square().sum().backward()
    assert x.grad is not None
    assert probs.grad is not None
    return {
        "rows": rows.detach(),
        "weights": weights.detach(),
        "back": back.detach(),
        "counts": plan.counts,
        "tokens": x.grad,
        "probabilities": probs.grad,
    }


def test_captured_parts_padded_experts_get_the_same_rows() -> None:
    def differing() -> list[str]:
        padded = _permuted(True)
        counted = _permuted(False)
        return [name for name in padded if not torch.equal(padded[name], counted[name])]

    assert run_alone(differing) == []


def test_captured_parts_whole_step_gathers_after_evaluation() -> None:
    def job() -> list[bool]:
        from mtrain.mcore.adapter.cuda_graphs import whole_steps

        overlapped = SimpleNamespace(overlap_param_gather=True)
        group = SimpleNamespace(
            ddp_config=overlapped, param_gather_handle=None, param_gather_dispatched=True
        )
        apart = SimpleNamespace(
            ddp_config=overlapped, param_gather_handle=object(), param_gather_dispatched=True
        )
        chunk = SimpleNamespace(bucket_groups=[group, apart])
        seen: list[bool] = []

        def schedule(**_: Any) -> None:
            seen.extend((group.param_gather_dispatched, apart.param_gather_dispatched))

        from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

        StaticBufferLoader.static_buffers = {"training": ["earlier"], "validation": []}
        FullCudaGraphWrapper.cuda_graph = {"training": "of an earlier run", "validation": None}
        step = whole_steps(schedule, 9)
        assert FullCudaGraphWrapper.cuda_graph["training"] is None
        assert StaticBufferLoader.static_buffers["training"] == []
        given = {"model": chunk, "num_microbatches": 1, "seq_length": 8}
        for forward_only in (True, False):
            step(data_iterator=iter([{}]), forward_only=forward_only, **given)
        return seen

    # What is under way is not gathered twice.
    assert run_alone(job) == [True, True, False, True]


@pytest.mark.parametrize(
    ("impl", "fuses", "adds"),
    [("none", False, True), ("local", False, False), ("local", True, True)],
)
def test_captured_parts_experts_add_gradients_if_replays_say_so(
    impl: str, fuses: bool, adds: bool
) -> None:
    def job() -> bool:
        from mtrain.mcore.layers.grouped_linear import ColumnGroupedLinear

        weight = torch.nn.Parameter(torch.zeros(2, 2))
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        weight.main_grad = torch.zeros(2, 2)  # type: ignore[attr-defined]
        config = SimpleNamespace(cuda_graph_impl=impl, gradient_accumulation_fusion=fuses)
        layer: Any = SimpleNamespace(impl="triton", _config=config, _each=lambda name: [weight])
        return ColumnGroupedLinear._main_grads(layer) is not None

    assert run_alone(job) is adds
