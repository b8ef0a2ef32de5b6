"""A step that looks wrong is computed again; the data, or the device of a rank, is named."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from mtrain.config.schema.run import RunConfig
from mtrain.world import faults
from tests.support.forked import import_engine, run_ranks
from tests.support.runs import tiny_run

MODEL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64}
MODEL |= {"num_attention_heads": 4, "num_query_groups": 2}
SHARDED = {"distributed_optimizer": True}
EXPERTS = {"moe": {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 32}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"ranks": 2},
    "tp2": {"ranks": 2, "tp": 2},
    "dp3": {"ranks": 3},
    "tp2dp2": {"ranks": 4, "tp": 2, "sequence_parallel": True},
    "pp2dp2": {"ranks": 4, "pp": 2, **SHARDED},
    "vpp2": {"ranks": 2, "pp": 2, "vpp": 2},
    "cp2": {"ranks": 2, "cp": 2},
    "ep2dp4": {"ranks": 4, "ep": 2, **SHARDED},
    "overlapped": {
        "ranks": 2,
        **SHARDED,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}
EACH_STEP = {"rerun": "every_n", "rerun_interval": 1}


def watched(name: str, steps: int, **keys: Any) -> RunConfig:
    trainer = {
        "train_iters": steps,
        "global_batch_size": 16 if "ep" in LAYOUTS[name] else 12,
        "micro_batch_size": 2,
    }
    layout = {"distributed_optimizer": False} | LAYOUTS[name]
    model = MODEL | (EXPERTS if "ep" in layout else {}) | {"hidden_dropout": 0.1}
    model |= {"num_layers": 4 if "vpp" in layout else 2}
    run = tiny_run(model=model, trainer=trainer, optim={"warmup_iters": 1}, **layout)
    resilience = run.resilience.model_copy(update={"rerun": "on_anomaly"} | keys)
    log = run.log.model_copy(update={"progress": "none"})
    checkpoint = run.checkpoint.model_copy(update={"save_interval": None})
    return run.model_copy(update={"resilience": resilience, "log": log, "checkpoint": checkpoint})


def train(
    run: RunConfig, home: Path, fault: str = "", spike: int = 0
) -> tuple[str, int | None, list[dict[str, Any]], int]:
    """Train on this rank with an injected fault, or with odd samples in the step `spike`.

    Returns:
        The error, the rank at fault, the attributions, and the steps that were computed again.
    """
    from mtrain.data.samples.mock import MockSamples
    from mtrain.errors import TrainingError
    from mtrain.mcore import api
    from mtrain.train.run import Paths
    from mtrain.train.run import train as train_rank
    from mtrain.train.suspects import rerun
    from mtrain.train.suspects.rerun import Suspects

    rerun.LEAST = 2
    home.mkdir(parents=True, exist_ok=True)
    faults.arm([fault] if fault else [], dist.get_rank())
    real = MockSamples.batch
    size = run.trainer.batch
    made: list[Suspects] = []
    init = Suspects.__init__

    def batch(samples: Any, numbers: Any, *more: Any) -> Any:
        found = real(samples, numbers, *more)
        odd = np.asarray(numbers) // size == spike - 1
        found[odd] = np.random.RandomState(spike).randint(0, samples.vocab_size, found.shape[1])
        return found

    def noted(suspects: Suspects, config: Any) -> None:
        init(suspects, config)
        made.append(suspects)

    error = ""
    rank = None
    MockSamples.batch = batch if spike else real  # type: ignore[method-assign]
    Suspects.__init__ = noted  # type: ignore[method-assign]
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            train_rank(run, lambda _: Paths(home), lambda *_: None)
    except TrainingError as failed:
        error = str(failed)
        rank = failed.rank
        api.parallel_state.destroy_model_parallel()
    finally:
        MockSamples.batch = real  # type: ignore[method-assign]
        Suspects.__init__ = init  # type: ignore[method-assign]
    dist.barrier()
    lines = map(json.loads, (home / "metrics.jsonl").read_text().splitlines())
    found = [line["attribution"] for line in lines if "attribution" in line]
    return error, rank, found, made[0].checked if made else 0


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_suspect_steps_of_layout_name_only_the_culprit(name: str, tmp_path: Path) -> None:
    import_engine()
    ranks = LAYOUTS[name]["ranks"]
    flips = [f"flip_{what}@3:{ranks - 1}" for what in ("weight", "gradient", "activation")]

    def job() -> list[Any]:
        clean = train(watched(name, 3, **EACH_STEP), tmp_path / "clean")
        run = watched(name, 3, **EACH_STEP)
        return [clean, *(train(run, tmp_path / fault, fault) for fault in flips)]

    for clean, *flipped in run_ranks(ranks, job):
        assert clean == ("", None, [], 3)
        for error, rank, found, _ in flipped:
            print(name, error, rank, found)
            assert rank == ranks - 1, error
            assert [each["kind"] for each in found] == ["device"]
