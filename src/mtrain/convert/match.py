"""The match of a folder's tensors with a model's, one to one; an error names any other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtrain.convert.boxes import Box
from mtrain.errors import CorruptData
from mtrain.models.table import Step, Table

NAMED = 8
"""Names that a message gives."""


@dataclass(frozen=True)
class Match:
    """The steps from one side to the other, and the foreign tensors without a step."""

    table: Table
    steps: tuple[Step, ...]
    copies: dict[str, str]
    """Foreign tensor that repeats another one -> that one."""
    ignored: tuple[str, ...] = ()
    """Foreign tensors that are no part of the model."""


def match(
    tables: Iterable[Table], model: Any, ours: Collection[str], theirs: Collection[str]
) -> Match:
    """Return the steps of the table whose names match those of `theirs`.

    Raises:
        CorruptData: some names of either side are unused, or used twice.
    """
    found = [_match(table, model, set(ours), set(theirs)) for table in tables]
    # the files follow the table with the fewest complaints
    best, wrong = min(found, key=lambda pair: len(pair[1]))
    if wrong:
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise CorruptData(
            f"the weights are not those of this model: {'; '.join(wrong[:NAMED])}{more}"
        )
    return best


def export_match(table: Table, model: Any, ours: Collection[str]) -> Match:
    """Return the steps that write a folder by a table.

    Raises:
        CorruptData: a tensor of the run's model has no entry.
    """
    # without entries of parts that this model lacks
    steps = [step for step in table.entries(model) if set(step.ours) <= set(ours)]
    used = Counter(name for step in steps for name in step.ours)
    left = [f"{name} is made {used[name]} times" for name in ours if used[name] != 1]
    if left:
        raise CorruptData(
            f"the table of weights does not fit this model: {'; '.join(sorted(left)[:NAMED])}"
        )
    made = {name for step in steps for name in step.theirs}
    # as transformers does, a tied head is left out; published files have the copies of MTP layers
    heads = {copy.name for copy in table.copies if not copy.of_mtp}
    copies = {
        name: of
        for name, of in held_twice(table, model).items()
        if of in made and name not in heads
    }
    return Match(table, tuple(steps), copies)


def _match(table: Table, model: Any, ours: set[str], theirs: set[str]) -> tuple[Match, list[str]]:
    ignored = {n for n in theirs if any(re.fullmatch(pattern, n) for pattern in table.ignored)}
    entries = list(table.entries(model))
    needed = {n for step in entries if set(step.ours) & ours for n in step.theirs}
    # a tied head is the embedding once more, and no tensor of a head that our model lacks
    copies = {
        k: of for k, of in held_twice(table, model).items() if k in theirs and k not in needed
    }
    steps = [s for s in entries if set(s.ours) & ours or set(s.theirs) & theirs - copies.keys()]
    steps, copies = _without_originals(steps, copies, theirs)
    # twice is as wrong as never: a later step would overwrite an earlier one
    used_ours = Counter(n for step in steps for n in step.ours)
    used = Counter(n for step in steps for n in step.theirs)
    left = theirs - ignored - set(copies)
    wrong = [f"nothing of ours is made of {n}" for n in sorted(left - set(used))]
    wrong += [f"{n} is missing" for n in sorted(set(used) - theirs)]
    wrong += [f"nothing makes our {n}" for n in sorted(ours - set(used_ours))]
    wrong += [f"our model has no {n}" for n in sorted(set(used_ours) - ours)]
    for side in (used, used_ours):  # one name may be that of a tensor on both
        wrong += [f"{n} is used {count} times" for n, count in sorted(side.items()) if count > 1]
    return Match(table, tuple(steps), copies, tuple(sorted(ignored))), wrong


def held_twice(table: Table, model: Any) -> dict[str, str]:
    """Return copy -> tensor that a step reads, through copies of copies.

    The head of an MTP layer is that of the model, which may be a copy of the embedding.
    """
    twice = table.held_twice(model)
    return {name: twice.get(of, of) for name, of in twice.items()}


def _without_originals(
    steps: list[Step], copies: dict[str, str], theirs: set[str]
) -> tuple[list[Step], dict[str, str]]:
    """Return steps that read a copy if its original is missing, as transformers does."""
    instead: dict[str, str] = {}
    for name, of in copies.items():
        if of not in theirs:
            # the first copy stands in for the original
            instead.setdefault(of, name)
    steps = [replace(step, theirs=tuple(instead.get(n, n) for n in step.theirs)) for step in steps]
    left = {n: instead.get(of, of) for n, of in copies.items() if n not in instead.values()}
    return steps, left


def shapes_of_theirs(step: Step, model: Any, ours: Mapping[str, Box]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a step makes of the run's."""
    import torch

    # on the meta device, an operation computes shapes and no number
    blank = [torch.empty(ours[name].shape, device="meta") for name in step.ours]
    made = step.operation.apply(blank, model, inward=False)
    return {name: tuple(tensor.shape) for name, tensor in zip(step.theirs, made, strict=True)}


def check_shape(step: Step, name: str, shape: tuple[int, ...], ours: Box) -> None:
    """Check the shape of a tensor that an import step made.

    Raises:
        CorruptData: our tensor has another shape.
    """
    if shape != ours.shape:
        shapes = f"{list(shape)}, and our {name} {list(ours.shape)}"
        raise CorruptData(f"{', '.join(step.theirs[:3])} make a tensor of shape {shapes}")
