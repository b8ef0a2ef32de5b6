"""Where two layouts first part: the first module, in the order of execution, that takes or gives
something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.train import activations

FORWARD = "forward"
BACKWARD = "backward"
Entry = tuple[dict[str, Any], dict[str, Any], np.ndarray]
"""Facts of a rank, an event of its, and its values."""


@dataclass(frozen=True)
class Passed:
    """One tensor that passes a module's border in one direction, all of its parts in
    both layouts.
    """

    key: str
    """Name of the module, with the number of the call where it is called again for the same tokens.
    """
    side: str
    way: str
    step: int

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.key.partition(" ")[0]


@dataclass(frozen=True)
class Difference:
    """The first difference, and the module that makes it."""

    module: str
    what: str
    """In words, what differs and what before it does not."""
    way: str
    step: int
    error: float


class Recorded:
    """What all ranks of a run kept, put together."""

    def __init__(self, folder: Path) -> None:
        self.order: list[Passed] = []
        self.parts: dict[Passed, list[Entry]] = {}
        for facts, arrays in activations.read(folder):
            for event, values in zip(facts["events"], arrays, strict=True):
                passed = Passed(event["key"], event["side"], event["way"], event["step"])
                if passed not in self.parts:
                    self.order.append(passed)
                    self.parts[passed] = []
                self.parts[passed].append((facts, event, values))

    def steps(self) -> list[int]:
        """Return the steps that were recorded."""
        return sorted({passed.step for passed in self.order})

    def in_order(self, step: int, way: str) -> list[Passed]:
        """What passes borders in a step, in the order of execution on one rank: backward is
        forward, reversed.
        """
        forward = [passed for passed in self.order if passed.step == step and passed.way == FORWARD]
        if way == FORWARD:
            return forward
        back = [Passed(p.key, p.side, BACKWARD, step) for p in reversed(forward)]
        return [passed for passed in back if passed in self.parts]


def first(
    one: Recorded, many: Recorded, step: int, way: str, tolerance: float
) -> Difference | None:
    """Return the first difference of a step, forward or backward, above a relative error of a
    token; None: there is none.

    `one` is a run on one rank; its order is the order of execution.
    """
    passed = [p for p in one.in_order(step, way) if p in many.parts]
    for index, here in enumerate(passed):
        error = difference(one.parts[here], many.parts[here])
        if error > tolerance:
            before = passed[index - 1] if index else None
            module, what = _blamed(here, before)
            return Difference(module, what, way, step, error)
    return None


def errors(one: Recorded, many: Recorded) -> Iterator[tuple[Passed, float]]:
    """Yield the relative error of everything that passes, in the order of execution."""
    for step in one.steps():
        for way in (FORWARD, BACKWARD):
            for passed in one.in_order(step, way):
                if passed in many.parts:
                    yield passed, difference(one.parts[passed], many.parts[passed])


def _blamed(here: Passed, before: Passed | None) -> tuple[str, str]:
    """Whose code makes the difference, and the sentence that says so."""
    own = here.module
    outward = here.side.startswith("output" if here.way == FORWARD else "input")
    noun = here.side if here.way == FORWARD else f"gradient of its {here.side}"
    after = f", after {before.side} of {before.key}" if before is not None else ""
    if outward:
        return own, f"the {noun} differs, what it is made of does not"
    above, _, last = own.rpartition(".")
    if (
        last.isdigit() or not above
    ):  # a layer in a row of layers: what hands it on from stage to stage
        return own, f"the {noun} differs{after}: it is handed on wrongly"
    return above, f"the {noun} of {own} differs{after}"


def difference(one: list[Entry], many: list[Entry]) -> float:
    """Return the largest difference of a token, relative to the size of a token; 0.0 where parts
    cannot be compared.
    """
    kind = one[0][1]
    if "experts" in kind:
        return _of_whole(_expert_sums(one), _expert_sums(many))
    if kind["places"] == []:
        return _of_scalars(one, many)
    whole, known = _whole(one)
    if known.any():
        scale = float(
            np.sqrt(np.mean(np.square(whole[known]).reshape(int(known.sum()), -1).sum(1)))
        )
    else:
        scale = 0.0
    worst = 0.0
    for facts, event, values in many:
        cut = _part(whole, facts, event, values)
        if cut is None:
            continue
        places = np.asarray(event["places"])
        kept = (places < len(known)) & known[np.minimum(places, len(known) - 1)]
        values = values[kept]
        cut = cut[kept]
        found = np.square(values - cut).reshape(len(values), -1).sum(1)
        error = float(np.sqrt(found.max())) if len(found) else 0.0
        worst = max(worst, error / max(scale, 1e-30)) if np.isfinite(error) else float("inf")
    return worst


def _whole(entries: list[Entry]) -> tuple[np.ndarray, np.ndarray]:
    """Return the whole tensor of all tokens of a step, of what one rank kept in one or more
    micro-batches, and which of its tokens are known.
    """
    count = 1 + max(max(event["places"]) for _, event, _ in entries)
    whole = np.zeros((count, *entries[0][2].shape[1:]))
    known = np.zeros(count, dtype=bool)
    for _, event, values in entries:
        places = np.asarray(event["places"])
        if values.shape[1:] == whole.shape[1:]:
            whole[places[places >= 0]] = values[places >= 0]
            known[places[places >= 0]] = True
    return whole, known


def _part(
    whole: np.ndarray, facts: dict[str, Any], event: dict[str, Any], values: np.ndarray
) -> np.ndarray | None:
    """Return the part of a whole tensor that a rank holds; None where it is cut in a way that is
    not known.
    """
    places = event["places"]
    rows = event["rows"]
    if whole.ndim != values.ndim or len(places) != len(values):
        return None
    cut: np.ndarray = whole[np.minimum(places, len(whole) - 1)]
    if cut.shape == values.shape:
        return cut
    if rows is not None:
        return (
            cut[..., rows] if max(rows) < cut.shape[-1] and len(rows) == values.shape[-1] else None
        )
    tp = facts["sizes"]["tp"]
    rank = facts["coords"]["tp"]
    cuts = [axis for axis in range(1, cut.ndim) if cut.shape[axis] != values.shape[axis]]
    if len(cuts) != 1 or cut.shape[cuts[0]] != tp * values.shape[cuts[0]]:
        return None
    size = values.shape[cuts[0]]
    return cut.take(range(rank * size, (rank + 1) * size), axis=cuts[0])


def _expert_sums(entries: list[Entry]) -> np.ndarray | None:
    """Sums over all rows of each expert [experts, features]; None where ranks hold
    other features.
    """
    facts, event, _ = entries[0]
    width = {values.shape[1:] for _, _, values in entries}
    if len(width) != 1 or (
        facts["sizes"]["etp"] > 1 and event["key"].endswith("fc1") and event["side"] != "input 0"
    ):
        return None
    count = max(event["experts"] + len(values) for _, event, values in entries)
    total = np.zeros((count, *next(iter(width))))
    for _, event, values in entries:
        total[event["experts"] : event["experts"] + len(values)] += values
    return total


def _of_whole(one: np.ndarray | None, many: np.ndarray | None) -> float:
    if one is None or many is None or one.shape != many.shape:
        return 0.0
    scale = float(np.linalg.norm(one)) / max(1, len(one)) ** 0.5
    worst = float(np.sqrt(np.square(one - many).sum(-1).max()))
    return worst / max(scale, 1e-30) if np.isfinite(worst) else float("inf")


def _of_scalars(one: list[Entry], many: list[Entry]) -> float:
    """Return the difference of sums over micro-batches; every tensor-parallel rank has all of its
    own.
    """
    expected = sum(float(values) for _, _, values in one)
    found: dict[int, float] = {}
    for facts, _, values in many:
        rank = facts["coords"]["tp"]
        found[rank] = found.get(rank, 0.0) + float(values)
    worst = max(abs(value - expected) for value in found.values())
    return worst / max(abs(expected), 1e-30) if np.isfinite(worst) else float("inf")
