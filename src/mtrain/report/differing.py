"""The comparison of two runs: recipe, numbers that must be equal, and the first step that differs.

Runs whose recipes differ only in layout, speed and output compute the same numbers up to the order
of sums, so beyond the tolerances of `prove` their curves must not differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtrain import strict_json
from mtrain.config.messages.keys import effect_of
from mtrain.config.resolve.rates import LENGTH, goes_on_alike
from mtrain.config.schema.base import Effect
from mtrain.config.schema.run import RunConfig
from mtrain.plan.shrink import without_chance
from mtrain.recipes.diff import Difference, differences_of_values
from mtrain.report.folder import Line, Record, number

NUMBERS = (Effect.ARCHITECTURE, Effect.NUMERICS, Effect.CONTENTS)
"""Effects of keys that change the resulting weights."""
EXACT = ("batch_size", "tokens", "lr")
"""Keys of a step that no order of sums changes. Their tolerance covers only the last digits."""
LAST_DIGITS = 1e-9


@dataclass(frozen=True)
class Deviation:
    """The differences of one curve over the steps that both runs have."""

    what: str
    """Key of `metrics.jsonl`."""
    tolerance: float
    """Accepted difference, as a share of the first run's value."""
    largest: float
    at: int
    """The step of the largest difference."""
    unequal: int | None
    """The first step whose values are not bitwise equal; None: all are."""
    first: int | None
    """The first step beyond the tolerance; None: none is."""
    pair: tuple[Any, Any]
    """Both values at that step, or else at the largest difference."""
    error: float
    """The difference there."""

    def data(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Two runs, compared."""

    differences: Sequence[Difference]
    """The keys that differ, those that change the numbers first."""
    changing: Sequence[str]
    """Keys among them for which other numbers are expected."""
    excuses: Sequence[str]
    """Reasons why another layout draws or rounds other numbers here."""
    rows: Sequence[Deviation]
    steps: int
    """Steps that both have."""

    @property
    def first(self) -> Deviation | None:
        """Return the curve that differs first; None: all are within their tolerances."""
        beyond = [row for row in self.rows if row.first is not None]
        return min(beyond, key=lambda row: row.first or 0, default=None)

    @property
    def must_agree(self) -> bool:
        """Return whether both must have the same numbers."""
        return not self.changing and not self.excuses

    @property
    def is_wrong(self) -> bool:
        """Return whether numbers differ that must not."""
        return self.must_agree and self.first is not None


def compare(left: Record, right: Record, tolerances: Mapping[str, float]) -> Comparison:
    """Compare two runs; `tolerances` are those of `prove` for their number format."""
    found = differences_of_values(left.values, right.values)
    free = _free(left, right)
    changing = [d.key for d in found if d.kind in NUMBERS and d.key not in free]
    loss = tolerances["loss"]
    norm = tolerances["gradient norm"]
    if math.isfinite(tolerances["gradient"]):
        # A proof compares the norm of the first step. Weights of later ones differ by rounding, and
        # with them gradients.
        norm = max(norm, tolerances["gradient"])
    bounds = dict.fromkeys(EXACT, LAST_DIGITS) | {"loss": loss, "grad_norm": norm}
    rows = [*_rows(left.steps, right.steps, bounds)]
    rows += _rows(left.evaluations, right.evaluations, {"valid_loss": loss})
    steps = len(left.steps.keys() & right.steps.keys())
    return Comparison(found, changing, _excuses(left, right), rows, steps)


def digest_of_numbers(record: Record) -> str:
    """Return the sha256 of the canonical JSON of all keys that change the resulting weights."""
    keys = {key: value for key, value in record.values.items() if effect_of(key) in NUMBERS}
    text = strict_json.dumps(keys, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _free(left: Record, right: Record) -> Sequence[str]:
    """Return the keys of the length, if both runs have the same rates in their common steps."""
    one = left.config
    other = right.config
    if one is None or other is None:
        return ()
    shorter, longer = sorted((one, other), key=lambda run: run.trainer.steps)
    return LENGTH if goes_on_alike(longer, shorter, shorter.trainer.steps) else ()


def _excuses(left: Record, right: Record) -> list[str]:
    """Return why runs of one recipe may differ in other layouts, as `prove` leaves it out."""
    one = left.config
    other = right.config
    if one is None or other is None or (one.parallel == other.parallel and _micro(one, other)):
        return []
    moe = one.model.moe
    reasons = {
        "ranks of another layout draw other random numbers (dropout, or noise of routers)": (
            without_chance(one) != one
        ),
        "experts drop other tokens where they have a capacity": (
            moe is not None and moe.expert_capacity_factor is not None
        ),
        "experts are balanced, and FP8 is scaled, over micro-batches of another size": (
            not _micro(one, other) and (moe is not None or one.precision.quantized is not None)
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _micro(one: RunConfig, other: RunConfig) -> bool:
    return one.trainer.micro == other.trainer.micro


def _rows(
    left: Mapping[int, Line], right: Mapping[int, Line], bounds: Mapping[str, float]
) -> Iterator[Deviation]:
    for key, tolerance in bounds.items():
        pairs = {
            step: (line[key], right[step][key])
            for step, line in left.items()
            if key in line and key in right.get(step, ())
        }
        if pairs:
            yield _row(key, tolerance, pairs)


def _row(key: str, tolerance: float, pairs: Mapping[int, tuple[Any, Any]]) -> Deviation:
    errors = {step: _distance(*pair) for step, pair in pairs.items()}
    at = max(errors, key=errors.__getitem__)
    unequal = next((step for step, error in errors.items() if error), None)
    first = next((step for step, error in errors.items() if error > tolerance), None)
    shown = at if first is None else first
    return Deviation(key, tolerance, errors[at], at, unequal, first, pairs[shown], errors[shown])


def _distance(a: Any, b: Any) -> float:
    """Return the difference of two values as a share of the first; infinite if only one of them is
    a finite number.
    """
    one = number(a)
    other = number(b)
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    return abs(one - other) / max(abs(one), 1e-12) if one != other else 0.0
