"""Validation loss during a run and at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mtrain.goodput.meter import EVALUATING
from mtrain.models.registry import family_of
from mtrain.train.hooks.base import Hook
from mtrain.train.hooks.metrics import Metrics
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.interruptions import EVALUATE
from mtrain.train.loop.result import StepResult
from mtrain.train.loop.step import summed


class Evaluation(Hook):
    """Validation loss every `trainer.eval_interval` steps or `trainer.eval_minutes`, and at the
    end.
    """

    collective = True
    cause = EVALUATING

    def __init__(
        self, metrics: Metrics, progress: Progress, entropy_nats: float | None = None
    ) -> None:
        """Report to `progress`; the last loss next to the unigram entropy of the corpus, if known.

        `metrics` knows which evaluation a resumed run owes.
        """
        self.metrics = metrics
        self.progress = progress
        self.entropy_nats = entropy_nats
        self.last: tuple[int, float] | None = None
        """Step and loss."""
        self.tried = -1
        """The step after which it evaluated last, or was about to."""

    def start(self, context: TrainContext) -> None:
        """Evaluate where a resumed run was stopped, or ended, before it had done so after its last
        step.
        """
        if self._is_due(context) and context.state.step < context.run.trainer.steps:
            owes = context.world.is_rank0 and self.metrics.owes(context.state.step, "valid")
            if context.world.tell("owes" if owes else "") == "owes":
                self._evaluate(context)

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Evaluate at the interval, or when it is time."""
        # Of several steps that are reported at once, the model is that of the last.
        if result.step != context.state.step:
            return
        if self._is_due(context) or context.by_time.now & EVALUATE:
            self._evaluate(context)

    def finish(self, context: TrainContext) -> None:
        """Evaluate after the last step, unless that was just done; a run that was stopped is not at
        its end.
        """
        if self.tried != context.state.step and context.state.step >= context.run.trainer.steps:
            self._evaluate(context)

    def after_run(self, context: TrainContext) -> None:
        """Compare the last loss with the entropy of tokens drawn by their frequency."""
        comparable = family_of(context.run.model).tokens_alone(context.run.model)
        o = context.run.objective
        comparable = comparable and not (o.answers or o.distils)
        if self.last is None or self.entropy_nats is None or not comparable:
            return
        step, loss = self.last
        if step == context.state.step:
            side = "below" if loss < self.entropy_nats else "not below"
            self.progress.note(
                f"final validation loss {loss:.4f} nats, {side} the corpus' unigram entropy"
                f" {self.entropy_nats:.4f}"
            )

    def _is_due(self, context: TrainContext) -> bool:
        interval = context.run.trainer.eval_interval
        step = context.state.step
        return interval > 0 and step > 0 and step % interval == 0

    def _evaluate(self, context: TrainContext) -> None:
        """Evaluate, unless a rank gets a request to stop before it is done; a resumed run makes up
        for it.
        """
        iters = context.run.trainer.eval_iters
        self.tried = context.state.step
        context.by_time.done(EVALUATE)
        if not iters or (context.valid_data is None and context.valid_answers is None):
            return
        means: Mapping[str, float] | None = None
        if not context.stops and context.valid_answers is not None:
            means = context.valid_answers(context)
        elif not context.stops:
            assert context.valid_data is not None
            means = summed(context, context.valid_data, iters, until_stop=True)
        if means is None:
            context.stops = True
            what = f"the evaluation of step {context.state.step}"
            if context.state.step >= context.run.trainer.steps:
                what = "the run is finished, its last evaluation"
            self.progress.note(f"stopped on request: {what} is left out")
            return
        if context.valid_answers is not None:
            self._report_answers(context, means)
            return
        assert context.valid_data is not None
        loss = means["loss"]
        samples = context.valid_data.counted
        self.last = (context.state.step, loss)
        metrics: dict[str, float] = {
            "valid_loss": loss,
            "valid_samples": samples,
            "valid_tokens": int(means["tokens"]),
        }
        if context.run.objective.pairs or context.run.objective.distils:
            metrics |= {f"valid_{name}": means[name] for name in context.table.extra}
        context.hooks.log(context, context.state.step, metrics)
        context.hooks.call("after_evaluation", context, loss)
        line = _line(context, loss, samples)
        if "valid_reward_accuracy" in metrics:
            line += f", accuracy {metrics['valid_reward_accuracy']:.1%}"
        self.progress.note(line)

    def _report_answers(self, context: TrainContext, means: Mapping[str, float]) -> None:
        """Report the rewards of answers; their loss is minus the mean reward, so that what keeps
        the checkpoint with the least loss keeps the best.
        """
        step = context.state.step
        loss = -means["reward"]
        self.last = (step, loss)
        metrics = {"valid_loss": loss, **{f"valid_{name}": x for name, x in means.items()}}
        context.hooks.log(context, step, metrics)
        context.hooks.call("after_evaluation", context, loss)
        self.progress.note(f"step {step}: {answers_line(means)}")


def answers_line(means: Mapping[str, float]) -> str:
    """Return the rewards of an evaluation in words."""
    best = next(name for name in means if name.startswith("pass_at_"))
    return (
        f"mean reward {means['reward']:.4f}, {means['pass_share']:.1%} of answers pass, and"
        f" {means[best]:.1%} of prompts with {best.removeprefix('pass_at_')} answers, over"
        f" {int(means['samples'])} answers"
    )


def _line(context: TrainContext, loss: float, samples: int) -> str:
    model = context.run.model
    perplexity = ""
    o = context.run.objective
    if family_of(model).tokens_alone(model) and not (o.pairs or o.distils):
        # exp overflows above 709 nats
        perplexity = f"perplexity {math.exp(min(loss, 700.0)):.1f}"
    over = "; ".join(filter(None, (perplexity, model.padding_in_words)))
    line = f"step {context.state.step}: validation loss {loss:.4f}"
    if over:
        line += f" ({over})"
    wanted = context.run.trainer.eval_iters * context.run.trainer.batch
    few = f", all samples of the {wanted} requested" if samples < wanted else ""
    return f"{line} over {samples} samples{few}"
