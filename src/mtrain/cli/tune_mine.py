"""Comparison of a named layout with the first of `tune`: the rule it breaks, the memory it lacks,
its time.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.config.compose.composer import Composed, Rejected, compose
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.messages.problem import value_at
from mtrain.config.resolve.resolution import Machine, world_size_of
from mtrain.config.rules import findings
from mtrain.config.rules.finding import Finding
from mtrain.errors import ConfigError
from mtrain.plan.rank import worst_stage
from mtrain.plan.time import step_time
from mtrain.plan.time.accuracy import Accuracy
from mtrain.plan.tune.choose import said_of, search
from mtrain.plan.tune.search import FAMILY, Layout, Task
from mtrain.plan.tune.space import changed
from mtrain.plan.tune.words import reason
from mtrain.units import bytes_

# The origin of a key that a choice sets begins so; that of a recipe does not.
SHIPPED = "conf/"
# Parts of the memory that an answer names where the memory does not suffice.
LARGEST = 3


@dataclass(frozen=True)
class Mine:
    """A layout that was named, against the first of a search."""

    named: str
    """Name of the layout: the user's spelling, or its source."""
    first: Layout
    room: float
    """Bytes that a layout may take."""
    broken: tuple[Finding, ...] = ()
    """Errors of rules."""
    layout: Layout | None = None
    """None where a rule is broken."""
    completed: Layout | None = None
    """The fastest fitting layout of the same degrees; None: it does not exist, or is `layout`.
    """

    @property
    def fits(self) -> bool:
        """Return whether a device holds it."""
        return self.layout is not None and self.layout.memory.peak <= self.room

    def data(self) -> dict[str, Any]:
        """Return as JSON has it."""
        found: dict[str, Any] = {
            "named": self.named,
            "broken": [
                {"code": one.code, "path": one.path, "rule": one.rule} for one in self.broken
            ],
            "fits": self.fits,
            "room_bytes": None if self.room == float("inf") else round(self.room),
        }
        for name, layout in (("as_named", self.layout), ("completed", self.completed)):
            found[name] = None if layout is None else _data(layout, self.first)
        return found

    def lines(self, accuracy: Accuracy | None) -> Iterator[str]:
        """Yield the same as text."""
        if self.layout is None:
            yield f"{self.named}: no layout of this run, because it breaks a rule"
            yield from (f"  {one.code} {one.path}: {one.rule}" for one in self.broken)
        else:
            yield f"{self.named}: {self.layout.words}: {self._why(self.layout, accuracy)}"
        if self.completed is not None:
            cut = " ".join(
                f"{key.partition('.')[2]} {value_at(self.completed.run, key)}" for key in FAMILY
            )
            yield (
                f"  the fastest with {cut}: {self.completed.words}:"
                f" {self._why(self.completed, accuracy)}"
            )

    def _why(self, layout: Layout, accuracy: Accuracy | None) -> str:
        memory = layout.memory
        if memory.peak > self.room:
            parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:LARGEST]
            of = ", ".join(f"{name.replace('_', ' ')} {bytes_(size)}" for name, size in parts)
            where = (
                f"stage {memory.stage} needs {bytes_(memory.peak)} of the"
                f" {bytes_(round(self.room))} that may be"
            )
            return f"does not fit: {where} taken of a device: {of}"
        if layout.words == self.first.words:
            return "it is the first"
        slower = layout.seconds / self.first.seconds - 1
        near = accuracy is not None and abs(slower) <= accuracy.median
        doubt = "; the model of time does not tell them apart" if near else ""
        return f"{reason(layout, self.first)}{doubt}"


def _data(layout: Layout, first: Layout) -> dict[str, Any]:
    return {
        "layout": layout.words,
        "seconds": layout.seconds,
        "slower": layout.seconds / first.seconds - 1,
        "peak_bytes": layout.memory.peak,
        "parts_bytes": layout.memory.parts,
        "why": reason(layout, first),
    }


def named_words(text: str) -> list[str]:
    """Return the overrides of a layout as it is named: `tp8pp6`, and keys behind it."""
    words = shlex.split(text)
    return [word if "=" in word else f"parallel={word}" for word in words]


def mine(named: str, composed: Composed, first: Layout, task: Task) -> Mine:
    """Compare the layout of a composed run, with the batch and ranks of the search."""
    # Times are comparable only with the same batch on the same ranks.
    batch = {"trainer.global_batch_size": task.raw.trainer.global_batch_size}
    ranks = {} if composed.run.parallel.ranks else {"parallel.ranks": task.raw.parallel.ranks}
    raw = changed(composed.run, {**batch, **ranks, "parallel.auto": False})
    run = task.resolve(raw)
    broken = tuple(found for found in findings(run) if found.severity == "error")
    if broken:
        return Mine(named, first, task.room(), broken)
    layout = Layout(run, {}, step_time(run), worst_stage(run))
    said = {key: value_at(run, key) for key in FAMILY}
    found, _ = search(
        changed(raw, {"parallel.ranks": run.parallel.ranks}),
        said,
        Machine.here(),
        world_size_of(),
        1,
    )
    best = found.best[0] if found.best else None
    # The named layout is the best of its family: there is nothing to add.
    if best is not None and best.words == layout.words:
        best = None
    return Mine(named, first, task.room(), (), layout, best)


def mine_of(text: str, left: Sequence[str], first: Layout, task: Task) -> Mine:
    """Compare a layout as `--why-not` names it; `left` are the words without layout keys.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return mine(text, compose([*left, *named_words(text)]), first, task)
    except Rejected as error:
        raise ConfigError(error.problems) from None


def mine_in(words: Sequence[str], first: Layout, task: Task) -> Mine | None:
    """Compare the layout of a recipe among the words; return None without one."""
    recipe = next((word for word in words if word.startswith("recipe=")), None)
    if recipe is None:
        return None
    composed = compose(words)
    origins = {
        key: composed.origins[key]
        for key in said_of(composed.run, composed.origins, command_line=False)
    }
    theirs = {
        key
        for key, origin in origins.items()
        if origin != COMMAND_LINE and not origin.startswith(SHIPPED)
    }
    return mine(recipe, composed, first, task) if theirs else None
