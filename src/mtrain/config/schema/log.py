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

StatisticsKind = Literal[
    "weights", "gradients", "updates", "moments", "activations", "losses", "attention", "experts"
]


class StatisticsConfig(Section):
    """`log.statistics`: norm, mean, largest absolute value and share of zeros of whole tensors,
    losses by position and source, logits of attention, and the loads of experts.
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
    activations (outputs of layers, of their attention and MLP, and logits), losses (of tokens by
    position, blend source and kind), attention (entropy and largest logit of sampled rows), experts
    (choices and losses of routers). null: all.
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
    """live: the view of `watch`, redrawn each second; plain: a line per interval, as live prints
    where the output is no terminal; auto: live on a terminal, else plain.
    """
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
    alerts: bool = True
    """Print a line, and add an event of kind `alert`, where a number of the run needs a look: a
    loss or a gradient norm that is not finite or jumps, a loss that rises or is flat, a slow run,
    waits for data, full memory, experts without tokens, a loss scale at its floor, a worse
    evaluation. MTRAIN_WEBHOOK in the environment is the URL that alerts are posted to as well.
    """
    alert_window: Annotated[
        Annotated[int, Field(ge=40, le=1_000_000)], Key(when="log.alerts", unit="steps")
    ] = 200
    """Steps over which a loss that does not fall raises an alert; of a long run, at least a quarter
    of its steps so far.
    """
    alert_slowdown: Annotated[Annotated[float, Field(gt=1)] | None, Key(when="log.alerts")] = None
    """The factor below the median of tokens per second, and below the plan, that raises an alert.
    null: 1.5, and on a CPU none, because other processes share its cores.
    """
    alert_memory: Annotated[Annotated[float, Field(gt=0, le=1)], Key(when="log.alerts")] = 0.95
    """The share of a device's memory that tensors, or of a machine's memory that processes, may
    take before an alert.
    """
    memory_interval: Annotated[PositiveInt | None, Key(unit="steps")] = 100
    """Steps between two samples of the memory of every rank, which are events of kind `memory`;
    null: none.
    """
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] = 9464
    """The port on 127.0.0.1 at which the sink prometheus answers."""
    on_anomaly: Literal["off", "trace"] = "off"
    """trace: a step whose loss or gradient norm is not finite, or above `resilience.spike_factor`
    times its running median, is computed again with the statistics of every module; the first
    module and direction whose output is abnormal, its rank, micro-batch and documents are in
    `anomalies/step_N/`. Finite faults need a reference of healthy steps, see `trace_interval`.
    """
    trace_interval: Annotated[PositiveInt, Key(when="log.on_anomaly=trace", unit="steps")] = 100
    """Steps between two that are traced in any case, as a reference for abnormal ones. They find
    abnormal outputs that move neither loss nor norm, too.
    """
