"""The section `checkpoint`: what a run saves, where, and what it starts from."""

from typing import Annotated, Literal

from mtrain.config.schema.base import (
    SAME,
    Effect,
    Key,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
)

LOCAL = "checkpoint.local_dir"


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
    hf_every: Annotated[PositiveInt | None, Key(unit="checkpoints")] = None
    """Export every so many committed checkpoints as a Hugging Face folder, `hf/step_...` of the
    run: a process of the lowest priority does it after the commit. null: none.
    """
    resume: Annotated[str | None, Key(effect=Effect.CONTENTS, aka="load")] = None
    """`auto`: continue the run that the same launch started (with `log.name`: the run of that
    name), or start one. `latest`: continue the newest run of this configuration. Otherwise a run
    folder, a checkpoint folder, or the address of either in an object store, where ranks read it.
    null: a new run; under a launcher that restarts failed runs, `auto`.
    """
    init_from: Annotated[str | None, Key(effect=Effect.NUMERICS, aka="pretrained finetune")] = None
    """Weights that a new run starts from: a run or checkpoint folder, the address of either in an
    object store, or a Hugging Face folder; null: drawn from trainer.seed. If no model is chosen,
    the model is theirs. Optimizer, schedule and data start at step 0; a resumed run has weights of
    its own.
    """
    async_save: Annotated[bool | None, Key(flag=SAME)] = None
    """Save in the background: each rank copies its state to host memory and goes on, and a process
    of its own writes it. The copies are made during the next forward and backward. null: true on
    GPUs.
    """
    staging_mib: Annotated[PositiveInt | None, Key(unit="MiB")] = None
    """Host memory of each rank for the copies of async_save. A state that does not fit is copied
    in several parts, and the next update waits until the last one is copied. null: all of the
    state, or half of what is free on the machine.
    """
    retries: NonNegativeInt = 0
    """Further tries to write the files of a checkpoint where the disk refuses, or to upload it. A
    state that async_save copies in several parts has only one try to write it.
    """
    on_failure: Literal["stop", "continue"] = "stop"
    """The reaction to a checkpoint that cannot be written: end the run with an error, or warn and
    go on without it. A run whose last checkpoint fails always ends with an error.
    """
    max_failures: PositiveInt = 3
    """The number of failed checkpoints in a row that ends a run with on_failure=continue."""
    local_dir: str | None = None
    """Folder on a local disk, or in memory such as /dev/shm, for local checkpoints: the newest
    serves a restart on this machine, and a run that ends by itself or on request leaves none.
    Needs local_interval; on several machines, each has one process of mtrain, which starts its
    ranks, and holds all that they need. null: no local checkpoints.
    """
    local_interval: Annotated[PositiveInt | None, Key(when=LOCAL, unit="steps")] = None
    """Steps between local checkpoints in local_dir. A step gets none if a checkpoint in the run
    folder is due after it, or if one is still being written. null: none.
    """
    local_replicas: Annotated[PositiveInt | None, Key(when=LOCAL, unit="machines")] = None
    """Other machines that keep a copy of each machine's part of a local checkpoint, so that a
    restart can use it after a machine was lost with its disk. A process of each machine sends it in
    the background, and no step waits for it. null: none.
    """
    remote: str | None = None
    """Address in an object store to which each checkpoint of the run folder is uploaded in the
    background, such as s3://bucket/prefix (gs://, az://, or file:// on a shared disk). `keep` and
    its like apply there, too. With it, `resume=latest` also continues the run that wrote there.
    One run writes to an address, and no recipe sets it. null: none.
    """
    accept_changes: bool = False
    """Continue although keys that change the numbers differ from those of the checkpoint."""
    hash: Literal["xxh3", "sha256"] = "xxh3"
    """The hash of a checkpoint's blocks of 256 KiB. `xxh3` finds damage, in a fifth of the time or
    less. `sha256` also finds blocks that somebody exchanged on purpose. Headers and the manifest
    have a sha256 in either case, and readers take both.
    """
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
    async_save: bool
