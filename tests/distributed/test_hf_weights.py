"""Weights of a run in progress: those that an export of its checkpoint has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.covering import some
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run

MOE = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2sp": ("llama", {}, {"ranks": 2, "tp": 2, "sequence_parallel": True}),
    "pp2vpp2 bf16": ("llama", {}, {"ranks": 2, "pp": 2, "vpp": 2, "dtype": "bf16"}),
    "ep2pp2": ("mixtral", MOE, {"ranks": 4, "ep": 2, "pp": 2}),
    "fsdp2": ("llama", {}, {"ranks": 2, "fsdp": "fsdp2"}),
    "dp2 distributed": ("llama", {}, {"ranks": 2, "distributed_optimizer": True}),
}


def both(run: Any, kind: str, folder: Path) -> Any:
    """Return the weights of a trained run, and on rank 0 those of its checkpoint."""
    from mtrain.ckpt import state as ckpt_state
    from mtrain.convert.boxes import model_boxes
    from mtrain.convert.checkpoint_reader import CheckpointReader
    from mtrain.convert.exporter import Weights
    from mtrain.convert.huggingface.model import tables
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.rollouts.hf_weights import hf_weights
    from mtrain.world.init import joined

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        train_step(context, stop_requested=False)
        found = {
            name: tensor.view(torch.uint8).numpy()
            for name, tensor in hf_weights(run, world, context.state.chunks, kind)
        }
        saved = ckpt_state.save(folder, run, world, context.state, {})
        if not world.is_rank0:
            return found, None
        table = tables(kind, run.model)[0]
        weights = Weights(CheckpointReader.open(saved), run, table, model_boxes(run))
        steps = weights.found.steps
        held = {name: one.words for step in steps for name, one in weights.of_step(step, None)}
        return found, {name: words.view(np.uint8) for name, words in held.items()}


@pytest.mark.parametrize("name", some(LAYOUTS, ["tp2sp"]))
def test_hf_weights_in_progress_are_those_of_the_export(name: str, tmp_path: Path) -> None:
    import_engine()
    kind, model, given = LAYOUTS[name]
    run = tiny_run(model=model, **given)
    (first, expected), *others = run_ranks(run.parallel.ranks, both, run, kind, tmp_path)
    for found in (first, *(one for one, _ in others)):
        assert found.keys() == expected.keys()
        assert [key for key in found if not np.array_equal(found[key], expected[key])] == []
