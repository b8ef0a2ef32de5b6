"""A new run that begins with the weights of another one: what its optimizer updates is made of
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.covering import some
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps, whole_tensors

KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "bf16, sharded state": {"dtype": "bf16", "distributed_optimizer": True},
    "bf16, on two ranks": {"dtype": "bf16", "distributed_optimizer": True, "ranks": 2},
    "bf16, state in host memory": {"dtype": "bf16", "optim": {"cpu_offload": 1.0}},
    "bf16, fsdp": {
        "dtype": "bf16",
        "ranks": 2,
        "fsdp": "megatron",
        "fsdp_sharding": "optim_grads_params",
    },
    "bf16, fsdp2": {"dtype": "bf16", "ranks": 2, "fsdp": "fsdp2"},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
}


def begun(run: Any, weights: Path, folder: Path) -> None:
    """Save the state of a new run with the weights of a checkpoint, before a step and after; a job
    for `run_ranks`.
    """
    from mtrain.ckpt import state as ckpt_state
    from mtrain.ckpt.store import Checkpoint
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        ckpt_state.load_weights(Checkpoint.open(weights), parts.state)
        ckpt_state.save(folder, run, world, parts.state, {})
        train_step(parts, stop_requested=False)
        ckpt_state.save(folder, run, world, parts.state, {})


@pytest.mark.parametrize("name", some(KINDS, ["bf16, sharded state"]))
def test_starting_weights_are_what_is_updated(name: str, tmp_path: Path) -> None:
    run = tiny_run(**KINDS[name])
    other = run.model_copy(update={"trainer": run.trainer.model_copy(update={"seed": 77})})
    ranks = run.parallel.ranks or 1
    run_ranks(ranks, lambda: train_steps(run, 0, save_to=tmp_path / "first"))
    run_ranks(ranks, lambda: begun(other, tmp_path / "first/step_00000000", tmp_path / "second"))
    first = whole_tensors(tmp_path / "first/step_00000000")
    start, end = (whole_tensors(tmp_path / f"second/step_{n:08d}") for n in (0, 1))
    for key, weight in ((k, t) for k, t in first.items() if k.startswith("model/")):
        assert torch.equal(start[key], weight), key
        main = start.get(key.replace("model/", "optim/main_weight/"))
        assert main is None or torch.equal(main.to(weight.dtype), weight), key
        # a step at a rate of 2e-4 moves no weight by much more
        assert float((end[key].float() - weight.float()).abs().max()) < 1e-2, key
