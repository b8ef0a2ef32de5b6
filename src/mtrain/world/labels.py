"""Labels of a step in a profile: phases, micro-batches, collectives and waits for them.

Nothing is labelled, and almost nothing spent, unless a profile is being made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mtrain.views.profiles import PREFIX, axis_of

STEP = "step"


Mark = AbstractContextManager[Any]
"""A range of a profile."""


class Labels:
    """The labels of the profile that is being made on this rank."""

    now: Labels | None = None
    """None: no profile is being made."""

    def __init__(self, mark: Callable[[str], Mark]) -> None:
        """Open each range by `mark`, with its name."""
        self.mark = mark
        self.counts: Counter[str] = Counter()
        self.calls: dict[int, str] = {}
        """The identity of a `Work` -> its collective: axis, group and number."""

    def numbered(self, name: str) -> str:
        """Return a name with the number of times that it came in this profile."""
        self.counts[name] += 1
        return f"{name} {self.counts[name]}"

    def opened(self, name: str) -> Mark:
        """Open a range."""
        mark = self.mark(f"{PREFIX}{name}")
        mark.__enter__()
        return mark

    @contextmanager
    def collective(self, operation: str, group: Any) -> Iterator[str]:
        """Label the call of a collective; all ranks of the group number it alike."""
        axis = axis_of(getattr(group, "group_desc", ""))
        call = f"{axis} {self.numbered(str(getattr(group, 'group_name', '')) or 'group')}"
        with self.mark(f"{PREFIX}{call} {operation}"):
            yield call

    @contextmanager
    def wait(self, work: Any) -> Iterator[None]:
        """Label a wait for a collective."""
        call = self.calls.pop(id(work), "world group 0")
        with self.mark(f"{PREFIX}{call} wait"):
            yield


@contextmanager
def labelled(name: str, *, numbered: bool = False) -> Iterator[None]:
    """Label a block; `numbered`: with the times that it came in this profile."""
    labels = Labels.now
    if labels is None:
        yield
        return
    with labels.mark(f"{PREFIX}{labels.numbered(name) if numbered else name}"):
        yield
