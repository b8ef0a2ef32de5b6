"""The bytes of an element of the weights on a rank, with gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain.config.engine.formats import bytes_of
from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import Graph
from mtrain.plan.rank import quantized_bytes
from mtrain.plan.states import main_weight_bytes
from mtrain.plan.time.update import update_bytes
from mtrain.plan.weights import stage_weights


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
    # Offloaded moments are in host memory; main weights stay on the device.
    main = main_weight_bytes(run)
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
    same = max(1, p.ranks // (p.pp * p.ep * (p.etp or p.tp)))
    return same, p.dp * p.cp


# Columns of elements in a piece of `costs`: experts, others, frozen.
EXPERTS = 3
OTHERS = 4
FROZEN = 5


def table(run: RunConfig) -> int:
    """Return the elements of the embedding on a rank."""
    return run.model.padded_vocab_size // run.parallel.tp * run.model.hidden_size


def elements(run: RunConfig, held: Stage) -> tuple[int, int, int]:
    """Return the elements of the weights of a stage on a rank, as in a piece."""
    weights = stage_weights(run, held)
    frozen = sum(weight.numel for weight in weights if weight.frozen)
    experts = sum(weight.numel for weight in weights if weight.expert and not weight.frozen)
    return experts, sum(weight.numel for weight in weights) - experts - frozen, frozen


def of_layers(run: RunConfig, graphs: Sequence[Graph]) -> list[tuple[float, ...]]:
    """Return the elements of each layer, as in a piece; those of one graph are alike, of groups of
    layers there is the mean.
    """
    number = run.model.num_layers
    if len(graphs) != number:
        return [tuple(all_of / number for all_of in elements(run, Stage(range(number))))] * number
    first = {id(graph): layer for layer, graph in reversed(list(enumerate(graphs)))}
    found = {key: elements(run, Stage(range(layer, layer + 1))) for key, layer in first.items()}
    return [found[id(graph)] for graph in graphs]


def column(run: RunConfig) -> int:
    """Return the column of a piece in which the embedding's elements are counted."""
    table = next(iter(stage_weights(run, Stage(range(0), embedding=True))))
    return FROZEN if table.frozen else OTHERS
