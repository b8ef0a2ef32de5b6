"""The event stream read back: whole, or by a reader that follows it and keeps its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.events.log import EVALUATION, FOLDER, FORMAT, START, STATISTICS, STEP, attempts

LONGEST = 1 << 20
"""Bytes of a line; a longer one is no event."""
REPEATED = (STEP, EVALUATION, STATISTICS)
"""Kinds of events that a later attempt makes again."""
Event = Mapping[str, Any]


@dataclass
class Place:
    """The place in a stream up to which a reader has come."""

    attempt: int = 1
    offset: int = 0
    """Bytes of the attempt's file."""

    def file(self, home: Path) -> Path:
        """Return the file of the attempt."""
        return home / FOLDER / f"{self.attempt:04d}.jsonl"


def events(home: Path) -> Iterator[Event]:
    """Yield the events of a run folder in order: of a step that was made again, the last one.

    Raises:
        OSError: a file cannot be read.
    """
    place = Place()
    while found := following(home, place, 1000):
        yield from found


def following(home: Path, place: Place, most: int) -> list[Event]:
    """Return up to `most` events from a place on, and move the place behind them.

    Steps and evaluations that a later attempt made again are left out, as are lines that are no
    events of this format. A last line without its end is left for later.

    Raises:
        OSError: a file cannot be read.
    """
    found: list[Event] = []
    while not found:
        here = place.file(home)
        later = [file for file in attempts(home) if int(file.stem) > place.attempt]
        lines = _lines(here, place, most) if here.is_file() else []
        again = min((_begun(file) for file in later), default=None)
        for line in lines:
            event = parsed(line)
            if event is not None and not _is_superseded(event, again):
                found.append(event)
        if not lines and not later:
            break
        if not lines:
            place.attempt = int(later[0].stem)
            place.offset = 0
    return found


def parsed(line: bytes) -> Event | None:
    """Return the event of a line; None: it is another text, or of another format."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or event.get("format") != FORMAT:
        return None
    step = event.get("step")
    is_event = isinstance(event.get("kind"), str) and isinstance(step, int)
    return event if is_event else None


def _lines(file: Path, place: Place, most: int) -> list[bytes]:
    lines: list[bytes] = []
    with file.open("rb") as stream:
        stream.seek(place.offset)
        while len(lines) < most:
            line = stream.readline(LONGEST)
            if not line.endswith(b"\n") and len(line) < LONGEST:
                break
            lines.append(line)
            place.offset = stream.tell()
    return lines


def _begun(file: Path) -> int:
    """Return the step before an attempt; a file without its first line supersedes nothing."""
    with file.open("rb") as stream:
        event = parsed(stream.readline(LONGEST))
    never = 1 << 62
    return int(event["step"]) if event is not None and event["kind"] == START else never


def _is_superseded(event: Event, again: int | None) -> bool:
    return again is not None and event["kind"] in REPEATED and event["step"] > again
