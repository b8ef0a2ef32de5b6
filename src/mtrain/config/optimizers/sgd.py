"""SGD with momentum: its update is linear in the gradient, which makes it the best optimizer to
compare layouts with.
"""

from __future__ import annotations

from mtrain.config.schema.optimizer import Optimizer, only

OPTIMIZER = Optimizer(
    name="sgd",
    states=lambda r: {"momentum_buffer": "fp32"},
    build=None,
    obstacle=only(("torch", "te"), "sgd"),
    keys=frozenset({"momentum"}),
    # Not the default `adam`: megatron-core builds torch's SGD itself.
    core_name="sgd",
    cannot={
        "distributed_optimizer": "megatron-core supports it only with adam",
        "megatron_fsdp": "megatron-core's FSDP knows only the two moments of adamw",
    },
    megatron_name="sgd",
)
