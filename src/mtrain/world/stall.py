"""Who holds all ranks up, from what each says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

MAX_NAMED = 4


@dataclass(frozen=True)
class Status:
    """What a rank's watchdog publishes about once a second."""

    rank: int
    host: str
    pid: int
    number: int
    """How many it has published: one that stays the same is of a rank that is stopped or dead."""
    count: int
    """Milestones passed."""
    phase: str
    """Step and phase that it is in."""
    waits: bool
    """Its main thread waits inside a collective, for others."""
    place: str
    """Where its main thread is."""
    idle_s: float
    """Time since it made progress."""

    def text(self) -> str:
        """The status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> Status:
        """The status that `text` made."""
        return cls(**json.loads(text))

    @property
    def who(self) -> str:
        """The rank, and where it is found."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(frozen=True)
class Finding:
    """What one rank found by looking at all."""

    idle_s: float
    """Time since any rank that lives made progress."""
    blame: str
    """Who is behind, in words."""
    observer: int
    number: int
    """How many findings there were of this stall."""

    def text(self) -> str:
        """The finding as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str | bytes) -> Finding:
        """The finding that `text` made."""
        return cls(**json.loads(text))


def idle_s(known: Mapping[int, Status], silent: set[int]) -> float:
    """Time since any rank that gives signs of life made progress."""
    return min((s.idle_s for rank, s in known.items() if rank not in silent), default=float("inf"))


def blame(known: Mapping[int, Status], silent: set[int], size: int) -> str:
    """Who is behind.

    First ranks without a sign of life. Then, of those that wait for nobody, the ones with the fewest milestones: a
    pipeline stage that waits for its input has passed fewer than the stage that holds it up. Where all wait for
    others, the fewest milestones decide.
    """
    missing = [rank for rank in range(size) if rank not in known]
    if missing:
        return f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not begun to train"
    if silent:
        gone = [known[rank] for rank in sorted(silent)]
        last = f"last seen in {gone[0].phase}" if len(gone) == 1 else "stacks may be missing"
        verb = "gives" if len(gone) == 1 else "give"
        return f"{_who(gone)} {verb} no sign of life (stopped, dead, or stuck outside Python; {last})"
    busy = [s for s in known.values() if not s.waits]
    fewest = min(s.count for s in busy or known.values())
    behind = sorted((s for s in busy or known.values() if s.count == fewest), key=lambda s: s.rank)
    if len(behind) == size > 1 and not busy:
        return f"every rank waits for the others, in {behind[0].phase}"
    first = behind[0]
    doing = "waits like all others, and is" if not busy else "is"
    verb = doing if len(behind) == 1 else "are"
    return f"{_who(behind)} {verb} behind, in {first.phase}, at {first.place}"


def _who(ranks: list[Status]) -> str:
    more = f" and {len(ranks) - MAX_NAMED} more ranks" if len(ranks) > MAX_NAMED else ""
    return ", ".join(s.who for s in ranks[:MAX_NAMED]) + more


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
