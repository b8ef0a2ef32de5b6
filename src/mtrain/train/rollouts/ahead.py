"""Rollouts one step ahead: a server samples the answers of the next step while a step trains.

Weights are pushed only here, while no request is under way, so an answer has one version of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.train.generate.request import Sampling
from mtrain.train.loop.context import TrainContext
from mtrain.train.rollouts.engine import Prompt
from mtrain.train.rollouts.engines import push
from mtrain.train.rollouts.server import ServerEngine
from mtrain.world.heartbeat import begin_phase


class Ahead:
    """The answers that a server samples next; all ranks call its methods together."""

    def __init__(self, context: TrainContext, engine: ServerEngine) -> None:
        self._context = context
        self._engine = engine
        self._pushed: int | None = None

    def require(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Request answers for the next call of `generate` unless they are under way: in the first
        step, after a resume, and where a run leaves samples out.

        A resumed run gets them from the weights that had sampled them before, if these still exist.

        Raises TrainingError if the server does not take the weights.
        """
        if self._engine.under_way(prompts):
            return
        state = self._context.state
        older = state.sampled
        bound = self._context.run.objective.max_staleness
        if older is not None and state.step - older <= bound and self._engine.restore(older):
            self._pushed = older
            self._engine.begin(prompts, sampling)
            return
        self.begin(prompts, sampling)

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Push the weights as they are, and request answers; raises as `require` does."""
        state = self._context.state
        begin_phase("rollouts")
        if self._pushed != state.step:
            push(self._context, self._engine)
            self._pushed = state.step
        self._engine.begin(prompts, sampling)
        state.sampled = state.step

    def end(self) -> None:
        """Note that no answers are under way after the last step."""
        self._context.state.sampled = None
