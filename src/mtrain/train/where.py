"""Where a layout first computes something else than one rank, step by step: modules, gradients,
norm, weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mtrain.ckpt import store
from mtrain.ckpt.folder import MODEL, folder_name
from mtrain.train.locate import BACKWARD, FORWARD, Difference, Recorded, first
from mtrain.train.prove import MIDDLE, RESTORED, STEPS, is_weight, relative, whole_tensors

GRADIENT = "gradient"
NORM = "norm"
UPDATE = "update"
RESUME = "resume"
LATER = 1e-3
"""What passes modules may differ by in later steps, where weights are no longer bitwise alike."""
LAYERS = ("decoder.layers.", "encoder.layers.", "mtp.layers.")
MANY = 0.9
"""The share of all weights from which on it is no longer a module's."""


@dataclass(frozen=True)
class Bounds:
    """Relative errors that are rounding: of a token in a module, of the loss, the gradient, its
    norm, and weights.
    """

    module: float
    loss: float
    gradient: float
    norm: float
    weight: float


def where(one: Path, many: Path, steps: int, bounds: Bounds) -> Difference | None:
    """Return the first difference between what `prove.observe` traced of one rank and of a layout;
    None: none is found.

    In each step: forward by modules, backward by modules, the gradient as the optimizer finds it,
    its norm, and the weights after the update; after a resume, what was read back, bitwise.
    """
    expected = Recorded(one)
    found = Recorded(many)
    a, b = (json.loads((folder / STEPS).read_text()) for folder in (one, many))
    for step in range(1, steps + 1):
        if step == steps // 2 + 1 and (many / RESTORED).exists():
            seen = _in_restored(many, step)
            if seen is not None:
                return seen
        loose = 1 if step == 1 else max(1.0, LATER / bounds.module)
        seen = first(expected, found, step, FORWARD, bounds.module * loose)
        if seen is not None:
            return seen
        error = relative(a[step - 1]["loss"], b[step - 1]["loss"])
        if error > bounds.loss * loose:
            return Difference("reported loss", "no module's output differs", FORWARD, step, error)
        seen = first(expected, found, step, BACKWARD, bounds.module * loose)
        if seen is not None:
            return seen
        gradients = [
            _weights(folder / f"gradients_{step}" / folder_name(0)) for folder in (one, many)
        ]
        seen = _in_weights(gradients[0], gradients[1], bounds.gradient * loose, GRADIENT, step)
        if seen is not None:
            return seen
        norms = a[step - 1]["grad_norm"], b[step - 1]["grad_norm"]
        if relative(*norms) > bounds.norm * loose:
            return _in_norm(gradients[0], norms[0], norms[1], step)
        after = [_weights(folder / f"weights_{step}" / folder_name(step)) for folder in (one, many)]
        seen = _in_weights(after[0], after[1], bounds.weight, UPDATE, step)
        if seen is not None:
            return seen
    return None


def _in_restored(many: Path, step: int) -> Difference | None:
    """What a resume read back otherwise than it was saved."""
    saved, restored = (
        store.Checkpoint.open(many / name / folder_name(step - 1)) for name in (MIDDLE, RESTORED)
    )
    for key in sorted(saved.manifest["tensors"]):
        if not torch.equal(saved.whole(key), restored.whole(key)):
            what = f"{key} is not what was saved at step {step - 1}"
            return Difference(f"{RESUME} {_module(key)}", what, RESUME, step, math.inf)
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
    found: dict[str, torch.Tensor] = {}
    for key, value in whole_tensors(checkpoint).items():
        name = key.removeprefix(MODEL)
        row = next((prefix for prefix in LAYERS if name.startswith(prefix)), None)
        if not is_weight(key):
            continue
        if row is None or name.removeprefix(row)[:1].isdigit():
            found[name] = value
        else:
            rest = name.removeprefix(row)
            found |= {f"{row}{layer}.{rest}": part for layer, part in enumerate(value)}
    return found


def _in_weights(
    one: Mapping[str, torch.Tensor],
    many: Mapping[str, torch.Tensor],
    tolerance: float,
    way: str,
    step: int,
) -> Difference | None:
    """Return the weight whose gradient, or that itself, is furthest off, and how many
    others are.
    """
    odd = sorted(one.keys() ^ many.keys())
    if odd:
        return Difference(_module(odd[0]), f"{odd[0]} is on one side only", way, step, math.inf)
    errors = {key: _error(value, many[key]) for key, value in one.items()}
    off = {key: error for key, error in errors.items() if error > tolerance}
    if not off:
        return None
    worst = max(off, key=lambda key: off[key])
    factors = {round(_factor(one[key], many[key]), 3) for key in off if float(one[key].norm())}
    what = "the gradient" if way == GRADIENT else "the weight after the update"
    if len(factors) == 1 and way == GRADIENT:
        scaled = f" is {factors.pop():g} times what it should be"
    else:
        scaled = " differs"
    reason = ", what passes the modules does not" if way == GRADIENT else ", its gradient does not"
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
    """Which gradients a wrong norm counts otherwise than once, if one kind of weight
    explains it.
    """
    if many is None:
        return Difference("gradient norm", "it is no number", NORM, step, math.inf)
    squares: dict[str, float] = {}
    for key, value in gradients.items():
        squares[_kind(key)] = squares.get(_kind(key), 0.0) + float(value.double().square().sum())
    excess = many**2 - one**2
    found = (
        (abs(excess - times * square) / abs(excess), times, kind)
        for kind, square in squares.items()
        for times in (-1, 1, 3)
    )
    off, times, kind = min(found)
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
