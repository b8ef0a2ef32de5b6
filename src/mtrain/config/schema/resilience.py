"""The section `resilience`: how a run survives a failure."""

from typing import Annotated

from mtrain.config.schema.base import Key, NonNegativeInt, PositiveFloat, PositiveInt, Section


class ResilienceConfig(Section):
    """`resilience`: restarts of a failed run, and checks of its ranks. No key changes a number, and
    none is part of the digest.
    """

    restarts: Annotated[NonNegativeInt, Key(aka="max_restarts")] = 0
    """Restarts of a run whose ranks fail, each from the newest checkpoint; `--restarts N` sets it.
    A run ends earlier after 3 restarts in a row without a new step. Bad input, a bad environment,
    damaged data and a stop on request restart nothing. Only for the ranks of one machine.
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
