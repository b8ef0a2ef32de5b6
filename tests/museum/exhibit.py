"""Exhibits: known bugs, and their proofs by `prove`."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mtrain.api import load
from mtrain.errors import TrainingError
from mtrain.launching import jobs, prove


@dataclass(frozen=True)
class Exhibit:
    """A bug, and where it bites."""

    name: str
    source: str
    """Issue, change or place that it is known from."""
    layout: str
    """The command line that it is proven with."""
    does: str
    """Effect on the numbers."""
    fault: Callable[[], None]
    """Brings it back in this process."""
    named: str
    """Regular expression that the whole name of the blamed module must match."""


@dataclass(frozen=True)
class Verdict:
    """Verdict of `prove` on an exhibit."""

    found: bool
    module: str
    """Module that it blames; empty if it names nothing."""
    said: str
    named: bool
    seconds: float


@contextmanager
def seeded(fault: Callable[[], None]) -> Iterator[None]:
    """Give every rank that is started the fault, but not this process."""
    kept = {name: jobs.JOBS[name] for name in ("observe", "observe_masks")}

    def faulty(real: Callable[..., None]) -> Callable[..., None]:
        def observe(*args: Any, **how: Any) -> None:
            fault()
            real(*args, **how)

        return observe

    for name, real in kept.items():
        jobs.JOBS[name] = faulty(real)
    try:
        yield
    finally:
        for name, real in kept.items():
            jobs.JOBS[name] = real


def show(exhibit: Exhibit) -> Verdict:
    """Prove the layout of an exhibit, as `python launch.py prove` does, on ranks that all have its
    bug.
    """
    begun = time.monotonic()
    with seeded(exhibit.fault):
        found, module, said = judged(exhibit.layout)
    named = found and re.fullmatch(exhibit.named, module) is not None
    return Verdict(found, module, said, named, time.monotonic() - begun)


def judged(words: str) -> tuple[bool, str, str]:
    """Return whether a layout differs from one rank, the module that is blamed, and the verdict in
    words.
    """
    argv = words.split()
    full = load(argv).run
    for dtype in prove.formats(full):
        small = prove.comparable(full, argv, prove.STEPS, dtype)
        try:
            rows = prove.compared(small)
            if all(row.equal for row in rows):
                continue
            where = prove.located(small)
        except TrainingError as refused:
            return True, "refused", str(refused).strip().splitlines()[-1]
        worst = max(
            (row for row in rows if not row.equal), key=lambda row: row.error / row.tolerance
        )
        summary = f"{worst.what} off by {worst.error:.1e}; "
        return True, where.module if where else "", summary + prove.in_words(where)
    if prove.draws(full):
        problems = prove.masks(prove.shrunk(full, argv, 1, "fp32"))
        if problems:
            return True, problems[0][0], problems[0][1]
    return False, "", "equal"


def replace(module: str, name: str, value: Any) -> None:
    """Put `value` where `module` (a module, or a class in it after a colon) has `name`."""
    setattr(owner(module), name, value)


def wrap(module: str, name: str, change: Callable[..., Any]) -> None:
    """Put `change` around a function or a method: it is called with the real one before the
    arguments.
    """
    real = getattr(owner(module), name)

    def changed(*args: Any, **more: Any) -> Any:
        return change(real, *args, **more)

    replace(module, name, changed)


def unwrap(module: str, name: str) -> None:
    """Take the outermost wrapper off."""
    replace(module, name, getattr(owner(module), name).__wrapped__)


def without(name: str, method: str) -> Any:
    """Return a fault that takes one of mtrain's patches off a method."""
    return lambda: unwrap(name, method)


def owner(module: str) -> Any:
    """Return a module, or a class in it after a colon."""
    name, _, inside = module.partition(":")
    found = importlib.import_module(name)
    return getattr(found, inside) if inside else found
