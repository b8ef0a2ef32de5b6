"""The first divergence of a layout from one rank: modules, gradients, norm or weights of a step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain.ckpt import store
from mtrain.ckpt.folder import MODEL, folder_name
from mtrain.train.trace import activations
from mtrain.train.verify.prove import MIDDLE, RESTORED, STEPS, is_weight, relative, whole_tensors

FORWARD = "forward"
BACKWARD = "backward"
GRADIENT = "gradient"
NORM = "norm"
UPDATE = "update"
RESUME = "resume"
LATER = 1e-3
"""Relative tolerance of modules in later steps, where weights are no longer bitwise equal."""
LAYERS = ("decoder.layers.", "encoder.layers.", "mtp.layers.")
MANY = 0.9
"""The share of all weights above which no single module is blamed."""
Entry = tuple[dict[str, Any], dict[str, Any], np.ndarray]
"""Facts of a rank, one of its events, and the values of that event."""


@dataclass(frozen=True)
class Passed:
    """One tensor that passes a module's border in one direction, whole in both layouts."""

    key: str
    """Name of the module, with the number of a repeated call for the same tokens."""
    side: str
    way: str
    step: int

    @property
    def module(self) -> str:
        """Return the name of the module."""
        return self.key.partition(" ")[0]


@dataclass(frozen=True)
class Difference:
    """The first difference, and the module that makes it."""

    module: str
    what: str
    """Description of the outputs that differ, and of the earlier ones that do not."""
    way: str
    step: int
    error: float


class Recorded:
    """The tensors that all ranks of a run recorded, put together."""

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
        """Return the tensors that pass borders in a step, in the order of execution on one rank:
        backward is forward, reversed.
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
    token; None if nothing differs.

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
    """Return the module whose code makes the difference, and a sentence about it."""
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
    """Return a token's largest difference, relative to its size; 0.0 if incomparable."""
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
        squares = np.square(values - cut).reshape(len(values), -1).sum(1)
        error = float(np.sqrt(squares.max())) if len(squares) else 0.0
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
    """Return a rank's part of a whole tensor; None if its cut is unknown."""
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
    """Return the sums over each expert's rows [experts, features]; None if features differ."""
    facts, event, _ = entries[0]
    width = {values.shape[1:] for _, _, values in entries}
    # Ranks of expert tensor parallelism hold different features: their sums cannot be added.
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
    # A token's error is measured against the size of an average token, not of its own.
    scale = float(np.linalg.norm(one)) / max(1, len(one)) ** 0.5
    worst = float(np.sqrt(np.square(one - many).sum(-1).max()))
    return worst / max(scale, 1e-30) if np.isfinite(worst) else float("inf")


def _of_scalars(one: list[Entry], many: list[Entry]) -> float:
    """Return the difference of sums over micro-batches; tensor-parallel ranks have all."""
    expected = sum(float(values) for _, _, values in one)
    sums: dict[int, float] = {}
    for facts, _, values in many:
        rank = facts["coords"]["tp"]
        sums[rank] = sums.get(rank, 0.0) + float(values)
    worst = max(abs(value - expected) for value in sums.values())
    return worst / max(abs(expected), 1e-30) if np.isfinite(worst) else float("inf")


@dataclass(frozen=True)
class Bounds:
    """Relative errors that are rounding: of tokens, the loss, gradients, norms and weights."""

    module: float
    loss: float
    gradient: float
    norm: float
    weight: float


def first_divergence(one: Path, many: Path, steps: int, bounds: Bounds) -> Difference | None:
    """Return the first difference between what `prove.observe` traced of one rank and of a layout,
    or None.

    In each step: forward by modules, backward by modules, the gradient as the optimizer finds it,
    its norm, and the weights after the update; after a resume, what was read back, bitwise.
    """
    expected = Recorded(one)
    recorded = Recorded(many)
    a, b = (json.loads((folder / STEPS).read_text()) for folder in (one, many))
    for step in range(1, steps + 1):
        if step == steps // 2 + 1 and (many / RESTORED).exists():
            seen = _in_restored(many, step)
            if seen is not None:
                return seen
        # Later steps compare weights that rounding has already made different.
        loose = 1 if step == 1 else max(1.0, LATER / bounds.module)
        seen = first(expected, recorded, step, FORWARD, bounds.module * loose)
        if seen is not None:
            return seen
        # All modules agree here, so the report itself is wrong.
        error = relative(a[step - 1]["loss"], b[step - 1]["loss"])
        if error > bounds.loss * loose:
            return Difference("reported loss", "no module's output differs", FORWARD, step, error)
        seen = first(expected, recorded, step, BACKWARD, bounds.module * loose)
        if seen is not None:
            return seen
        # Modules may agree while ranks add their gradients up wrongly.
        gradients = [
            _weights(folder / f"gradients_{step}" / folder_name(0)) for folder in (one, many)
        ]
        seen = _in_weights(gradients[0], gradients[1], bounds.gradient * loose, GRADIENT, step)
        if seen is not None:
            return seen
        # After the gradient: if that is equal, a wrong norm is the norm's own fault.
        norms = a[step - 1]["grad_norm"], b[step - 1]["grad_norm"]
        if relative(*norms) > bounds.norm * loose:
            return _in_norm(gradients[0], norms[0], norms[1], step)
        after = [_weights(folder / f"weights_{step}" / folder_name(step)) for folder in (one, many)]
        seen = _in_weights(after[0], after[1], bounds.weight, UPDATE, step)
        if seen is not None:
            return seen
    return None


def _in_restored(many: Path, step: int) -> Difference | None:
    """Return the first tensor or fact that a resume did not read back as it was saved."""
    saved, restored = (
        store.Checkpoint.open(many / name / folder_name(step - 1)) for name in (MIDDLE, RESTORED)
    )
    for key in sorted(saved.manifest["tensors"]):
        if not torch.equal(saved.whole(key), restored.whole(key)):
            what = f"{key} is not what was saved at step {step - 1}"
            return Difference(f"{RESUME} {_module(key)}", what, RESUME, step, math.inf)
    # Not tensors, but a resume depends on them.
    for fact in ("optimizer_step", "schedule_steps", "consumed_samples", "loss_scale"):
        a = saved.state[fact]
        b = restored.state[fact]
        if a != b:
            return Difference(
                f"{RESUME} {fact}",
                f"{b} instead of {a} after step {step - 1}",
                RESUME,
                step,
                math.inf,
            )
    return None


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return weights of a checkpoint by module and layer:
    `decoder.layers.3.mlp.linear_fc1.weight`.
    """
    weights: dict[str, torch.Tensor] = {}
    for key, value in whole_tensors(checkpoint).items():
        name = key.removeprefix(MODEL)
        row = next((prefix for prefix in LAYERS if name.startswith(prefix)), None)
        if not is_weight(key):
            continue
        if row is None or name.removeprefix(row)[:1].isdigit():
            weights[name] = value
        else:
            rest = name.removeprefix(row)
            weights |= {f"{row}{layer}.{rest}": part for layer, part in enumerate(value)}
    return weights


def _in_weights(
    one: Mapping[str, torch.Tensor],
    many: Mapping[str, torch.Tensor],
    tolerance: float,
    way: str,
    step: int,
) -> Difference | None:
    """Return the weight that is furthest off, or whose gradient is, and how many others are."""
    odd = sorted(one.keys() ^ many.keys())
    if odd:
        return Difference(_module(odd[0]), f"{odd[0]} is on one side only", way, step, math.inf)
    errors = {key: _error(value, many[key]) for key, value in one.items()}
    off = {key: error for key, error in errors.items() if error > tolerance}
    if not off:
        return None
    worst = max(off, key=lambda key: off[key])
    # The same factor in all of them names the bug: a sum over too many ranks, or too few.
    factors = {round(_factor(one[key], many[key]), 3) for key in off if float(one[key].norm())}
    what = "the gradient" if way == GRADIENT else "the weight after the update"
    if len(factors) == 1 and way == GRADIENT:
        scaled = f" is {factors.pop():g} times what it should be"
    else:
        scaled = " differs"
    reason = ", what passes the modules does not" if way == GRADIENT else ", its gradient does not"
    # A wrong learning rate or scale is in every weight.
    if len(off) > MANY * len(one):
        return Difference(
            "every weight",
            f"{what}{scaled}{reason}: no single module makes it",
            way,
            step,
            off[worst],
        )
    kinds = sorted({_kind(key) for key in off})
    others = f"; {len(off)} of {len(one)} weights: {', '.join(kinds[:4])}" + (
        ", ..." if len(kinds) > 4 else ""
    )
    return Difference(
        _module(worst), f"{what} of {worst}{scaled}{reason}{others}", way, step, off[worst]
    )


def _in_norm(
    gradients: Mapping[str, torch.Tensor], one: float, many: float | None, step: int
) -> Difference:
    """Return the one kind of weight whose miscounted gradients explain a wrong norm, if any."""
    if many is None:
        return Difference("gradient norm", "it is no number", NORM, step, math.inf)
    squares: dict[str, float] = {}
    for key, value in gradients.items():
        # The norm squared is a sum over kinds: try whether one kind was added 0, 2 or 4 times.
        squares[_kind(key)] = squares.get(_kind(key), 0.0) + float(value.double().square().sum())
    excess = many**2 - one**2
    guesses = (
        (abs(excess - times * square) / abs(excess), times, kind)
        for kind, square in squares.items()
        for times in (-1, 1, 3)
    )
    off, times, kind = min(guesses)
    error = relative(one, many)
    if off < 1e-3:
        return Difference(
            kind, f"its gradient counts {times + 1} times in the gradient norm", NORM, step, error
        )
    ratio = many / one
    what = f"it is {ratio:.4g} times that of the gradient, which does not differ"
    return Difference("gradient norm", what, NORM, step, error)


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / a.double().norm().clamp_min(1e-12))


def _factor(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b.double()).sum() / a.double().square().sum())


def _module(key: str) -> str:
    return key.rpartition(".")[0]


def _kind(key: str) -> str:
    """Return a weight's name in any layer."""
    return ".".join("*" if part.isdigit() else part for part in key.split("."))
