"""The forward that asks once what a layer has: the bits of megatron-core's, and used only where it
computes the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtrain.config.rules import apply
from mtrain.config.schema.run import RunConfig
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps

MOE = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}
BY_TORCH = {"kernels.linear": "torch", "kernels.gradient_accumulation_fusion": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "biases, layer norm": ({"add_bias_linear": True, "normalization": "LayerNorm"}, {}),
    "dropout": ({"hidden_dropout": 0.1}, {}),
    "experts": ({"moe": MOE}, {}),
    "tp2 sequence parallel, tied": (
        {"tie_word_embeddings": True},
        {"ranks": 2, "tp": 2, "sequence_parallel": True},
    ),
    "tp2": ({}, {"ranks": 2, "tp": 2}),
    "pp2, tied": ({"tie_word_embeddings": True}, {"ranks": 2, "pp": 2}),
    "dp2 overlapped": (
        {},
        {"ranks": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
    ),
}


def _trained(run: RunConfig, plain: bool) -> tuple[list[tuple[float, float]], int]:
    """Return loss and norm of two steps, and how many layers went the direct way."""
    from mtrain.mcore.layers import direct

    called = 0
    forward = direct.forward_layer

    def counted(*args: Any) -> Any:
        nonlocal called
        called += 1
        return forward(*args)

    direct.forward_layer = counted
    if not plain:
        direct.layer_is_plain = lambda layer: False
        direct.attention_is_plain = lambda attention: False
    return train_steps(run, 2), called


@pytest.mark.parametrize("name", some(CASES, ["experts", "tp2 sequence parallel, tied"]))
def test_direct_layers_compute_the_same_bits(name: str) -> None:
    model, parallel = CASES[name]
    run = apply(tiny_run(model={"num_layers": 2, **model}, **parallel), BY_TORCH)
    found = run_ranks(run.parallel.ranks, _trained, run, True)[0]
    right = run_ranks(run.parallel.ranks, _trained, run, False)[0]
    assert found[0] == right[0]
    assert found[1] > 0
    assert right[1] == 0


@pytest.mark.parametrize("recompute", [{"granularity": "selective", "modules": ["layernorm"]}])
def test_direct_layers_leave_recomputation_to_megatron(recompute: dict[str, Any]) -> None:
    run = tiny_run(model={"num_layers": 2})
    run = apply(run, {f"parallel.recompute.{key}": value for key, value in recompute.items()})
    assert run_ranks(1, _trained, run, True)[0][1] == 0
