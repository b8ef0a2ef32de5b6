"""The section `checkpoint`: what a run saves, where, and what it starts from."""

from typing import Annotated, Literal

from mtrain.config.schema.base import (
    Effect,
    Key,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)


class UnresolvedCheckpoint(Section):
    """`checkpoint`: when state is saved, and what a run starts from."""

    save_interval: Annotated[NonNegativeInt | None, Key(aka="save_steps", unit="steps")] = None
    """Steps between checkpoints; 0: only at the end, and by save_minutes.

    null: on a CPU 40; elsewhere 0.
    """
    save_minutes: Annotated[PositiveFloat | None, Key(unit="minutes")] = None
    """Minutes between checkpoints, by the clock of rank 0. null: not by time; if save_interval is
    null too and the run is on GPUs, 30.
    """
    save_final: bool = True
    """Save after the last step."""
    keep: PositiveInt | None = 2
    """The number of newest checkpoints to keep; null: all."""
    keep_every: Annotated[PositiveInt | None, Key(when="checkpoint.keep", unit="steps")] = None
    """Steps between checkpoints that stay for good: those whose step is a multiple of it. null:
    none.
    """
    keep_best: Annotated[Literal["valid_loss"] | None, Key(when="checkpoint.keep")] = None
    """The value of an evaluation whose lowest checkpoint stays, too; null: none. A checkpoint
    without an evaluation at its own step counts with the last one before it.
    """
    resume: Annotated[str | None, Key(effect=Effect.CONTENTS, aka="load")] = None
    """`auto`: continue the run that the same launch started (with `log.name`: the run of that
    name), or start one. `latest`: continue the newest run of this configuration. Otherwise a run
    folder or a checkpoint folder. null: a new run; under a launcher that restarts failed runs,
    `auto`.
    """
    init_from: Annotated[str | None, Key(effect=Effect.NUMERICS, aka="pretrained finetune")] = None
    """Weights that a new run starts from: a run or checkpoint folder, or a Hugging Face folder;
    null: drawn from trainer.seed. If no model is chosen, the model is theirs. Optimizer, schedule
    and data start at step 0; a resumed run has weights of its own.
    """
    accept_changes: bool = False
    """Continue although keys that change the numbers differ from those of the checkpoint."""
    barrier_timeout_s: Annotated[Seconds, Key(unit="seconds")] = 3600.0
    """Seconds that ranks wait for the slowest rank while they write or read a checkpoint.
    trainer.timeout_s and the timeout of the process groups do not apply meanwhile.
    """

    @property
    def saves(self) -> bool:
        """Return whether a run that ends by itself leaves a checkpoint."""
        return bool(self.save_interval) or self.save_minutes is not None or self.save_final


class CheckpointConfig(UnresolvedCheckpoint):
    """`checkpoint` of a resolved run: the keys below are never null."""

    save_interval: int
