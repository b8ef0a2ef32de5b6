"""Low-rank adapters by the names and in the shapes that `peft` has for them, out and in.

A table of weights maps mtrain's layers to those of transformers. Rows of `lora_b` move like the
rows of its weight, so the same operation splits and joins them.

`peft` keeps the adapters of experts, which transformers has in one parameter [experts, out, in], as
one matrix each: `lora_A` [experts * r, in] with the ranks of one expert after another, `lora_B`
[out, r * experts] with the experts of one rank after another. Until 0.18 it took the first axis of
such a parameter for its inputs, so that A and B were each other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mtrain.mcore.layers.merging import Whole, names_beside, one_hot_of, spread
from mtrain.models.table import Step, Table

PREFIX = "base_model.model."
_TRANSPOSED = "transposed"
_OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
"""Names of layers that `peft` takes for experts of transformers 4 in a model with experts, where it
adapts no others; it adapts the weight of any layer.
"""


@dataclass
class PeftAdapters:
    """Adapters as `peft` has them."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by their names in `adapter_model.safetensors`."""
    modules: list[str] = field(default_factory=list)
    """Layers with an adapter."""
    parameters: list[str] = field(default_factory=list)
    """Parameters of experts with one."""
    ranks: dict[str, int] = field(default_factory=dict)
    """Layers with another rank: one of transformers is several here, each with an adapter."""
    transposed: bool = False
    """True if layers are of GPT-2's kind, whose weights are [in, out]."""


def steps_of(table: Table, model: Any, held: Mapping[str, Any]) -> Iterator[tuple[Step, list[Any]]]:
    """Yield each step whose weights have adapters in `held`, with those, by weight."""
    for step in table.entries(model):
        if all(name in held for name in step.ours):
            yield step, [held[name] for name in step.ours]


def to_peft(
    table: Table, model: Any, held: Mapping[str, Whole], *, swapped: bool = False
) -> PeftAdapters:
    """Return our adapters `held` as `peft` has them, by weight; `swapped`: until 0.18."""
    out = PeftAdapters()
    for step, own in steps_of(table, model, held):
        if _is_one_layer(step):
            _layers_out(out, step, _of_parts(own), model)
        elif len(own) > 1:
            _experts_out(out, step, own, model, swapped)
        else:
            _layers_out(out, step, own[0], model)
    return out


def _is_one_layer(step: Step) -> bool:
    """Return whether mtrain's weights are parts of one layer, with one A."""
    names = [names_beside(name) for name in step.ours]
    return len(names) == 1 or len({one.a for one in names if one is not None}) == 1


def _of_parts(own: Sequence[Whole]) -> Whole:
    """Return the adapters of the parts of a layer as one."""
    magnitudes = [one.magnitude for one in own if one.magnitude is not None]
    return Whole(
        own[0].a, torch.cat([one.b for one in own]), torch.cat(magnitudes) if magnitudes else None
    )


def _parts_of(own: Whole, step: Step, rows: Sequence[int]) -> dict[str, Whole]:
    """Return the adapter of a layer as those of its parts, of so many rows."""
    magnitudes: Sequence[Tensor | None] = [None] * len(rows)
    magnitudes = magnitudes if own.magnitude is None else own.magnitude.split(list(rows))
    parts = zip(step.ours, own.b.split(list(rows)), magnitudes, strict=True)
    return {name: Whole(own.a, b, magnitude) for name, b, magnitude in parts}


def _turned(rows: Tensor, step: Step, model: Any) -> list[Tensor]:
    """Return rows [out, n] of mtrain's layer in the order of transformers."""
    made = step.operation.apply([rows], model, inward=False)
    return [t.mT if _TRANSPOSED in step.operation.name else t for t in made]


def _layers_out(out: PeftAdapters, step: Step, own: Whole, model: Any) -> None:
    rank = own.b.shape[-1]
    # several A of one weight follow each other
    parts = own.a.shape[0] // own.b.shape[-1]
    one_hot = one_hot_of(step.ours[0], own, model)
    # one layer of transformers: all of mtrain's A, and zeros in B
    whole = len(step.theirs) == 1 and parts > 1
    b = _turned(spread(own.b, one_hot) if whole else own.b, step, model)
    if whole:
        a = [own.a]
    else:
        a = own.a.split(rank) if parts == len(b) else [own.a] * len(b)
    lengths = None if own.magnitude is None else _turned(own.magnitude.unsqueeze(-1), step, model)
    # GPT-2's layers are [in, out], which `peft` has to know
    out.transposed |= _TRANSPOSED in step.operation.name
    for number, name in enumerate(step.theirs):
        module = name.removesuffix(".weight")
        # named as a parameter, or `peft` would look for experts
        if model.moe is not None and module.endswith(_OF_EXPERTS):
            out.parameters.append(name)
        else:
            out.modules.append(module)
        out.tensors[f"{PREFIX}{module}.lora_A.weight"] = a[number].contiguous()
        out.tensors[f"{PREFIX}{module}.lora_B.weight"] = b[number].contiguous()
        if lengths is not None:
            out.tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = (
                lengths[number].reshape(-1).contiguous()
            )
        if whole:
            out.ranks[module] = parts * rank


def _experts_out(
    out: PeftAdapters, step: Step, own: Sequence[Whole], model: Any, swapped: bool
) -> None:
    (name,) = step.theirs
    a = torch.stack([one.a for one in own])
    (b,) = step.operation.apply([one.b for one in own], model, inward=False)
    transposed = _TRANSPOSED in step.operation.name
    b = b.mT if transposed else b
    if swapped and not transposed:
        a, b = b.mT, a.mT
    at = f"{PREFIX}{_wrapper(name)}"
    out.parameters.append(name)
    out.tensors[f"{at}.lora_A.weight"] = a.flatten(0, 1).contiguous()
    out.tensors[f"{at}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()


def _wrapper(name: str) -> str:
    """Return the module with the adapter of a parameter of experts.

    `peft` wraps the module for its first parameter, then wraps the result for the second.
    """
    module, _, parameter = name.rpartition(".")
    return f"{module}.base_layer" if "gate_up" in parameter else module


@dataclass(frozen=True)
class Shapes:
    """The shapes of an adapter of mtrain's."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    has_magnitude: bool


class AdapterMismatch(Exception):
    """An error: adapters that are not those of a run."""


def from_peft(
    table: Table,
    model: Any,
    wanted: Mapping[str, Shapes],
    given: Mapping[str, Tensor],
    *,
    swapped: bool,
) -> dict[str, Whole]:
    """Return our adapters by weight from tensors of `peft`; `swapped` is its format up to 0.18.

    Raises:
        AdapterMismatch: a tensor is missing, of another shape, or left over, by name.
    """
    # tensors left over at the end have no place here
    left = dict(given)
    out = dict[str, Whole]()
    for step, shapes in steps_of(table, model, wanted):
        if _is_one_layer(step):
            rows = [one.b[0] for one in shapes]
            whole = replace(shapes[0], b=(sum(rows), shapes[0].b[1]))
            out |= _parts_of(_layer_in(left, step, whole, model), step, rows)
        elif len(shapes) > 1:
            out |= _experts_in(left, step, shapes, model, swapped)
        else:
            out[step.ours[0]] = _layer_in(left, step, shapes[0], model)
    if left:
        raise AdapterMismatch(
            "there is no place for"
            f" {', '.join(sorted(left)[:4])}{' and others' if len(left) > 4 else ''}"
        )
    if missing := wanted.keys() - out.keys():
        raise AdapterMismatch(f"nothing makes the adapter of {sorted(missing)[0]}")
    return out


def _taken(left: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = left.pop(name, None)
    if tensor is None:
        raise AdapterMismatch(f"{name} is missing")
    if tuple(tensor.shape) != shape:
        raise AdapterMismatch(f"{name} has shape {list(tensor.shape)}, and {list(shape)} is needed")
    return tensor


def _layer_in(left: dict[str, Tensor], step: Step, shapes: Shapes, model: Any) -> Whole:
    rank = shapes.b[1]
    inputs = shapes.a[1]
    parts = shapes.a[0] // rank
    at = [f"{PREFIX}{name.removesuffix('.weight')}" for name in step.theirs]
    whole = len(at) == 1 and parts > 1
    if whole and left.get(f"{at[0]}.lora_A.weight", torch.empty(0)).shape[:1] == (parts * rank,):
        return _parted(left, step, shapes, model, at[0])
    _fill_absent(left, at, shapes, step, model)
    a = [_taken(left, f"{name}.lora_A.weight", (rank, inputs)) for name in at]
    blank = torch.empty(shapes.b, device="meta")
    rows = [t.shape for t in _turned(blank, step, model)]
    b = [_taken(left, f"{n}.lora_B.weight", tuple(s)) for n, s in zip(at, rows, strict=True)]
    lengths = None
    if shapes.has_magnitude:
        each = [
            _taken(left, f"{n}.lora_magnitude_vector", (s[0],))
            for n, s in zip(at, rows, strict=True)
        ]
        lengths = _joined([one.unsqueeze(-1) for one in each], step, model).reshape(-1)
    return Whole(torch.cat(a * parts if whole else a), _joined(b, step, model), lengths)


def _fill_absent(
    left: dict[str, Tensor], at: Sequence[str], shapes: Shapes, step: Step, model: Any
) -> None:
    """Add zeros for those of several layers without an adapter: A and B then get no gradient."""
    absent = [name for name in at if not any(key.startswith(f"{name}.lora_") for key in left)]
    if len(absent) == len(at) or shapes.has_magnitude:
        return
    rows = [t.shape for t in _turned(torch.empty(shapes.b, device="meta"), step, model)]
    for name, shape in zip(at, rows, strict=True):
        if name in absent:
            left[f"{name}.lora_A.weight"] = torch.zeros(shapes.b[1], shapes.a[1])
            left[f"{name}.lora_B.weight"] = torch.zeros(shape)


def _joined(rows: list[Tensor], step: Step, model: Any) -> Tensor:
    turned = [t.mT if _TRANSPOSED in step.operation.name else t for t in rows]
    made: list[Tensor] = step.operation.apply(turned, model, inward=True)
    return torch.cat(made)


def _parted(left: dict[str, Tensor], step: Step, shapes: Shapes, model: Any, at: str) -> Whole:
    """Return the adapter of one layer of transformers, made of several of mtrain's by `to_peft`."""
    rows, rank = shapes.b
    a = _taken(left, f"{at}.lora_A.weight", shapes.a)
    joined = _joined([_taken(left, f"{at}.lora_B.weight", (rows, shapes.a[0]))], step, model)
    one_hot = one_hot_of(step.ours[0], Whole(a, joined[:, :rank], None), model)
    assert one_hot is not None
    b = (joined.unflatten(-1, (-1, rank)) * one_hot.unsqueeze(-1)).sum(1)
    # rows that use several A have no place in adapters of a smaller rank
    if not torch.equal(spread(b, one_hot), joined):
        raise AdapterMismatch(
            f"{at}.lora_B.weight has rank {shapes.a[0]}, and adapters of rank {rank} are needed"
        )
    length = _taken(left, f"{at}.lora_magnitude_vector", (rows,)) if shapes.has_magnitude else None
    return Whole(
        a, b, None if length is None else _joined([length.unsqueeze(-1)], step, model).reshape(-1)
    )


def _experts_in(
    left: dict[str, Tensor], step: Step, shapes: Sequence[Shapes], model: Any, swapped: bool
) -> dict[str, Whole]:
    (name,) = step.theirs
    count = len(shapes)
    rows, rank = shapes[0].b
    inputs = shapes[0].a[1]
    transposed = _TRANSPOSED in step.operation.name
    at = f"{PREFIX}{_wrapper(name)}"
    turned = swapped and not transposed
    of_a, of_b = (rows, inputs) if turned else (inputs, rows)
    a = _taken(left, f"{at}.lora_A.weight", (count * rank, of_a)).unflatten(0, (count, rank))
    b = (
        _taken(left, f"{at}.lora_B.weight", (of_b, rank * count))
        .unflatten(1, (rank, count))
        .permute(2, 0, 1)
    )
    if turned:
        a, b = b.mT, a.mT
    own = step.operation.apply([b.mT if transposed else b], model, inward=True)
    pairs = zip(step.ours, a.unbind(), own, strict=True)
    return {weight: Whole(one.contiguous(), rows.contiguous(), None) for weight, one, rows in pairs}


def adapter_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Shapes]:
    """Return the adapters of a model by weight, from the shapes of its tensors by name."""
    out = {}
    for weight in shapes:
        names = names_beside(weight)
        if names is not None and names.a in shapes:
            out[weight] = Shapes(shapes[names.a], shapes[names.b], names.magnitude in shapes)
    return out
