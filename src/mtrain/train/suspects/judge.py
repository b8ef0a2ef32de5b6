"""The first abnormal output of a step, by the outputs of healthy steps."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, pstdev
from typing import Any

FORWARD = "forward"
BACKWARD = "backward"
LEAST = 3
"""Healthy outputs of a module before others are compared with them."""
KEPT = 24
"""Healthy outputs of a module that are kept."""
GAIN = math.log(8.0)
"""The least change of a gain, as a logarithm, that is abnormal."""
DEVIATIONS = 6.0
"""Standard deviations of healthy outputs beyond which one is abnormal."""
NOISE = 0.05
"""The least standard deviation of cosines: few healthy ones may be alike by chance."""
RELATED = 0.25
"""The least cosine in healthy steps of an output whose sign is judged."""
RELIABLE = 0.5
"""The same of an output whose size is compared with that of its prediction."""
FLIPPED = 0.5
"""The least cosine of a flipped sign, as a share of the usual one."""
TURNED = 5.0
"""Standard deviations of healthy cosines that a flipped one is away from them. Fewer than of sizes:
it is also on the other side of 0.
"""
SMALLEST = 1e-30
"""The size of a prediction of 0."""
NOT_FINITE = "not finite"
FACTOR = "abnormal size"
SIGN = "abnormal sign"


Key = tuple[str, str, str]
"""Module, direction, and output."""


@dataclass
class Event:
    """An output of a module: in the backward, the gradient of an input."""

    name: str
    """The module, with layers numbered over all stages."""
    way: str
    micro_batch: int
    """Number from 0, of this data-parallel rank."""
    side: str
    """Name of the output, or of the input whose gradient it is."""
    order: tuple[int, int] = (0, 0)
    """The place in the order of execution: the stage, and a count on this rank."""
    output: dict[str, Any] = field(default_factory=dict)
    """Statistics of the output."""
    input: dict[str, Any] = field(default_factory=dict)
    """The same of the input, of the worst one if there are several."""
    agreement: float | None = None
    """The cosine of the output with its prediction; None: there is none."""
    predicted: float = 1.0
    """The size of the prediction over that of the output."""
    scaling: tuple[float, float] | None = None
    """The same two, of what a gradient takes from its tokens and what arrived there takes from the
    outputs: the change of the loss when a token grows. None: they are not known.
    """

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what events of other micro-batches and steps have in common with this one."""
        return self.name, self.way, self.side


@dataclass
class Finding:
    """An output that is abnormal although nothing before it is."""

    event: Event
    kind: str
    words: str
    deviation: float
    """Distance from the usual: the share of elements that are not finite, a factor, or a cosine."""


class Healthy:
    """The outputs of modules in healthy steps of this rank."""

    def __init__(self) -> None:
        self.known: dict[Key, deque[Event]] = defaultdict(lambda: deque(maxlen=KEPT))

    def learn(self, events: Iterable[Event]) -> None:
        """Keep the events of a healthy step."""
        for event in events:
            self.known[event.key].append(event)

    def first_abnormal(self, events: Sequence[Event]) -> Finding | None:
        """Return the first abnormal event of this rank; one of sign only if there is no other."""
        of_key: dict[Key, list[Event]] = defaultdict(list)
        for event in events:
            of_key[event.key].append(event)
        judged = (self.judge(each, of_key[each.key]) for each in sorted(events, key=place))
        found = [one for one in judged if one is not None]
        return next((one for one in found if one.kind != SIGN), found[0] if found else None)

    def judge(self, event: Event, step: Sequence[Event]) -> Finding | None:
        """Return why an event is abnormal although its input is not; None: it is normal, or has
        only received the fault.

        `step` are the same outputs in all micro-batches of the step.
        """
        known = self.known[event.key]
        # A mask may be infinite in every step.
        masked = any(one.input.get("not_finite") for one in known)
        received = event.input.get("not_finite") and not masked
        bad = event.output["not_finite"]
        if bad:
            if received or any(one.output["not_finite"] for one in known):
                return None
            many = math.prod(event.output["shape"])
            words = f"{bad} of {many} elements, and the input has none such"
            return Finding(event, NOT_FINITE, words, bad / many)
        if received or len(known) < LEAST:
            return None
        seen = list(known)
        typical = _typical(seen)
        scaled = [_by_scaling(one) for one in seen if one.scaling is not None]
        if event.scaling is not None and _typical(scaled) > typical:
            typical = _typical(scaled)
            seen = scaled
            event = _by_scaling(event)
        predicted = typical >= RELIABLE
        agreements = [one.agreement for one in seen if one.agreement is not None]
        finding = self._size(event, seen, step, predicted=predicted)
        return finding or self._sign(event, agreements)

    def _size(
        self, event: Event, known: Sequence[Event], step: Sequence[Event], *, predicted: bool
    ) -> Finding | None:
        change = _change(gain(event), map(gain, self.known[event.key]))
        if change is None:
            return None
        # Sizes may grow fast in a healthy run: the fault must be against something of this step.
        if predicted:
            related = [one for one in known if one.agreement is not None]
            against = _change(_excess(event), map(_excess, related))
        else:
            others = (one for one in step if one.micro_batch != event.micro_batch)
            against = _change(gain(event), map(gain, others), 2)
        if against is None or against * change < 0:
            return None
        factor = math.exp(against)
        words = f"its size is {factor:.3g} times that expected from its input"
        return Finding(event, FACTOR, words, factor)

    def _sign(self, event: Event, usual: Sequence[float]) -> Finding | None:
        own = event.agreement
        if own is None or len(usual) < LEAST:
            return None
        typical = median(usual)
        spread = max(NOISE, pstdev(usual))
        if typical < RELATED or own > -FLIPPED * typical or typical - own < TURNED * spread:
            return None
        words = f"its cosine with its prediction is {own:.2f}, and {typical:.2f} in healthy steps"
        return Finding(event, SIGN, words, own)


def _change(own: float, others: Iterable[float], least: int = LEAST) -> float | None:
    """Return the difference of a logarithm from the median of others, if it is abnormal."""
    usual = [one for one in others if math.isfinite(one)]
    if len(usual) < least or not math.isfinite(own):
        return None
    change = own - median(usual)
    return change if abs(change) > max(GAIN, DEVIATIONS * pstdev(usual)) else None


def _typical(events: Iterable[Event]) -> float:
    """Return the usual cosine of an output with its prediction; 0: it is not known."""
    agreements = [one.agreement for one in events if one.agreement is not None]
    return median(agreements) if len(agreements) >= LEAST else 0.0


def _by_scaling(event: Event) -> Event:
    """Return an event with its relation by scaling as its prediction."""
    assert event.scaling is not None
    agreement, predicted = event.scaling
    return replace(event, agreement=agreement, predicted=predicted)


def _excess(event: Event) -> float:
    """Return the logarithm of the size of an output over that of its prediction."""
    return -math.log(max(event.predicted, SMALLEST))


def gain(event: Event) -> float:
    """Return the logarithm of an output's size over its input's; not finite if one is 0."""
    size = event.output["rms"]
    given = event.input.get("rms", 1.0)
    if not (size > 0 and given > 0):
        return math.nan
    return math.log(size) - math.log(given)


def place(event: Event) -> tuple[int, bool, tuple[int, int]]:
    """Return the place of an event in the order of execution of a step: micro-batch by micro-batch,
    forward before backward.
    """
    return event.micro_batch, event.way == BACKWARD, event.order


def facts(finding: Finding, rank: int) -> dict[str, Any]:
    """Return a finding as JSON for the rank that compares those of all ranks."""
    event = finding.event
    return {
        "module": event.name,
        "direction": event.way,
        "side": event.side,
        "rank": rank,
        "micro_batch": event.micro_batch,
        "kind": finding.kind,
        "why": finding.words,
        "output": event.output,
        "input": event.input,
        "deviation": finding.deviation,
        "order": [event.micro_batch, event.way == BACKWARD, *event.order],
    }


def first_of(found: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the first finding of all ranks; one of sign only if there is no other.

    Where ranks find the same output abnormal, as after a sum over them, it is the worst.
    """
    known = (one for one in found if one is not None)
    return min(
        known, key=lambda one: (one["kind"] == SIGN, one["order"], -_worse(one)), default=None
    )


def _worse(one: dict[str, Any]) -> float:
    """Return how far an output is off, for outputs of the same place."""
    if one["kind"] == FACTOR:
        return abs(math.log(one["deviation"]))
    return abs(float(one["deviation"]))
