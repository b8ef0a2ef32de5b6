"""CUDA graphs of layers that TransformerEngine captures between two steps."""

from __future__ import annotations

from mtrain.config.schema.run import RunConfig
from mtrain.mcore.adapter.cuda_graphs import CapturedLayers
from mtrain.train.hooks.base import Hook
from mtrain.train.loop.context import TrainContext
from mtrain.train.loop.result import StepResult


class Graphs(Hook):
    """Captures this rank's layers after `trainer.cuda_graph_warmup_steps` steps of this process."""

    collective = True

    def __init__(self, run: RunConfig) -> None:
        self.waits = run.trainer.cuda_graph_warmup_steps

    def waits_for(self, context: TrainContext, step: int) -> bool:
        """Return whether layers are still to be captured, between two steps."""
        return bool(self.waits)

    def after_step(self, context: TrainContext, result: StepResult) -> None:
        """Count the step, and capture once."""
        if not self.waits:
            return
        self.waits -= 1
        if not self.waits:
            # Counted in steps of this process: a resumed run captures again.
            run = context.run
            state = context.state
            micro = run.trainer.micro
            layers = CapturedLayers(
                state.chunks, state.optimizer, run.data.length, micro, run.micro_batches
            )
            layers.capture(gathers=bool(run.parallel.overlap_param_gather))
