"""Two steps of small runs with an objective, and the layouts that must not change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.objective import ObjectiveConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, whole_tensors

FEW = {"vocab_size": 140, "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
MOE = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32, "aux_loss_coeff": 0.1}}
LORA = PeftConfig(kind="lora", r=4, alpha=8.0)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2sp": {"ranks": 2, "tp": 2, "sequence_parallel": True},
    "pp2": {"ranks": 2, "pp": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "dp2": {"ranks": 2, "distributed_optimizer": True},
    "tp2pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "pp2dp2": {"ranks": 4, "pp": 2, "micro": 4},
    "ep2": {"ranks": 2, "ep": 2, "moe": True},
    "micro4": {"micro": 4},
    "micro8": {"micro": 8},
}
OF_THE_LOOP = ("stops", "due", "read", "flops", "full_flops")
"""Numbers of a step that are no metrics of its objective."""


def run_of(
    objective: str = "dpo", micro: int = 2, peft: PeftConfig | None = None, **given: Any
) -> RunConfig:
    """Return a run of two layers, with experts if `moe` is given; `keys` are of its objective."""
    keys = given.pop("keys", {})
    trainer = {"micro_batch_size": micro, "global_batch_size": 8}
    model = FEW | (MOE if given.pop("moe", False) else {})
    run = tiny_run(model=model, trainer=trainer, **given)
    sections = {
        "objective": ObjectiveConfig(name=objective, **keys),
        "peft": peft or PeftConfig(),
    }
    return resolve(run.model_copy(update=sections), Machine(cpu_cores=1, memory_bytes=0))


def two_steps(run: RunConfig, folder: Path) -> list[dict[str, float]]:
    """Return the metrics of two steps of a rank, and write their gradients below `folder`."""
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.train.verify.prove import record_gradients
    from mtrain.world.init import joined

    with joined(run) as world:
        context = assemble(run, world, splits_of(run))
        found = []
        for step in range(2):
            record_gradients(context, folder / str(step))
            if context.critic is not None:
                record_gradients(context.critic, folder / "critic" / str(step))
            result = train_step(context, stop_requested=False)
            row = dict(result.metrics)
            for measure in context.measures:
                row |= measure(context, result)
            found.append({name: value for name, value in row.items() if name not in OF_THE_LOOP})
    return found


def require_same_steps(
    run: RunConfig, folder: Path, wanted: list[dict[str, float]], whole: Path
) -> None:
    """Assert that two steps of a layout have the metrics `wanted`, and the gradients in `whole`."""
    for steps in run_ranks(run.parallel.ranks, two_steps, run, folder):
        for step, same in zip(steps, wanted, strict=True):
            assert step == {k: pytest.approx(v, rel=2e-5, abs=1e-6) for k, v in same.items()}
    steps = ["0", "1", *(f"critic/{step}" for step in "01" if (whole / "critic").exists())]
    for step in steps:
        inside = Path(step) / "step_00000000"
        here = whole_tensors(folder / inside)
        for name, value in whole_tensors(whole / inside).items():
            assert torch.allclose(here[name], value, rtol=1e-4, atol=1e-6), name
