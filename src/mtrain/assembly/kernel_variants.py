"""Variants of kernels by measurements on this kind of device, the same on all ranks."""

from __future__ import annotations

import json

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
