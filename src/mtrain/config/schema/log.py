"""The section `log`: what a run records and shows."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import (
    NAME,
    Effect,
    Flag,
    Key,
    PositiveInt,
    Section,
)


class LogConfig(Section):
    """`log`: where a run is recorded, and what it shows."""

    runs_dir: str = "runs"
    """The folder of run folders."""
    name: Annotated[str, Field(pattern=NAME, max_length=200)] | None = None
    """The name of the run folder; null: made from the date, the model and the layout."""
    interval: Annotated[
        PositiveInt, Key(flag=Flag("--log-interval", absent=100), aka="logging_steps", unit="steps")
    ] = 10
    """Steps between progress lines; the metrics file has every step."""
    token_accuracy: Annotated[bool, Key(effect=Effect.RUNTIME)] = False
    """Log token_accuracy: the share of counted predictions whose token has the largest logit."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a line that is redrawn; plain: a line per interval; auto: live on a terminal."""
    hooks: tuple[Annotated[str, Field(pattern=NAME, max_length=200)], ...] = Field(
        default=(), strict=False
    )
    """Hooks that run around steps, by name. Among those that ship, `garbage` collects Python's
    garbage at the same steps on every rank, and `loss_spikes` stops a run whose loss stays high.
    Installed packages publish others under the entry point group `mtrain.hooks`.
    """
    sinks: tuple[Annotated[str, Field(pattern=NAME, max_length=200)], ...] = Field(
        default=(), strict=False
    )
    """Places that rank 0 sends the numbers of steps and evaluations to: tensorboard, wandb, mlflow,
    swanlab, trackio, prometheus, otel. Each needs the package's extra of its name. Installed
    packages publish others under the entry point group `mtrain.sinks`.
    """
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] = 9464
    """The port on 127.0.0.1 at which the sink prometheus answers."""
