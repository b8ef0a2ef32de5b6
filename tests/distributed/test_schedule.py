"""The learning rate of each update, by schedule, against its formula."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtrain.config.resolve.rates import rate
from mtrain.config.schedules import SCHEDULES
from mtrain.config.schedules.wsd import STYLES
from mtrain.config.schema.precision import PrecisionConfig
from mtrain.config.schema.run import RunConfig
from mtrain.config.schema.schedule import Schedule, progress
from mtrain.errors import TrainingError
from tests.support.forked import run_ranks
from tests.support.runs import tiny_run, train_steps

LR = 1.0
MIN = 0.1
WARMUP = 4
STEPS = 20
RATE = 1e-3


def rates(**optim: Any) -> list[float]:
    """Return the rates of the updates 1 to STEPS."""
    from mtrain.assembly.optim import build_schedule

    run = tiny_run(
        optim={"lr": LR, "min_lr": MIN, "warmup_iters": WARMUP, **optim},
        trainer={"train_iters": STEPS},
    )
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
    schedule = build_schedule(run, optimizer)
    found = []
    for _ in range(STEPS):
        schedule.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def share(step: int) -> float:
    """Return the share of the decay that is over at an update."""
    return (step - WARMUP) / (STEPS - WARMUP)


FORMULAS = {
    "constant": lambda step: LR,
    "linear": lambda step: MIN + (LR - MIN) * (1 - share(step)),
    "cosine": lambda step: MIN + (LR - MIN) * (1 + math.cos(math.pi * share(step))) / 2,
    "inverse_sqrt": lambda step: max(MIN, LR * math.sqrt(WARMUP / step)),
    # 80% of 20 steps is 16, 90% is 18.
    "multi_step": lambda step: [LR, math.sqrt(LR * MIN), MIN][(step > 16) + (step > 18)],
}


@pytest.mark.parametrize("name", FORMULAS)
def test_schedule_warms_up_and_follows_formula(name: str) -> None:
    found = rates(schedule=name)
    assert found[:WARMUP] == pytest.approx([LR * step / WARMUP for step in range(1, WARMUP + 1)])
    assert found[WARMUP:] == pytest.approx(
        [FORMULAS[name](step) for step in range(WARMUP + 1, STEPS + 1)]
    )


def test_schedule_wsd_stays_then_decays() -> None:
    found = rates(schedule="wsd", wsd_decay_iters=5)
    assert found[WARMUP - 1 : STEPS - 5] == pytest.approx([LR] * (STEPS - 5 - WARMUP + 1))
    assert found[STEPS - 5 :] == pytest.approx([LR - (LR - MIN) * i / 5 for i in range(1, 6)])


CURVES = [(name, "linear") for name in SCHEDULES if name != "wsd"]
CURVES += [("wsd", style) for style in STYLES]


@pytest.mark.parametrize(("name", "style"), CURVES)
@pytest.mark.parametrize("end", [STEPS, STEPS - 5])
def test_schedule_factors_equal_megatron_core(name: str, style: str, end: int) -> None:
    optim = {"schedule": name, "wsd_decay_style": style, "decay_iters": end}
    if name == "wsd":
        optim["wsd_decay_iters"] = 5
    found = rates(**optim)
    run = tiny_run(
        optim={"lr": LR, "min_lr": MIN, "warmup_iters": WARMUP, **optim},
        trainer={"train_iters": STEPS},
    )
    planned = [rate(run, step) for step in range(1, STEPS + 1)]
    if name == "inverse_sqrt":  # megatron-core divides two roots, which rounds differently
        assert planned == pytest.approx(found, rel=1e-15)
    else:
        assert planned == found


def test_schedule_own_curve_drives_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Schedule(factor=lambda step, run: 1.0 - progress(step, run) ** 2)
    monkeypatch.setitem(SCHEDULES, "linear", own)
    found = rates(schedule="linear")
    assert found[:WARMUP] == [LR * step / WARMUP for step in range(1, WARMUP + 1)]
    decay = [MIN + (1.0 - share(step) ** 2) * (LR - MIN) for step in range(WARMUP + 1, STEPS + 1)]
    assert found[WARMUP:] == decay


def test_schedule_decay_may_end_early() -> None:
    found = rates(schedule="linear", decay_iters=10)
    assert found[9:] == pytest.approx([MIN] * (STEPS - 9))
    assert found[8] > MIN


def half(steps: int, counts: str = "updates", **precision: Any) -> RunConfig:
    """Return an fp16 run with a warmup over all of its steps."""
    optim = {"lr": RATE, "warmup_iters": 50, "decay_iters": 100, "schedule_counts": counts}
    trainer = {"train_iters": steps, "global_batch_size": 2}
    run = tiny_run(model={"num_layers": 1}, optim=optim, trainer=trainer, dtype="fp16")
    return run.model_copy(update={"precision": PrecisionConfig(dtype="fp16", **precision)})


def fitted(
    run: RunConfig, checkpoint: Path | None = None, folder: Path | None = None
) -> tuple[list[tuple[bool, float]], str]:
    """Return, for each update, whether it was made and its rate, and the fault that ended the run;
    metrics go to `folder`.
    """
    from mtrain.ckpt import state as ckpt_state
    from mtrain.ckpt.store import Checkpoint
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.hooks.base import Hook
    from mtrain.train.hooks.metrics import Metrics
    from mtrain.train.loop.context import TrainContext
    from mtrain.train.loop.result import StepResult
    from mtrain.train.loop.trainer import Trainer
    from mtrain.world.init import joined

    made = []

    class Note(Hook):
        def after_step(self, parts: TrainContext, result: StepResult) -> None:
            made.append((result.updated, result.lr))

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        if checkpoint is not None:
            ckpt_state.load(Checkpoint.open(checkpoint), world, parts.state, seed=run.trainer.seed)
        try:
            Trainer(parts, [Note(), *([Metrics(folder)] if folder else [])]).fit()
        except TrainingError as fault:
            return made, str(fault)
    return made, ""


def strictly(text: str) -> Any:
    """Parse standard JSON, which has no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("counts", "first"), [("updates", 1), ("past_updates", 0), ("steps", None)]
)
def test_schedule_fp16_skips_count_as_configured(counts: str, first: int | None) -> None:
    steps, fault = run_ranks(1, fitted, half(10, counts, initial_loss_scale=2.0**20))[0]
    assert fault == "", "a loss scale that still falls is no fault"
    updated = [made for made, _ in steps]
    rates = [rate * 50 / RATE for _, rate in steps]
    assert updated[0] is False
    assert updated[-2:] == [True, True]
    past = [sum(updated[:i]) for i in range(10)]
    assert rates == pytest.approx([i + 1 if first is None else past[i] + first for i in range(10)])


STUCK = {
    "at its floor from the start": ({"initial_loss_scale": 1e30, "min_loss_scale": 1e30}, 3),
    "that fell to its floor": ({"initial_loss_scale": 2.0**34, "min_loss_scale": 2.0**31}, 5),
}


@pytest.mark.parametrize("scale", STUCK)
def test_schedule_fp16_skipping_every_update_is_a_fault(scale: str) -> None:
    precision, last = STUCK[scale]
    steps, fault = run_ranks(1, fitted, half(8, max_skipped_updates=3, **precision))[0]
    assert [made for made, _ in steps] == [False] * (last - 1)
    assert fault.startswith(f"step {last}: ")
    assert f"precision.min_loss_scale={precision['min_loss_scale']:g}" in fault
    assert "precision.max_skipped_updates=3" in fault


def overflowing(run: RunConfig) -> list[tuple[bool, bytes]]:
    """Return of each step whether it updated, and the weights after it; rank 1 has an infinite
    gradient in step 2.
    """
    from mtrain.train.assemble import assemble, splits_of
    from mtrain.train.loop.step import train_step
    from mtrain.world.init import joined

    with joined(run) as world:
        parts = assemble(run, world, splits_of(run))
        parameters = [*parts.state.chunks[0].parameters()]
        config = parts.state.chunks[0].config
        finalize = config.finalize_model_grads_func

        def poisoned(*args: Any, **more: Any) -> Any:
            if world.rank == 1 and parts.state.step == 1:
                parameters[0].main_grad.view(-1)[0] = math.inf
            return finalize(*args, **more)

        config.finalize_model_grads_func = poisoned
        found = []
        for _ in range(3):
            updated = train_step(parts, stop_requested=False).updated
            weights = (one.detach().float().numpy().tobytes() for one in parameters)
            found.append((updated, b"".join(weights)))
        return found


def test_schedule_fp16_overflow_of_one_rank_skips_on_all() -> None:
    run = tiny_run(ranks=2, model={"num_layers": 1}, dtype="fp16")
    precision = PrecisionConfig(dtype="fp16", initial_loss_scale=16.0)
    run = run.model_copy(update={"precision": precision})
    first, other = run_ranks(2, overflowing, run)
    assert first == other
    assert [updated for updated, _ in first] == [True, False, True]
    weights = [held for _, held in first]
    assert weights[0] == weights[1]
    assert weights[1] != weights[2]


def test_schedule_skipped_metrics_are_json_after_resume(tmp_path: Path) -> None:
    run = half(3, initial_loss_scale=2.0**40)
    file = tmp_path / "metrics.jsonl"
    run_ranks(1, lambda: train_steps(run, 1, save_to=tmp_path))
    # as it was once written
    file.write_text('{"step": 1, "loss": 5.0, "grad_norm": NaN, "tokens_per_s": Infinity}\n')
    run_ranks(1, fitted, run, tmp_path / "step_00000001", tmp_path)
    lines = [strictly(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["grad_norm"] for line in lines] == [None, None, None]
    assert [line.get("loss_scale") for line in lines[1:]] == [2.0**40, 2.0**39]
    assert lines[2]["skipped"] is True


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("hysteresis", "scales"), [(1, [40, 39, 38, 37]), (2, [40, 40, 39, 38]), (3, [40, 40, 40, 39])]
)
def test_schedule_loss_scale_falls_as_configured(
    hysteresis: int, scales: list[int], tmp_path: Path
) -> None:
    run = half(4, initial_loss_scale=2.0**40, loss_scale_hysteresis=hysteresis)
    run_ranks(1, fitted, run, None, tmp_path)
    lines = [strictly(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] for line in lines] == [2.0**scale for scale in scales]


def test_schedule_short_run_without_updates_is_a_fault() -> None:
    _, fault = run_ranks(1, fitted, half(2, initial_loss_scale=1e30, min_loss_scale=1e30))[0]
    assert fault.startswith("step 2: ")


def test_schedule_resume_counts_earlier_skips(tmp_path: Path) -> None:
    run = half(8, max_skipped_updates=3, **STUCK["at its floor from the start"][0])
    run_ranks(1, lambda: train_steps(run, 2, save_to=tmp_path))
    _, fault = run_ranks(1, fitted, run, tmp_path / "step_00000002")[0]
    assert fault.startswith("step 3: ")
