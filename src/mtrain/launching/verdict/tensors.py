"""The tensors that a run reads from a checkpoint, by name and shape: the same in every layout.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mtrain.ckpt.folder import MODEL
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.optimizer import Rotated
from mtrain.config.schema.run import RunConfig
from mtrain.convert.boxes import Box, boxes_from_family
from mtrain.layout.grid import held_stages
from mtrain.models.registry import family_of
from mtrain.models.weights import Weight
from mtrain.plan.shrink import alone
from mtrain.plan.states import main_weight_bytes, update_of

Shape = tuple[int, ...]
MAIN = "main_weight"
SIDES = ("rows", "columns")
"""The sides of a matrix in the names of SOAP's factors."""


@dataclass(frozen=True)
class Needed:
    """The tensors that a run reads."""

    shapes: dict[str, Shape]
    """Name in the checkpoint -> shape of the whole tensor."""
    complete: bool
    """No other tensors are read; false where only megatron-core can name the others."""


def needed(run: RunConfig, *, weights_only: bool) -> Needed:
    """Return the tensors that a resume reads; with `weights_only`, those of the model."""
    if family_of(run.model).weights is None:
        return Needed({}, complete=False)
    boxes = boxes_from_family(run)
    shapes = {f"{MODEL}{box.key}": box.global_shape for box in boxes.values()}
    # The names of adapters, and so of their states, come from megatron-core.
    adapted = run.peft.kind is not None
    if not (weights_only or adapted):
        for weight in whole_weights(run):
            box = boxes[weight.name]
            states = dict.fromkeys(elementwise_states(run, weight), box.global_shape)
            for name, shape in (states | _factors(run, weight, box)).items():
                shapes.setdefault(f"optim/{name}/{box.key}", shape)
    return Needed(shapes, complete=not adapted)


def whole_weights(run: RunConfig) -> Iterator[Weight]:
    """Yield the trained weights of the whole model as checkpoints hold them."""
    one = alone(run)
    family = family_of(run.model)
    assert family.weights is not None
    ((held,),) = held_stages(one)
    for weight in family.weights(one.model, one.parallel, held):
        if not weight.frozen:
            yield from family.apart(one.model, weight)


def elementwise_states(run: RunConfig, weight: Weight) -> tuple[str, ...]:
    """Return the names of the state that has the shape of a weight."""
    spec = OPTIMIZERS[run.optim.name]
    names: Iterable[str] = spec.states_of(run, weight.name, len(weight.shape))
    main = (MAIN,) if main_weight_bytes(run) else ()
    return (*main, *names)


def _factors(run: RunConfig, weight: Weight, box: Box) -> dict[str, Shape]:
    """Return the factors that an optimizer keeps of a whole matrix, by name."""
    how = update_of(run)
    if not isinstance(how, Rotated) or not how.matrices(weight.name, weight.shape):
        return {}
    if not how.whole:
        # A block belongs to a tensor-parallel rank, so its shape follows from the layout.
        return {}
    lead = box.global_shape[: box.lead]
    return {
        f"{kind}_{side}": (*lead, n, n)
        for side, n in zip(SIDES, weight.shape, strict=True)
        if n <= how.longest
        for kind in ("gram", "basis")
    }
