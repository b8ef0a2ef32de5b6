"""A text that the model of a finished run writes."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from mtrain.ckpt import state as ckpt_state
from mtrain.data import Splits
from mtrain.data.text.tokenizer import Tokenizer
from mtrain.errors import MtrainError, warn
from mtrain.mcore.state.sharding import gathered
from mtrain.models.registry import family_of
from mtrain.train.generate.sampler import Sampler
from mtrain.train.generate.texts import encoded
from mtrain.train.hooks.base import Hook, reason
from mtrain.train.hooks.checkpoints import Checkpoints
from mtrain.train.hooks.progress import Progress
from mtrain.train.loop.context import TrainContext

STOPPED = "stopped on request"
UNKNOWN = "the reason is unknown"


class RanksApart(Exception):
    """A rank of a finished run failed where others wait for it, so the ranks can no longer end
    together; nothing is lost by it.
    """


class Sample(Hook):
    """A text from the checkpoint that was saved, or from the weights as they are.

    The run is finished and saved: a failure is a warning, and a stop ends the text.
    """

    collective = True

    def __init__(
        self, splits: Splits, checkpoints: Checkpoints, resumed: Path | None, progress: Progress
    ) -> None:
        """Sample after the run; `resumed` is the checkpoint that the run went on from."""
        self.tokenizer = splits.tokenizer
        self.checkpoints = checkpoints
        self.resumed = resumed
        self.progress = progress
        self.begun_at = 0

    def start(self, context: TrainContext) -> None:
        """Note the first step: a run without a step still has the checkpoint that it resumed."""
        self.begun_at = context.state.step

    def after_run(self, context: TrainContext) -> None:
        """Write the text.

        Raises:
            RanksApart: this rank failed where others wait for it.
        """
        run = context.run
        wanted = run.trainer.sample_tokens and family_of(run.model).writes
        if not wanted or self.tokenizer is None:
            return
        checkpoint = self._checkpoint(context)
        try:
            # Whatever is raised in here may have left other ranks in a collective.
            ids, problem = self._written(context, self.tokenizer, checkpoint)
        except Exception as error:
            # torch's error of a store: it ended with a rank that has warned already
            with suppress(RuntimeError):
                if context.world.store.add("sample failed", 1) == 1:
                    _warn(f"rank {context.world.rank}: {reason(error)}")
            raise RanksApart from error
        if context.world.is_rank0:
            self._show(self.tokenizer, checkpoint, ids, problem)

    def _checkpoint(self, context: TrainContext) -> Path | None:
        """Return the checkpoint that holds the weights as they are now, if there is one."""
        if self.checkpoints.saved_step != context.state.step:
            return None
        if self.checkpoints.path is not None:
            return self.checkpoints.path
        return self.resumed if context.state.step == self.begun_at else None

    def _written(
        self, context: TrainContext, tokenizer: Path, checkpoint: Path | None
    ) -> tuple[list[int] | None, str]:
        """Return the tokens and a problem; None and "" if a stop ended the text.

        Each rank may have a problem of its own: all learn the first one before they go on together.
        """
        run = context.run
        world = context.world
        chunks = context.state.chunks
        problem = ""
        prompt: list[int] = []
        with gathered(chunks):
            sampler = Sampler(run, world, chunks)
            try:
                prompt = encoded(Tokenizer(tokenizer), run.trainer.sample_prompt)
                if context.stop_requested:
                    problem = STOPPED
            except Exception as error:
                problem = reason(error) or UNKNOWN
            # All ranks have to agree before any of them enters the pipeline.
            problem = world.first_problem(problem)
            if not problem and sampler.context and checkpoint is not None:
                try:
                    ckpt_state.load_model(ckpt_state.opened(checkpoint, run, world), chunks)
                except Exception as error:
                    problem = reason(error) or UNKNOWN
                problem = world.first_problem(problem)
            if problem:
                return None, problem
            stop = partial(getattr, context, "stop_requested")
            tokens = run.trainer.sample_tokens
            return sampler.generate(prompt, tokens, temperature=0.8, stop=stop), ""

    def _show(
        self, tokenizer: Path, checkpoint: Path | None, ids: list[int] | None, problem: str
    ) -> None:
        if problem and problem != STOPPED:
            _warn(problem)
        elif ids is None:
            self.progress.note(f"{STOPPED}: the run is finished, its sample is left out")
        else:
            source = "the trained weights, which were not saved"
            if checkpoint is not None:
                source = checkpoint.name
            try:
                self.progress.note(f"sample from {source}:\n{Tokenizer(tokenizer).decode(ids)}")
            except Exception as error:  # the file of the tokenizer may be gone
                _warn(reason(error))


def _warn(why: str) -> None:
    warn(f"no text sample: {why}; the run itself is finished")


def end_after_run(error: MtrainError, speaks: bool) -> None:
    """End a process, from any thread, that hangs after a finished run: its work is done."""
    if speaks:
        os.write(2, f"warning: no text sample: {error}; the run itself is finished\n".encode())
    os._exit(0)
