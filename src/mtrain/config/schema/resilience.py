"""The section `resilience`: how a run survives a failure."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import Key, NonNegativeInt, PositiveFloat, PositiveInt, Section


class ResilienceConfig(Section):
    """`resilience`: restarts of a failed run, and checks of its ranks. No key changes a number, and
    none is part of the digest.
    """

    restarts: Annotated[NonNegativeInt, Key(aka="max_restarts")] = 0
    """Restarts of a run whose ranks fail, each from the newest checkpoint; `--restarts N` sets it.
    A run ends earlier after 3 restarts in a row without a new step. Bad input, a bad environment,
    damaged data and a stop on request restart nothing. On several machines, each has one process of
    mtrain, which starts its ranks.
    """
    restart_window: Annotated[
        PositiveFloat | None, Key(when="resilience.restarts>0", unit="minutes")
    ] = None
    """Minutes over which `restarts` is counted: a run ends if it would restart more often within
    any such period. null: from the start of the run.
    """
    in_process: Annotated[bool, Key(when="resilience.restarts>0")] = False
    """Experimental. True: where all processes are alive after a failure, the same processes release
    everything and continue from the newest checkpoint; a save that is staged in memory on every
    rank is committed before. `restarts` and `restart_window` count these restarts too. If a process
    has died or does not answer, all of them start again.
    """
    replica_check_interval: PositiveInt | None = None
    """Steps between two comparisons of the weights of data-parallel replicas, by a checksum of each
    tensor, after backward and before the update. If they differ, the run names the rank, its
    machine and the tensor, and ends with exit code 5. null: no comparison.
    """
    rerun: Literal["off", "on_anomaly", "every_n"] = "off"
    """Steps whose forward and backward are computed a second time before the update, from the same
    weights, samples and random numbers. on_anomaly: those whose loss or gradient norm is not
    finite, or above `spike_factor` times its running median; every_n: each `rerun_interval`-th. If
    the bits are the same, the data is at fault, and its documents are named; if not, the device of
    a rank is, and the run ends with exit code 5. `metrics.jsonl` has the result as `attribution`.
    """
    rerun_interval: Annotated[PositiveInt, Key(when="resilience.rerun=every_n")] = 100
    """Steps between two that are computed again."""
    spike_factor: Annotated[float, Field(gt=1)] = 4.0
    """The multiple of its median over the last 100 normal steps above which a loss or a gradient
    norm is an anomaly for `rerun` and `log.on_anomaly`; nothing is compared before 10 steps of this
    process.
    """
    straggler_interval: Annotated[PositiveInt | None, Key(unit="steps")] = None
    """Steps between two reports in which ranks compare the time of their own work, without waits
    for other ranks. A rank is compared with those of its pipeline stage. On a GPU only the last of
    these steps is timed. null: no comparison.
    """
    straggler_ratio: Annotated[
        Annotated[float, Field(gt=1)], Key(when="resilience.straggler_interval")
    ] = 2.0
    """A rank whose own time exceeds so many times the median of its stage is slow in a report."""
    straggler_reports: Annotated[PositiveInt, Key(when="resilience.straggler_interval")] = 3
    """Reports in a row in which a rank has to be slow before it is named."""
    on_straggler: Annotated[
        Literal["report", "restart"], Key(when="resilience.straggler_interval")
    ] = "report"
    """report: a warning names the rank, its machine and its device; restart: the run then also
    saves and ends with exit code 75, so that a scheduler can place it elsewhere.
    """
