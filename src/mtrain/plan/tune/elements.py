"""Elements of the weights of parts of a model on a rank: of experts, of others, and of those that
are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import Graph
from mtrain.plan.weights import stage_weights

EXPERTS = 3
OTHERS = 4
FROZEN = 5
"""The column of frozen and of trained elements in a piece of `costs`."""


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
