"""Which tensors of a folder make which of a model: each of both sides exactly once, or an error that names it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from mtrain.ckpt.folder import MODEL
from mtrain.config.peft import PeftConfig
from mtrain.errors import CorruptData
from mtrain.models.gpt.torch_dist import counted_axes, one_name
from mtrain.models.table import Step, Table

if TYPE_CHECKING:
    from mtrain.mcore.shard_specs import ShardSpec

NAMED = 8
"""Names that a message gives."""


@dataclass(frozen=True)
class OurTensor:
    """A parameter or persistent buffer of the whole model, and where its parts lie in a checkpoint."""

    name: str
    shape: tuple[int, ...]
    specs: tuple[ShardSpec, ...]


@dataclass(frozen=True)
class Box:
    """Where a whole tensor of ours lies in a checkpoint: a box of one of its tensors."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    lead: int
    """How many axes count layers or experts."""
    shape: tuple[int, ...]
    """Without those axes."""

    @property
    def size(self) -> tuple[int, ...]:
        """With them."""
        return (1,) * self.lead + self.shape


def box_of(tensor: OurTensor) -> Box:
    """The box that the parts of a tensor make up.

    Raises:
        ValueError: they lie in several tensors of a checkpoint, or apart from each other.
    """
    first = tensor.specs[0]
    lead, row = first.lead, prod(tensor.shape[1:])
    at, after = first.offset[lead] if tensor.shape else 0, 0
    for spec in tensor.specs:
        same = (spec.key, spec.lead, spec.global_shape, spec.offset[:lead]) == (
            first.key,
            lead,
            first.global_shape,
            first.offset[:lead],
        )
        inside = spec.offset[lead + 1 :] == first.offset[lead + 1 :] and spec.shape[lead + 1 :] == tensor.shape[1:]
        follows = spec.first == after and (not tensor.shape or (spec.offset[lead] - at) * row == after)
        if not (same and inside and follows):
            raise ValueError(f"{tensor.name} is no single part of a checkpoint's tensor")
        after += spec.numel
    if after != prod(tensor.shape):
        raise ValueError(f"{tensor.name} is not whole in a checkpoint")
    return Box(first.key, first.global_shape, first.offset, lead, tensor.shape)


def likely_boxes(manifest: Mapping[str, Any], table: Table, model: Any) -> dict[str, Box] | None:
    """Where the tensors of a model most likely lie in a checkpoint, by its names: layers and experts are counted in
    them or along first axes. None: they do not say; megatron-core has the last word (`box_of`).
    """
    held: dict[str, Box] = {}
    for name, entry in manifest["tensors"].items():
        if name.startswith(MODEL):
            key, shape = name.removeprefix(MODEL), tuple(entry["shape"])
            lead = counted_axes(key)
            for numbers in product(*map(range, shape[:lead])):
                offset = numbers + (0,) * (len(shape) - lead)
                held[one_name(key, numbers)] = Box(key, shape, offset, lead, shape[lead:])
    names = [name for step in table.entries(model) for name in step.ours]
    found = {name: held[one_name(name)] for name in names if one_name(name) in held}
    return found if len(found) == len(held) else None


def boxes_of(ours: Mapping[str, OurTensor]) -> dict[str, Box]:
    """Of each tensor."""
    return {name: box_of(tensor) for name, tensor in ours.items()}


def our_tensors(run: Any) -> dict[str, OurTensor]:
    """Those of the model of a run, whatever its layout, by name, without adapters.

    Raises:
        RuntimeError: torch.distributed is in use in this process.
    """
    return _tensors_of(run.model_copy(update={"peft": PeftConfig()}))


def our_adapters(run: Any) -> dict[str, OurTensor]:
    """Those of the adapters of a run, by name; raises as `our_tensors` does."""
    from mtrain.mcore.merging import is_adapter

    return {name: tensor for name, tensor in _tensors_of(run).items() if is_adapter(name)}


def _tensors_of(run: Any) -> dict[str, OurTensor]:
    from mtrain.build.model import blank_model
    from mtrain.mcore.shard_specs import shard_specs_of
    from mtrain.plan.shrink import alone
    from mtrain.world.fake_world import fake_world

    one = alone(run)
    with fake_world(one, 0) as world:
        (chunk,) = blank_model(one, world)
        specs = shard_specs_of(chunk)
        shapes = {n: tuple(t.shape) for n, t in [*chunk.named_parameters(), *chunk.named_buffers()]}
        return {name: OurTensor(name, shapes[name], tuple(specs[name])) for name in specs}


@dataclass(frozen=True)
class Match:
    """The steps from one side to the other, and what of theirs has no part in them."""

    table: Table
    steps: tuple[Step, ...]
    copies: dict[str, str]
    """Theirs that hold what another one of theirs does -> that one."""
    ignored: tuple[str, ...] = ()
    """Theirs that hold nothing of the model."""


def match(tables: Iterable[Table], model: Any, ours: Collection[str], theirs: Collection[str]) -> Match:
    """The steps by the table whose names are those of `theirs`.

    Raises:
        CorruptData: some of either side are left over, or used twice, by name.
    """
    found = [_match(table, model, set(ours), set(theirs)) for table in tables]
    best, wrong = min(found, key=lambda pair: len(pair[1]))
    if wrong:
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise CorruptData(f"the weights are not those of this model: {'; '.join(wrong[:NAMED])}{more}")
    return best


def written(table: Table, model: Any, ours: Collection[str]) -> Match:
    """The steps that write a folder by a table.

    Raises:
        CorruptData: a tensor of ours has no entry.
    """
    steps = [step for step in table.entries(model) if set(step.ours) <= set(ours)]
    used = Counter(name for step in steps for name in step.ours)
    left = [f"{name} is made {used[name]} times" for name in ours if used[name] != 1]
    if left:
        raise CorruptData(f"the table of weights does not fit this model: {'; '.join(sorted(left)[:NAMED])}")
    made = {name for step in steps for name in step.theirs}
    # a tied head is left out, as transformers does; the copies of an MTP layer are in published files
    heads = {copy.name for copy in table.copies if not copy.of_mtp}
    copies = {name: of for name, of in table.held_twice(model).items() if of in made and name not in heads}
    return Match(table, tuple(steps), copies)


def _match(table: Table, model: Any, ours: set[str], theirs: set[str]) -> tuple[Match, list[str]]:
    ignored = {n for n in theirs if any(re.fullmatch(pattern, n) for pattern in table.ignored)}
    steps = [s for s in table.entries(model) if set(s.ours) & ours or set(s.theirs) & theirs]
    used_ours = Counter(n for step in steps for n in step.ours)
    used = Counter(n for step in steps for n in step.theirs)
    copies = {k: of for k, of in table.held_twice(model).items() if k in theirs and k not in used}
    left = theirs - ignored - set(copies)
    wrong = [f"nothing of ours is made of {n}" for n in sorted(left - set(used))]
    wrong += [f"{n} is missing" for n in sorted(set(used) - theirs)]
    wrong += [f"nothing makes our {n}" for n in sorted(ours - set(used_ours))]
    wrong += [f"our model has no {n}" for n in sorted(set(used_ours) - ours)]
    for side in (used, used_ours):  # one name may be that of a tensor on both
        wrong += [f"{n} is used {count} times" for n, count in sorted(side.items()) if count > 1]
    return Match(table, tuple(steps), copies, tuple(sorted(ignored))), wrong


def shapes_of_theirs(step: Step, model: Any, ours: Mapping[str, OurTensor | Box]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that a step makes of ours."""
    import torch

    blank = [torch.empty(ours[name].shape, device="meta") for name in step.ours]
    made = step.operation.apply(blank, model, inward=False)
    return {name: tuple(tensor.shape) for name, tensor in zip(step.theirs, made, strict=True)}


def check_shape(step: Step, name: str, shape: tuple[int, ...], ours: OurTensor) -> None:
    """Compares the shape of a tensor that a step made of theirs.

    Raises:
        CorruptData: ours has another one.
    """
    if shape != ours.shape:
        shapes = f"{list(shape)}, and our {name} {list(ours.shape)}"
        raise CorruptData(f"{', '.join(step.theirs[:3])} make a tensor of shape {shapes}")


def likely(tables: Iterable[Table], model: Any, theirs: Collection[str]) -> tuple[Step, ...]:
    """The steps whose tensors of theirs are there, by the table that fits most names; `match` has the last word."""

    def steps(table: Table) -> tuple[Step, ...]:
        return tuple(step for step in table.entries(model) if set(step.theirs) <= known)

    known = set(theirs)
    return max(map(steps, tables), key=lambda found: len({name for step in found for name in step.theirs}))
