"""Variants of kernels by measurements on this kind of device, the same on all ranks."""

from __future__ import annotations

import json
from contextlib import suppress

from mtrain_kernels import tuning

from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import warn
from mtrain.world.init import World


def use_measured(run: RunConfig, world: World) -> None:
    """Make every rank take the variants of rank 0's measurements (`mtrain_kernels.tune`), or the
    first ones.

    All ranks call it together. A run that has to be deterministic takes the first ones.
    """
    facts = facts_of(run.cluster.device)
    if facts.on_host or not facts.triton:
        return
    record: tuning.Record = {}
    if world.is_rank0 and not run.trainer.deterministic:
        try:
            record = tuning.read(tuning.file_of(world.torch_device))
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            # not an error: the other ranks wait for an answer, and the first variants always work
            warn(f"kernels take their first variants: {error}")
    tuning.use(json.loads(world.tell(json.dumps(record, allow_nan=False))))


def use_named(run: RunConfig) -> None:
    """Take the variants of the first device that the cluster names and that was measured, where no
    device can be asked; see `use_measured`.
    """
    if run.trainer.deterministic:
        return
    for name in run.cluster.driver_names:
        with suppress(ImportError, OSError, RuntimeError, ValueError):
            if record := tuning.read(tuning.file_named(name)):
                tuning.use(record)
                return
