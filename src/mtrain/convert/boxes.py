"""The place of each tensor of a model in a checkpoint, from its family or from megatron-core.

A family declares it without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from mtrain import mcore as adapter
from mtrain.config.machine.devices import CPU
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig
from mtrain.devices import registry
from mtrain.layout.grid import held_stages
from mtrain.models.registry import family_of
from mtrain.plan.shrink import alone

if TYPE_CHECKING:
    from mtrain.mcore.state.shard_specs import ShardSpec

# numbers that megatron-core turns into places along an axis
_COUNTED = re.compile(r"(\.layers|\.experts\.experts)\.(\d+)\.")


@dataclass(frozen=True)
class Box:
    """The place of a whole tensor of mtrain's: a box of one tensor of a checkpoint."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    lead: int
    """The number of leading axes that count layers or experts."""
    shape: tuple[int, ...]
    """The shape without those axes."""

    @property
    def size(self) -> tuple[int, ...]:
        """Return the shape with the leading axes."""
        return (1,) * self.lead + self.shape


def adapt() -> None:
    """Install the adapter of megatron-core for the CPU, and limit torch to one thread.

    Processes are forked from this one, which threads of torch would break.
    """
    import torch

    torch.set_num_threads(1)
    adapter.install(registry.get(CPU.name))


def model_boxes(run: RunConfig) -> dict[str, Box]:
    """Return the boxes of a run's model by name, for any layout, without adapters.

    This imports megatron-core if the family does not declare its weights.
    """
    # a plug-in family may leave its weights to be found in its layers
    if family_of(run.model).weights is None:
        return boxes_from_megatron(_plain(run))
    return boxes_from_family(run)


def adapter_boxes(run: RunConfig) -> dict[str, Box]:
    """Return the boxes of a run's adapters by name; this imports megatron-core."""
    from mtrain.mcore.layers.merging import is_adapter

    return {name: box for name, box in boxes_from_megatron(run).items() if is_adapter(name)}


def boxes_from_family(run: RunConfig) -> dict[str, Box]:
    """Return the boxes of a run's model, without adapters, from the weights that its family
    declares.

    Equal layers are in one tensor, counted along its first axis, and so are the experts of a layer.
    """
    # one rank has every tensor whole
    one = alone(_plain(run))
    family = family_of(run.model)
    assert family.weights is not None
    ((held,),) = held_stages(one)
    fused = (*family.weights(one.model, one.parallel, held), *family.buffers(one.model))
    # a checkpoint stores the parts of fused weights by themselves
    every = [part for weight in fused for part in family.apart(one.model, weight)]
    places = {w.name: _place(one.model, family.saved_as(one.model, w.name)) for w in every}
    # tensor -> one more than the largest number along each counted axis
    ends: dict[str, tuple[int, ...]] = {}
    for key, numbers in places.values():
        ends[key] = tuple(
            max(n + 1, end) for n, end in zip(numbers, ends.get(key, numbers), strict=True)
        )
    return {w.name: _box(*places[w.name], ends, w.shape) for w in every}


def boxes_from_megatron(run: RunConfig) -> dict[str, Box]:
    """Return the boxes of a run's model and adapters from megatron-core's sharded state.

    Raises:
        RuntimeError: torch.distributed is in use in this process.
    """
    adapt()
    from mtrain.assembly.model import blank_model
    from mtrain.mcore.state.shard_specs import shard_specs_of
    from mtrain.world.fake_world import fake_world

    one = alone(run)
    # other builders have other module names
    named = one.model.model_copy(update={"builder": "gpt"})
    one = one.model_copy(update={"model": named})
    # the real builder, with process groups that never communicate and weights without memory
    with fake_world(one, 0) as world:
        (chunk,) = blank_model(one, world)
        specs = shard_specs_of(chunk)
        shapes = {n: tuple(t.shape) for n, t in [*chunk.named_parameters(), *chunk.named_buffers()]}
        return {
            part: box for name in specs for part, box in boxes_of(name, shapes[name], specs[name])
        }


def boxes_of(
    name: str, shape: tuple[int, ...], specs: Sequence[ShardSpec]
) -> Iterator[tuple[str, Box]]:
    """Yield a tensor's name and box, or `name.part` of each part if a checkpoint has several.

    Raises:
        ValueError: as `box_of` does.
    """
    keys = {spec.key: [part for part in specs if part.key == spec.key] for spec in specs}
    if len(keys) == 1:
        yield name, box_of(name, shape, specs)
        return
    for key, parts in keys.items():
        inner = shape[1:]
        first = parts[0].first
        # the parts of a key follow each other in the fused weight
        rows = sum(part.numel for part in parts) // prod(inner)
        own = [replace(part, first=part.first - first) for part in parts]
        yield (part := f"{name}.{key.rpartition('.')[2]}"), box_of(part, (rows, *inner), own)


def box_of(name: str, shape: tuple[int, ...], specs: Sequence[ShardSpec]) -> Box:
    """Return the box that the parts of a tensor make up.

    Raises:
        ValueError: they lie in several tensors of a checkpoint, or apart from each other.
    """
    first = specs[0]
    lead = first.lead
    row = prod(shape[1:])
    at = first.offset[lead] if shape else 0
    after = 0
    for spec in specs:
        same = (spec.key, spec.lead, spec.global_shape, spec.offset[:lead]) == (
            first.key,
            lead,
            first.global_shape,
            first.offset[:lead],
        )
        # a part may cut only the first axis after the counted ones
        inside = (
            spec.offset[lead + 1 :] == first.offset[lead + 1 :]
            and spec.shape[lead + 1 :] == shape[1:]
        )
        follows = spec.first == after and (not shape or (spec.offset[lead] - at) * row == after)
        if not (same and inside and follows):
            raise ValueError(f"{name} is no single part of a checkpoint's tensor")
        after += spec.numel
    if after != prod(shape):
        raise ValueError(f"{name} is not whole in a checkpoint")
    return Box(first.key, first.global_shape, first.offset, lead, shape)


def _plain(run: RunConfig) -> RunConfig:
    return run.model_copy(update={"peft": PeftConfig()})


def _place(model: ModelConfig, name: str) -> tuple[str, tuple[int, ...]]:
    """Return the tensor in which a weight lies, and its numbers there."""
    numbers = list[int]()

    def without(match: re.Match[str]) -> str:
        stacked = match[1] != ".layers" or not _numbered(model, name)
        # layers that differ keep their number in the name, and their experts are counted still
        numbers.extend([int(match[2])] * stacked)
        return f"{match[1]}." if stacked else match[0]

    return _COUNTED.sub(without, name), tuple(numbers)


def _numbered(model: ModelConfig, name: str) -> bool:
    """Return whether a weight's name counts layers: in MTP, and where layers differ."""
    differ = model.moe is not None or model.linear_attention is not None or model.hybrid is not None
    return name.startswith("mtp.") or (differ and name.startswith("decoder."))


def _box(
    key: str, numbers: tuple[int, ...], ends: Mapping[str, tuple[int, ...]], shape: tuple[int, ...]
) -> Box:
    return Box(key, ends[key] + shape, numbers + (0,) * len(shape), len(numbers), shape)
