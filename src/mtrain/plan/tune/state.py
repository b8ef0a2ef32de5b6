"""The bytes of an element of the weights on a rank, with gradient and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain.config.engine.formats import bytes_of
from mtrain.config.schema.run import RunConfig
from mtrain.plan.rank import quantized_bytes
from mtrain.plan.states import main_weight_bytes
from mtrain.plan.time.update import update_bytes


@dataclass(frozen=True)
class State:
    """Bytes of weights, their copies, gradients and optimizer state on a rank."""

    expert: float
    """An element of the weights of experts."""
    other: float
    quantized: float
    """More, an element in a number format of fewer bits; not of embedding and output layer."""
    tables: int
    """Elements of those two."""

    def bytes(self, experts: float, others: float) -> float:
        """Return the bytes of a rank with so many elements of weights."""
        more = self.quantized * (experts + max(0.0, others - self.tables))
        return self.expert * experts + self.other * others + more


def state_of(run: RunConfig) -> State:
    """Return the bytes of an element where the state is sharded as a layout sets it."""
    p = run.parallel
    precision = run.precision
    weights = bytes_of(precision.format) + bytes_of(
        "fp32" if precision.grad_reduce_in_fp32 else precision.format
    )
    main = main_weight_bytes(run)  # of what is offloaded the moments are in host memory
    state = main + (update_bytes(run) - main) * (1 - run.optim.cpu_offload)
    took = []
    for copies in _copies(run):
        sharded = copies // p.hsdp_replicas if p.fsdp != "none" else 1
        spread = copies // p.hsdp_replicas if p.distributed_optimizer else sharded
        took.append(weights / max(1, sharded) + state / max(1, spread))
    tables = 2 * run.model.padded_vocab_size // p.tp * run.model.hidden_size
    return State(took[0], took[1], quantized_bytes(run), tables)


def _copies(run: RunConfig) -> tuple[int, int]:
    """Return how many ranks have the same elements of experts, and of others."""
    p = run.parallel
    same = max(1, (p.ranks or 1) // (p.pp * p.ep * (p.etp or p.tp)))
    return same, p.dp * p.cp
