"""The causes of the seconds of one attempt of a run, as its process measures them.

An attempt lasts from the start of a command, or of its ranks, to their end. All times are readings
of the system's monotonic clock, so a change of the wall clock moves nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mtrain import startup

QUEUED = "queued"
STARTING = "starting"
LOADING = "loading"
STEPPING = "stepping"
WAITING = "waiting_for_data"
EVALUATING = "evaluating"
SAVING = "saving"
RECOMPUTING = "recomputing"
ENDING = "ending"
DOWN = "down"
CAUSES = (
    STEPPING,
    WAITING,
    EVALUATING,
    SAVING,
    RECOMPUTING,
    LOADING,
    STARTING,
    ENDING,
    QUEUED,
    DOWN,
)
"""All causes, the best use of a device first."""
PARTS = {startup.DATA: LOADING, startup.BUILDING: LOADING, startup.LOADING: LOADING}
"""Parts of a start that prepare something to train with or on; the others are `STARTING`."""
EARLY = 3
"""Steps of an attempt after which the share of the first one that is compilation is known."""


@dataclass(frozen=True)
class Sign:
    """The seconds of an attempt up to one moment: the sum of `seconds` and `open_s`."""

    elapsed_s: float
    """Seconds since the attempt began."""
    seconds: dict[str, float]
    """Seconds by cause, without the step in progress."""
    open_s: float
    """Seconds of the step that is not finished."""
    open_cause: str
    """The cause of these seconds once the step is finished."""
    first: int | None
    """The step that the attempt continued from; None: it has not loaded it yet."""
    step: int
    """The last step that it finished."""
    steps: int
    """Steps that it finished."""
    again: int
    """Steps that an earlier attempt had finished, too."""


class Meter:
    """A clock of causes. The main thread moves it; another thread may read it at any time.

    `furthest` is the last step that an earlier attempt finished: steps up to it are recomputed.
    """

    def __init__(
        self,
        start: startup.Startup | None = None,
        furthest: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.begun = clock() if start is None else start.begun
        self.furthest = furthest
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.give_sign: Callable[[], None] = _nobody_listens
        """Writes a sign of life at once; set by the log."""
        self.cause = LOADING
        self.done = False
        """True once all steps are made and saved: a later failure loses nothing."""
        self.first: int | None = None
        self.step = 0
        self.steps = 0
        self.again = 0
        self._since = self.begun
        self._open_s = 0.0
        self._early: list[float] = []
        if start is not None and start.ends:
            for part, spent in start.seconds().items():
                self.seconds[PARTS.get(part, STARTING)] += spent
            self._since = start.ends[-1][1]

    def enter(self, cause: str) -> str:
        """Begin to charge `cause`; return the cause that was charged until now."""
        with self._lock:
            self._close()
            before = self.cause
            self.cause = cause
        return before

    @contextmanager
    def charging(self, cause: str) -> Iterator[None]:
        """Charge `cause` in this block."""
        before = self.enter(cause)
        try:
            yield
        finally:
            self.enter(before)

    def loaded(self, step: int) -> None:
        """Begin the steps after `step`."""
        with self._lock:
            self._close()
            self.first = step
            self.step = step
            self.cause = STEPPING

    def stepped(self, step: int, waited_s: float) -> None:
        """Finish a step, in which the host waited `waited_s` for samples."""
        with self._lock:
            self._close()
            spent = self._open_s
            self._open_s = 0.0
            cause = self._cause_of(step)
            # The wait of a step that is run again is lost with it.
            waited = min(waited_s, spent) if cause == STEPPING else 0.0
            self.seconds[WAITING] += waited
            self.seconds[cause] += spent - waited
            self.again += cause == RECOMPUTING
            self.step = step
            self.steps += 1
            if self.steps <= EARLY:
                self._early.append(spent - waited)
            if self.steps == EARLY:
                self._uncompiled()

    def over(self) -> None:
        """End the steps: the seconds since the last one, in which hooks acted, belong to it."""
        with self._lock:
            self._close()
            self.seconds[self._cause_of(self.step) if self.steps else ENDING] += self._open_s
            self._open_s = 0.0
            self.cause = ENDING

    def fail(self) -> None:
        """Charge the step in progress, which is lost, and all that follows as `DOWN`."""
        with self._lock:
            self._close()
            self.seconds[DOWN] += self._open_s
            self._open_s = 0.0
            self.cause = DOWN

    def sign(self) -> Sign:
        """Return the seconds up to now."""
        with self._lock:
            self._close()
            return Sign(
                self._since - self.begun,
                dict(self.seconds),
                self._open_s,
                self._cause_of(self.step + 1),
                self.first,
                self.step,
                self.steps,
                self.again,
            )

    def _cause_of(self, step: int) -> str:
        return RECOMPUTING if step <= self.furthest else STEPPING

    def _close(self) -> None:
        """Charge the time until now."""
        now = self._clock()
        spent = now - self._since
        self._since = now
        if self.cause == STEPPING:
            self._open_s += spent
        else:
            self.seconds[self.cause] += spent

    def _uncompiled(self) -> None:
        """Charge the extra seconds of the first step, which compiles kernels, to `LOADING`."""
        first, *others = self._early
        excess = max(0.0, first - max(others))
        self.seconds[LOADING] += excess
        self.seconds[self._cause_of(self.step - self.steps + 1)] -= excess


def _nobody_listens() -> None:
    """Give a sign to nobody: ranks other than 0 have no log."""
