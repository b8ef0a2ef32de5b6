"""Activations that wait in host memory leave the device, come back unchanged and change no number:
the copies, the order and the pools of megatron-core, with the CPU as the device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from mtrain.config.engine import release
from mtrain.config.schema.parallel import ActivationOffloadConfig
from mtrain.config.schema.run import RunConfig
from tests.support import tiny
from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.offloading import let_offload, still_held, watched_copies
from tests.support.runs import tiny_run, train_steps

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(release.at_least(0, 19), reason="0.19 copies only tensors of CUDA"),
]

DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
CASES: dict[str, dict[str, Any]] = {
    "attn_norm": {"modules": ("attn_norm",)},
    "qkv_linear": {"modules": ("qkv_linear",)},
    "core_attn": {"modules": ("core_attn",)},
    "mlp_norm": {"modules": ("mlp_norm",)},
    "attention": {"modules": ("core_attn", "attn_proj")},
    "all": {"modules": DENSE},
    "all tp2": {"modules": DENSE, "ranks": 2, "tp": 2},
    "all pp2": {"modules": DENSE, "ranks": 2, "pp": 2},
    "all pp2vpp2": {"modules": DENSE, "ranks": 2, "pp": 2, "vpp": 2},
    "recomputed norms": {
        "modules": ("core_attn", "attn_proj"),
        "recompute": {"granularity": "selective", "modules": ("layernorm",)},
    },
}
STEPS = 3


def run_of(modules: tuple[str, ...] | None = None, **keys: Any) -> RunConfig:
    """Return a tiny run in which every tensor of these modules is copied."""
    offload = {"modules": modules, "min_tensor_elements": 1 if modules else None}
    return tiny_run(activation_offload=ActivationOffloadConfig(**offload), **keys)


def steps_of(run: RunConfig) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step; a job for a rank."""
    let_offload()
    return train_steps(run, STEPS)


@pytest.mark.parametrize("name", some(CASES, ["all", "all pp2vpp2"]))
def test_activation_offload_changes_no_number(name: str) -> None:
    keys = dict(CASES[name])
    modules = keys.pop("modules")
    ranks = keys.get("ranks", 1)
    plain = run_ranks(ranks, steps_of, run_of(**keys))
    assert run_ranks(ranks, steps_of, run_of(modules, **keys)) == plain


class Copied(NamedTuple):
    """Bytes of a micro-batch that were copied to the host."""

    all: int
    between: int
    """Bytes among them whose memory was still held between forward and backward."""
    left: int
    """Buffers of host memory that were still in use after the backward."""


def copied(modules: list[str]) -> Copied:
    """Return the copies of one micro-batch; a job for one rank."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    let_offload()
    seen = watched_copies()
    tiny.start_world()
    on = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
    net = tiny.model(tiny.config(**on, offload_modules=modules), wrap=False)
    losses = tiny.forward_step(iter([tiny.batch()]), net)[0]
    between = still_held(seen)
    losses.mean().backward()
    pool = offload.PipelineOffloadManager.get_instance().cpu_tensor_pool
    return Copied(sum(size for _, size in seen), between, pool._stats["current_in_use"])


# Bytes of the residual stream, which the next module reads, too.
STREAM = tiny.BATCH * tiny.TOKENS * 32 * 4


def test_activation_offload_frees_device_and_host() -> None:
    found = run_ranks(1, copied, ["core_attn", "attn_proj"])[0]
    assert found.all >= 2 * 2 * STREAM, "queries and what attention gives, of two layers"
    assert found.between == 0
    assert found.left == 0


def test_activation_offload_sees_device_memory_that_stays() -> None:
    def kept() -> Copied:
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

        held = []
        original = offload.ChunkOffloadHandler.offload

        def holding(self: Any, tensor: torch.Tensor, **how: Any) -> Any:
            held.append(tensor.view_as(tensor))
            return original(self, tensor, **how)

        offload.ChunkOffloadHandler.offload = holding
        return copied(["qkv_linear"])

    found = run_ranks(1, kept)[0]
    assert found.between == found.all > 0


def evaluated(run: RunConfig, *, between: bool) -> list[tuple[float, float]]:
    """Return loss and gradient norm of two steps, with or without an evaluation around the first; a
    job for a rank.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import evaluate, train_step
    from mtrain.world.init import joined

    let_offload()
    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        found = []
        for _ in range(2):
            if between:
                evaluate(parts, parts.valid_data, 1)
            found.append(train_step(parts, stop_requested=False))
        return [(step.loss, step.grad_norm) for step in found]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_activation_offload_evaluation_changes_nothing(ranks: int) -> None:
    run = run_of(DENSE, ranks=ranks, pp=ranks, trainer={"eval_iters": 1, "eval_interval": 1})
    alone = run_ranks(ranks, partial(evaluated, run, between=False))
    assert run_ranks(ranks, partial(evaluated, run, between=True)) == alone
