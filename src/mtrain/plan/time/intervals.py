"""Intervals in minutes, in steps: for programs that count only steps."""

from __future__ import annotations

from mtrain.config.schema.run import RunConfig
from mtrain.plan.time.step import step_time, unknown

USUAL = 1000
"""Steps where nobody knows how long one takes: Megatron-LM's own interval of evaluations."""


def in_steps(run: RunConfig) -> RunConfig:
    """Return the run with intervals in steps for those in minutes, by the predicted time of a step,
    to two digits.
    """
    t = run.trainer
    c = run.checkpoint
    minutes = t.eval_minutes, c.save_minutes
    if minutes == (None, None):
        return run
    seconds = None if unknown(run) else step_time(run).seconds
    evaluated, saved = (_steps(m, seconds, t.steps) for m in minutes)
    trainer = {"eval_interval": t.eval_interval or evaluated, "eval_minutes": None}
    checkpoint = {"save_interval": c.save_interval or saved, "save_minutes": None}
    return run.model_copy(
        update={
            "trainer": t.model_copy(update=trainer),
            "checkpoint": c.model_copy(update=checkpoint),
        }
    )


def _steps(minutes: float | None, seconds: float | None, most: int) -> int:
    if minutes is None:
        return 0
    steps = USUAL if seconds is None else round(float(f"{60 * minutes / seconds:.2g}"))
    return min(max(1, steps), most)
