"""The section `log`: what a run records and shows."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from mtrain.config.schema.base import (
    NAME,
    Effect,
    Flag,
    Key,
    PositiveInt,
    Section,
)

StatisticsKind = Literal["weights", "gradients", "updates", "moments", "activations", "experts"]


class StatisticsConfig(Section):
    """`log.statistics`: norm, mean, largest absolute value and share of zeros of whole tensors,
    and the loads of experts.
    """

    interval: Annotated[PositiveInt | None, Key(unit="steps")] = None
    """Steps between two descriptions, which are events of the kind `statistics`; null: none."""
    modules: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] = ("**",)
    """Patterns of names of modules and weights, as a single rank names them; a module is selected
    with everything inside. `*` stands for any characters of one part of a name, `?` for one
    character, `**` for any parts: `decoder.layers.*.mlp`, `**.linear_proj.weight`.
    """
    kinds: Annotated[tuple[StatisticsKind, ...] | None, Field(min_length=1, strict=False)] = None
    """The tensors of these modules: weights before the update of the step, gradients before they
    are clipped, updates (with their norm over that of the weights), moments of the optimizer,
    activations (outputs of layers, of their attention and MLP, and logits), experts (the choices
    of routers). null: all.
    """

    @property
    def described(self) -> tuple[StatisticsKind, ...]:
        """Return the kinds of tensors that are described."""
        return get_args(StatisticsKind) if self.kinds is None else self.kinds


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
    statistics: StatisticsConfig = StatisticsConfig()
    """Statistics of weights, gradients, updates, moments, activations and experts, by module."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] = 9464
    """The port on 127.0.0.1 at which the sink prometheus answers."""
