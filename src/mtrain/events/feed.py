"""The threads that carry the event stream to sinks: each reads the files at its own pace."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mtrain import strict_json
from mtrain.config.schema.run import RunConfig
from mtrain.errors import warn
from mtrain.events.log import ALERT, EVALUATION, FOLDER, MEMORY, STATISTICS, STEP
from mtrain.events.read import Event, Place, following
from mtrain.events.sink import Session, Sink

ID_FILE = "id"
SINKS = "sinks"
PAUSE_S = 1.0
"""Seconds between two looks at the stream."""
LONGEST_PAUSE_S = 60.0
CLOSE_S = 10.0
"""Seconds that the end of a run waits for all sinks together."""


@dataclass
class Mark:
    """The progress of a sink, which the run folder keeps."""

    place: Place = field(default_factory=Place)
    step: int = 0
    """The last step that was sent."""
    evaluation: int = 0
    """The step of the last evaluation that was sent."""
    described: int = 0
    """The step of the last statistics that were sent."""
    tensors: list[str] = field(default_factory=list)
    """The kinds of tensors that were sent of that step."""
    further: dict[str, int] = field(default_factory=dict)
    """Kind of another event, of alerts with their name -> the step of the last that was sent."""

    @classmethod
    def read(cls, file: Path) -> Mark:
        """Return the mark of a file, or that of the beginning if there is none."""
        try:
            found = json.loads(file.read_text())
            place = Place(int(found["place"]["attempt"]), int(found["place"]["offset"]))
            described = int(found.get("described", 0)), list(found.get("tensors", []))
            further = {str(kind): int(step) for kind, step in found.get("further", {}).items()}
            return cls(place, int(found["step"]), int(found["evaluation"]), *described, further)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls()

    def write(self, file: Path) -> None:
        """Write the mark; a process that is killed meanwhile leaves the one before.

        Raises:
            OSError: the disk refused it.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(".draft")
        draft.write_text(strict_json.dumps(asdict(self)))
        os.replace(draft, file)

    def rewind(self, step: int) -> None:
        """Count everything after a step as not sent."""
        self.step = min(self.step, step)
        self.evaluation = min(self.evaluation, step)
        if self.described > step:
            self.described = step + 1
            self.tensors = []
        self.further = {kind: min(last, step) for kind, last in self.further.items()}

    def takes(self, event: Event) -> bool:
        """Return whether an event was not sent yet, and count it as sent."""
        step: int = event["step"]
        if event["kind"] == STEP:
            is_new = step > self.step
            self.step = max(self.step, step)
            return is_new
        if event["kind"] == EVALUATION:
            is_new = step > self.evaluation
            self.evaluation = max(self.evaluation, step)
            return is_new
        if event["kind"] == STATISTICS:
            sent = self.tensors if step == self.described else []
            is_new = step >= self.described and event["of"] not in sent
            if is_new:
                self.described = step
                self.tensors = [*sent, event["of"]]
            return is_new
        if event["kind"] in (MEMORY, ALERT):
            kind = f"{event['kind']} {event.get('name', '')}"
            is_new = step > self.further.get(kind, -1)
            self.further = self.further | {kind: max(step, self.further.get(kind, -1))}
            return is_new
        return True


class Feed:
    """A thread that sends the events of a run to one sink."""

    def __init__(
        self, name: str, kind: Callable[[Session], Sink], run: RunConfig, home: Path, begun: int
    ) -> None:
        """Send to a sink of `kind`; this attempt of the run continues from step `begun`."""
        self.name = name
        self.kind = kind
        self.run = run
        self.home = home
        self.file = home / FOLDER / SINKS / f"{name}.json"
        self.mark = Mark.read(self.file)
        self.sink: Sink | None = None
        self.warned = False
        self.failing = False
        if getattr(kind, "purges", False):
            # Steps that are made again replace those that were sent.
            self.mark.rewind(begun)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to end once everything is sent, or as soon as that fails."""
        self._over.set()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, and warn of events that were not sent."""
        self._thread.join(seconds)
        if self._thread.is_alive() or self.failing:
            warn(
                f"log.sinks=[{self.name}]: cannot send what follows step {self.mark.step} because"
                " the run is over. Resume it to send the rest"
            )

    def _run(self) -> None:
        pause = PAUSE_S
        over = False
        while not over:
            over = self._over.wait(pause)
            try:
                self._send()
            except Exception as error:  # of a library: whatever it is, training goes on
                pause = min(2 * pause, LONGEST_PAUSE_S)
                self._failed(error)
            else:
                pause = PAUSE_S
                self.failing = False
        self._close()

    def _send(self) -> None:
        """Send all events that the stream has by now."""
        if self.sink is None:
            sink = self.kind(Session(self.run, self.home, id_of(self.home), self.mark.step))
            known = sink.open()
            self.sink = sink
            if known is not None:
                self._agree(known)
        while True:
            ahead = copy(self.mark)
            ahead.place = copy(self.mark.place)
            found = following(self.home, ahead.place, self.sink.batch)
            new = [event for event in found if ahead.takes(event)]
            if new:
                self.sink.send(new)
            if ahead != self.mark:
                self.mark = ahead
                ahead.write(self.file)
            if not found:
                return

    def _agree(self, known: int) -> None:
        """Go on after the last step that the place has, which may be before or behind the mark."""
        if known < self.mark.step:
            # What the place lost is in the stream, somewhere before.
            self.mark.place = Place()
            self.mark.rewind(known)
        self.mark.step = known

    def _failed(self, error: Exception) -> None:
        self._close()
        self.failing = True
        if not self.warned:
            self.warned = True
            text = (str(error).strip().splitlines() or [""])[0]
            why = f"{type(error).__name__}: {text}".removesuffix(": ")
            warn(
                f"log.sinks=[{self.name}]: cannot send events because of {why}; training goes on,"
                " and they are sent once it works"
            )

    def _close(self) -> None:
        if self.sink is not None:
            with suppress(Exception):
                self.sink.close()
            self.sink = None


def close(feeds: Sequence[Feed], seconds: float = CLOSE_S) -> None:
    """End feeds once they have sent everything, after `seconds` at the latest."""
    for feed in feeds:
        feed.end()
    until = time.monotonic() + seconds
    for feed in feeds:
        feed.join(max(0.0, until - time.monotonic()))


def id_of(home: Path) -> str:
    """Return the id of a run folder, which its first reader makes."""
    file = home / FOLDER / ID_FILE
    with suppress(OSError):
        known = file.read_text().strip()
        if known:
            return known
    made = uuid.uuid4().hex[:21]
    file.parent.mkdir(exist_ok=True)
    draft = file.with_name(f".{made}")
    draft.write_text(made + "\n")
    try:
        # Of several threads, the first one decides.
        os.link(draft, file)
    except FileExistsError:
        return file.read_text().strip()
    except OSError:  # a file system without hard links
        os.replace(draft, file)
        return made
    finally:
        draft.unlink(missing_ok=True)
    return made
