"""What a process imports before it forks ranks, so that no rank imports it again."""

from __future__ import annotations

import atexit
import gc
import importlib
from collections.abc import Iterable

OF_FAMILIES = (
    *(
        f"models.{family}.{part}"
        for family in ("gpt", "bert", "t5", "llava")
        for part in ("build", "data")
    ),
    "models.hybrid.build",
    "data.chat_batch",
)
"""What a rank imports once it knows its model."""


def import_engine(without: Iterable[str] = ()) -> None:
    """Install the adapter without the patches named, and import all that a rank needs.

    This process has one thread from then on: a pool of threads does not survive a fork.
    """
    import torch

    from mtrain import mcore
    from mtrain.devices import registry

    torch.set_num_threads(1)
    mcore.install(registry.get("cpu"), without=without)
    import mtrain_kernels.registry

    import mtrain.train.assemble
    import mtrain.train.verify.prove
    import mtrain.world.groups  # noqa: F401

    for name in OF_FAMILIES:
        importlib.import_module(f"mtrain.{name}")
    mtrain_kernels.registry.ops()
    gc.collect()
    atexit.register(gc.unfreeze)  # else libraries report what is not freed at the end
    gc.freeze()  # no forked process looks through it for garbage, which would copy it
