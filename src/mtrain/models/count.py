"""Parameters of a model, from the weights that its family lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.base import Alike, Weights
from mtrain.models.registry import family_of
from mtrain.models.weights import Weight

# One rank: nothing is sharded, so a stage holds every weight whole.
ALONE = ParallelConfig(
    ranks=1,
    sequence_parallel=False,
    distributed_optimizer=False,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)


@dataclass(frozen=True)
class Counts:
    """Parameters of a model as built, with the padded vocabulary; each shared weight once."""

    parameters: int
    active_parameters: int
    """Parameters that process one token."""
    expert_parameters: int
    """Parameters of routed experts, which expert parallelism shards."""
    frozen_parameters: int
    """Parameters with neither gradient nor optimizer state."""

    def plus(self, other: Counts, times: int) -> Counts:
        """Return this count plus `times` times `other`."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Counts(*(mine + times * its for mine, its in pairs))


def parameters(model: ModelConfig) -> int:
    """Return the parameters of the built model, vocabulary padded, shared weights once."""
    return _of_family(model, "parameters")


def active_parameters(model: ModelConfig) -> int:
    """Return the parameters that one token visits: of experts only the chosen ones."""
    return _of_family(model, "active_parameters")


def expert_parameters(model: ModelConfig) -> int:
    """Return the parameters of routed experts: what expert parallelism shards."""
    return _of_family(model, "expert_parameters")


def frozen_parameters(model: ModelConfig) -> int:
    """Return the part of `parameters` that is not trained."""
    return _of_family(model, "frozen_parameters")


def adapter_parameters(run: RunConfig) -> tuple[int, int]:
    """Return the parameters that a run with adapters trains, those of a value head too, of layers
    that every token visits and of routed experts; 0 without adapters.
    """
    family = family_of(run.model)
    if run.peft.kind is None or family.weights is None or family.adapted is None:
        return 0, 0
    model = run.model
    alone = one_expert(model)
    # Adapters are sharded as their layers are, so they are listed in the same layout.
    laid_out = run.model_copy(update={"parallel": alone})
    listed = family.weights
    adapted = family.adapted

    def sizes(model: ModelConfig, layout: ParallelConfig, stage: Stage) -> Iterator[Weight]:
        for weight in adapted(listed(model, layout, stage), laid_out):
            if weight.kind == "adapters" or not weight.frozen:
                expert = ".experts." in weight.name
                yield replace(weight, kind="experts" if expert else "mlp", frozen=False)

    # One of each kind of layer: a step counts this for every length of a document.
    found = _sum_of_layers(sizes, model, family.alike)
    return found.parameters - found.expert_parameters, found.expert_parameters


def counts(weights: Iterable[Weight], model: ModelConfig) -> Counts:
    """Count weights of one rank that has one expert of each layer; see `one_expert`."""
    dense = 0
    expert = 0
    frozen = 0
    number = 0 if model.moe is None else model.moe.num_experts
    chosen = 0 if model.moe is None else model.moe.router_topk
    for weight in weights:
        is_expert = weight.kind == "experts"
        if is_expert:
            expert += weight.numel
        else:
            dense += weight.numel
        if weight.frozen:
            frozen += weight.numel * (number if is_expert else 1)
    return Counts(dense + number * expert, dense + chosen * expert, number * expert, frozen)


def whole(model: ModelConfig) -> Stage:
    """Return the stage that holds all of a model."""
    return Stage(range(model.num_layers), embedding=True, mtp=model.mtp_num_layers or 0, loss=True)


def one_expert(model: ModelConfig) -> ParallelConfig:
    """Return a layout in which a rank has all of a model but its experts, of which it has one.

    A model with hundreds of experts is listed as fast as one without.
    """
    # Experts of a layer are alike, so `counts` multiplies one of them.
    experts = 1 if model.moe is None else model.moe.num_experts
    return ALONE.model_copy(update={"ep": experts})


class _Same:
    """A model as a cache key, by identity: its mappings make it unhashable."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.model is self.model


def counted(listed: Weights, model: ModelConfig, alike: Alike | None = None) -> Counts:
    """Count the weights that a function lists of a whole model; see `Family.alike`."""
    return _counted(listed, alike, _Same(model))


# A search over layouts counts the same model thousands of times. The cache holds the models, so
# no other one gets the address of one that it knows.
@lru_cache(maxsize=16)
def _counted(listed: Weights, alike: Alike | None, same: _Same) -> Counts:
    return _sum_of_layers(listed, same.model, alike)


def _sum_of_layers(listed: Weights, model: ModelConfig, alike: Alike | None) -> Counts:
    layout = one_expert(model)
    stage = whole(model)
    if alike is None:
        return counts(listed(model, layout, stage), model)
    outside = counts(listed(model, layout, replace(stage, layers=range(0))), model)
    total = outside
    # A typing error may ask for a million layers, and is refused by the numbers of this count.
    for layer, number in alike(model).items():
        with_layer = counts(
            listed(model, layout, replace(stage, layers=range(layer, layer + 1))), model
        )
        total = total.plus(with_layer.plus(outside, -1), number)
    return total


def _of_family(model: ModelConfig, name: str) -> int:
    family = family_of(model)
    # A family's own count wins; a plug-in without weights has no other.
    own: Callable[[ModelConfig], int] | None = getattr(family, name)
    if own is not None:
        return own(model)
    # `Family` allows this for experts and frozen weights only.
    if family.weights is None:
        return 0
    number: int = getattr(counted(family.weights, model, family.alike), name)
    return number
