"""The keys of the groups `checkpoint` and `log`: what a run keeps and shows."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import (
    NAME,
    Effect,
    Flag,
    Key,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)


class CheckpointConfig(Section):
    """`checkpoint`: when state is saved, and where a run goes on from."""

    save_interval: Annotated[NonNegativeInt | None, Key(aka="save_steps", unit="steps")] = None
    """Steps between checkpoints; 0: only at the end, and by save_minutes.

    null: on a CPU 40; elsewhere 0.
    """
    save_minutes: Annotated[PositiveFloat | None, Key(unit="minutes")] = None
    """Minutes from one checkpoint to the next, by the clock of rank 0.

    null: not by time; where save_interval is null too and the run is on GPUs, 30.
    """
    save_final: bool = True
    """Save after the last step."""
    keep: PositiveInt | None = 2
    """How many of the newest checkpoints stay; null: all."""
    resume: Annotated[str | None, Key(effect=Effect.CONTENTS, aka="load")] = None
    """`auto`: continue the run that the same launch began (with `log.name`: the run of that name),
    or begin one. `latest`: continue the newest run of this configuration. Otherwise a run folder or
    a checkpoint folder. null: a new run; under a launcher that restarts failed runs, `auto`.
    """
    init_from: Annotated[str | None, Key(effect=Effect.NUMERICS, aka="pretrained finetune")] = None
    """Weights that a new run begins with: a run or checkpoint folder, or a Hugging Face folder;
    null: drawn from trainer.seed. Where no model is chosen, theirs is the model. Optimizer,
    schedule and data begin at step 0; a resumed run has weights of its own.
    """
    accept_changes: bool = False
    """Go on although keys that change the numbers differ from those of the checkpoint."""
    barrier_timeout_s: Annotated[Seconds, Key(unit="seconds")] = 3600.0
    """Seconds that ranks wait for the slowest rank while a checkpoint is written or read.

    trainer.timeout_s and the timeout of the process groups do not apply during that time.
    """

    @property
    def saves(self) -> bool:
        """Return whether a run that ends by itself leaves a checkpoint."""
        return bool(self.save_interval) or self.save_minutes is not None or self.save_final


class LogConfig(Section):
    """`log`: where a run is written and what is shown."""

    runs_dir: str = "runs"
    """Folder of run folders."""
    name: Annotated[str, Field(pattern=NAME, max_length=200)] | None = None
    """Name of the run folder; null: made from the date, the model and the layout."""
    interval: Annotated[
        PositiveInt, Key(flag=Flag("--log-interval", absent=100), aka="logging_steps", unit="steps")
    ] = 10
    """Steps between progress lines; the metrics file has every step."""
    token_accuracy: Annotated[bool, Key(effect=Effect.RUNTIME)] = False
    """Log token_accuracy: the share of the predictions that count whose token has the largest
    logit.
    """
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a line that is redrawn; plain: a line per interval; auto: live on a terminal."""
    hooks: tuple[Annotated[str, Field(pattern=NAME, max_length=200)], ...] = Field(
        default=(), strict=False
    )
    """Hooks that run around steps, by name: `garbage`, which collects Python's garbage at the same
    steps on every rank, and those that installed packages publish under the entry point group
    `mtrain.hooks`.
    """
