"""Validation loss during a run and at its end."""

from __future__ import annotations

import math

from mtrain.models.registry import family_of
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.interruptions import EVALUATE
from mtrain.train.loop.step import StepResult, TrainContext, summed


class Evaluation(Hook):
    """Validation loss during the run and after it."""

    collective = True

    def __init__(self, metrics: Metrics, progress: Progress) -> None:
        self.metrics = metrics
        self.progress = progress
        self.last: tuple[int, float] | None = None
        self.tried = -1
        """The step after which it evaluated last, or was about to."""

    def start(self, context: TrainContext) -> None:
        """Evaluate where a resumed run was stopped, or ended, before it had done so after its last
        step.
        """
        if self._is_due(context) and context.state.step < context.run.trainer.steps:
            owes = (
                self.metrics.owes(context.state.step, "valid") if context.world.is_rank0 else False
            )
            if context.world.tell("owes" if owes else "") == "owes":
                self._evaluate(context)

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Evaluate every `trainer.eval_interval` steps, and every `trainer.eval_minutes`."""
        # of several steps that are told at once, the model is that of the last
        if result.step == context.state.step and (
            self._is_due(context) or context.by_time.now & EVALUATE
        ):
            self._evaluate(context)

    def finish(self, context: TrainContext) -> None:
        """Evaluate after the last step, unless that was just done; a run that was stopped is not at
        its end.
        """
        if self.tried != context.state.step and context.state.step >= context.run.trainer.steps:
            self._evaluate(context)

    def _is_due(self, context: TrainContext) -> bool:
        interval = context.run.trainer.eval_interval
        step = context.state.step
        return bool(interval) and step > 0 and step % (interval or 1) == 0

    def _evaluate(self, context: TrainContext) -> None:
        """Evaluate, unless a rank is asked to stop before that is done; a resumed run makes up for
        it.
        """
        iters = context.run.trainer.eval_iters
        self.tried = context.state.step
        context.by_time.done(EVALUATE)
        if context.valid_data is None or not iters:
            return
        found = (
            None if context.stops else summed(context, context.valid_data, iters, until_stop=True)
        )
        if found is None:
            context.stops = True
            what = f"the evaluation of step {context.state.step}"
            if context.state.step >= context.run.trainer.steps:
                what = "the run is finished, its last evaluation"
            self.progress.note(f"stopped on request: {what} is left out")
            return
        nats, tokens = found
        loss = nats / max(1, tokens)
        samples = context.valid_data.counted
        self.last = (context.state.step, loss)
        self.metrics.evaluation(context.state.step, "valid", loss, samples, tokens)
        model = context.run.model
        if family_of(model).tokens_alone(model):
            perplexity = f"perplexity {math.exp(min(loss, 700.0)):.1f}"
        else:
            perplexity = ""
        over = "; ".join(filter(None, (perplexity, model.padding_in_words)))
        said = f"validation loss {loss:.4f}" + (f" ({over})" if over else "")
        asked = iters * context.run.trainer.batch
        few = f", all that there are of {asked} that are asked for" if samples < asked else ""
        self.progress.note(f"step {context.state.step}: {said} over {samples} samples{few}")
