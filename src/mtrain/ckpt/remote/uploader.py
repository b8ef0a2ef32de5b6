"""The process that uploads the checkpoints of a run: `python -m mtrain.ckpt.remote.uploader`.

It needs no torch. It looks into the run folder, where a checkpoint appears once it is committed,
and uploads the newest one that its address lacks, then older ones that `checkpoint.keep` and its
like retain. It deletes the others at the address. No step waits for it, and it ends with the
process that started it.

It reads its task from standard input, and later a line that says that no checkpoint will follow.
It prints lines for the user, notes each result in `uploads.jsonl` of the run, and writes to a
descriptor: a dot for each file, and at its end the result as JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from mtrain import strict_json, units
from mtrain.ckpt import folder, retention, sources
from mtrain.ckpt.remote import transfer
from mtrain.ckpt.remote.place import Place, Remote
from mtrain.ckpt.retention import Policy
from mtrain.config.compose.paths import CHECKPOINTS
from mtrain.errors import MtrainError, first_line, say_page, warn
from mtrain.processes import LONGEST_RETRY_S, RETRY_S, die_with, guarded

UPLOADS = "uploads.jsonl"
"""The file of a run folder with one line for each upload that ended, whole or not."""
EVALUATIONS = "evaluations.json"
"""The object of the losses for `checkpoint.keep_best`, for a run that continues elsewhere."""
POLL_S = 0.5
"""Seconds between two looks for new checkpoints."""
NICE = 10
SILENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the run: its launcher says when uploads end."""


class Lost(MtrainError):
    """Another run has taken over the address."""


@dataclass
class Uploader:
    """The uploads of a run."""

    home: Path
    url: str
    owner: str
    """The `id` in the owner's object: no other run may have taken over."""
    policy: Policy
    retries: int = 0
    begun: int = 0
    """The step that this start continues from. Later checkpoints belong to an abandoned course."""
    quiet: bool = False
    lead: str = ""
    """Begins each line: a new line where the progress bar of a terminal may stand."""
    ended: Callable[[float], bool] = lambda _: True
    """Waits for so many seconds at most, and returns whether no checkpoint will follow."""
    sign: Callable[[], None] = lambda: None
    """Called before each file and each request."""
    failed: dict[str, int] = field(default_factory=dict)
    """Checkpoint -> failed tries."""
    failures: int = 0
    """Tries that failed since the last upload."""
    why: str = ""
    """The error of the last try that failed."""
    closed: bool = False
    """True once another run has taken over the address: nothing is uploaded any more."""
    _left: set[str] = field(default_factory=set)
    """Checkpoints of a course that the run has left, until they are deleted."""
    _there: set[str] = field(default_factory=set)
    """Checkpoints of this run that are complete at the address."""
    _known: bool = False
    _losses: dict[int, float] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Upload until no checkpoint will follow; return the last one if it is missing, and why."""
        while not self.ended(0.0 if self._next() else POLL_S):
            self._upload()
        # Each has its tries again: the store may have come back.
        self.failed.clear()
        if (path := self._next()) is not None:
            nbytes = sum(file.stat().st_size for file in path.iterdir())
            self._say(
                f"waiting for the upload of {path.name} ({units.bytes_(nbytes)}) to {self.url}"
            )
        while self._upload():
            pass
        newest = self._saved()[-1:]
        missing = [path.name for path in newest if path.name not in self._there]
        return {"missing": missing[0] if missing else None, "why": self.why}

    def _upload(self) -> bool:
        """Upload one checkpoint if one is due; return whether there was one."""
        path = self._next()
        if path is None:
            return False
        begun = time.monotonic()
        try:
            with folder.reading(path):
                place = Place(self.url)
                self._look(place)
                if path.name in self._there:
                    # The process before this one may have ended before it deleted older ones.
                    self._prune()
                    return True
                for name in sorted(self._left, reverse=True):
                    (place / name).remove(list((place / name).sizes()))
                    self._left.discard(name)
                transfer.send_tokenizer(self.home, place)
                own = partial(self._own, place)
                sent = transfer.upload(path, place / path.name, replace=True, tick=own)
        except (MtrainError, OSError) as error:
            # Deleted before this process marked it as read: a newer one is there.
            if folder.is_checkpoint(path):
                self._refused(path, error)
            return True
        self._there.add(path.name)
        self.failed.clear()
        recovered = f", after {units.number_of(self.failures, 'failure')}" if self.failures else ""
        self.failures = 0
        seconds = time.monotonic() - begun
        self._note(path, state="uploaded", bytes=sent.nbytes, seconds=round(seconds, 3))
        self._say(
            f"step {folder.step_of(path)}: uploaded to {self.url}/{path.name}"
            f" ({units.bytes_(sent.nbytes)} in {seconds:.1f} s{recovered})"
        )
        self._prune()
        return True

    def _saved(self) -> list[Path]:
        """Return the checkpoints that the run has written; imported weights are of step 0."""
        every = folder.committed(self.home / CHECKPOINTS)
        return [p for p in every if folder.step_of(p) and not (p / sources.ADDRESS).exists()]

    def _next(self) -> Path | None:
        """Return the checkpoint that is due: the newest that is missing, or an older one that the
        policy keeps, unless it has failed too often.
        """
        if self.closed:
            return None
        saved = self._saved()
        losses = self._evaluations()
        found = retention.retention(saved, self.policy, complete=saved[-1:], losses=losses)
        stay = {kept.path for kept in (*found.newest, *found.kept)}
        due = (
            path
            for path in reversed(saved)
            if path in stay
            and path.name not in self._there
            and self.failed.get(path.name, 0) <= self.retries
        )
        return next(due, None)

    def _look(self, place: Place) -> None:
        """Note, once, the checkpoints at the address."""
        self._own(place)
        if self._known:
            return
        for one in place.checkpoints():
            # First: a process that was killed has uploaded later ones of this course.
            if self._is_whole(place, one):
                self._there.add(one.name)
            elif one.step > self.begun:
                self._left.add(one.name)
        if self.policy.best and (size := place.size_of(EVALUATIONS)) is not None and size:
            with suppress(ValueError, AttributeError, TypeError):
                noted = json.loads(place.read(EVALUATIONS))
                self._losses |= {int(k): float(v) for k, v in noted.items()}
        self._known = True

    def _is_whole(self, place: Place, one: Remote) -> bool:
        """Return whether a checkpoint of the run folder has been uploaded before."""
        path = self.home / CHECKPOINTS / one.name
        if not one.is_committed or not folder.is_checkpoint(path):
            return False
        manifest = folder.parse_manifest(path)
        same = (path / folder.MANIFEST).read_bytes() == (place / one.name).read(folder.MANIFEST)
        return same and not list(transfer.faults_of(place / one.name, manifest, one.sizes))

    def _own(self, place: Place) -> None:
        """Check before each file that no other run has taken over.

        Raises:
            Lost: one has.
        """
        self.sign()
        holder = place.owner()
        if holder.get("id") != self.owner:
            raise Lost(f"{holder.get('run', 'another run')} writes its checkpoints there now")

    def _prune(self) -> None:
        """Delete the checkpoints at the address that the policy does not keep."""
        try:
            place = Place(self.url)
            self._own(place)
            losses = self._evaluations()
            if self.policy.best:
                body = {str(step): loss for step, loss in losses.items()}
                place.write(EVALUATIONS, strict_json.dumps(body).encode())
            transfer.pruned(place, self.policy, losses)
        except (MtrainError, OSError) as error:
            self._warn(f"{self.url}: older checkpoints cannot be deleted: {_line(error)}")

    def _evaluations(self) -> Mapping[int, float]:
        if self.policy.best:
            self._losses |= retention.losses_of(self.home / CHECKPOINTS, self.policy)
        return self._losses

    def _refused(self, path: Path, error: Exception) -> None:
        """Report a failed try: the first of several in a row."""
        self.failures += 1
        self.why = _line(error)
        self.failed[path.name] = self.failed.get(path.name, 0) + 1
        self.closed = isinstance(error, Lost)
        tries = self.failed[path.name]
        again = tries <= self.retries and not self.closed
        self._note(path, state="failed", error=_line(error), tries=tries)
        if self.failures == 1 or self.closed:
            then = "; the run goes on, and nothing more is uploaded" if self.closed else ""
            then = then or "; the run goes on, and the upload is tried again"
            self._warn(f"{self.url}/{path.name} cannot be uploaded: {_line(error)}{then}")
        if again:
            pause_s = min(RETRY_S * 2.0 ** (tries - 1), LONGEST_RETRY_S)
            deadline = time.monotonic() + pause_s
            while (left_s := deadline - time.monotonic()) > 0:
                self.sign()
                time.sleep(min(left_s, POLL_S))

    def _note(self, path: Path, **facts: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": now, "step": folder.step_of(path), "to": f"{self.url}/{path.name}", **facts}
        with suppress(OSError), (self.home / UPLOADS).open("a", encoding="utf-8") as file:
            file.write(strict_json.dumps(line) + "\n")

    def _say(self, text: str) -> None:
        if not self.quiet:
            with suppress(OSError):
                say_page(f"{self.lead}{text}")

    def _warn(self, text: str) -> None:
        with suppress(OSError):
            if self.lead:
                say_page("", error=True)
            warn(text)


def _line(error: Exception) -> str:
    """Return the first line of an error."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return first_line(error)


class _Orders:
    """The descriptor from which the task and its end are read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def task(self) -> dict[str, Any]:
        """Return the task: the first line."""
        data = b""
        while b"\n" not in data:
            more = os.read(self._descriptor, 1 << 16)
            if not more:
                sys.exit(1)
            data += more
        line, _, self._rest = data.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def ended(self, wait_s: float) -> bool:
        """Return whether anything follows the task, or nobody is left to write it."""
        return bool(self._rest or select.select([self._descriptor], [], [], wait_s)[0])


def main(words: list[str]) -> None:
    """Upload as the task in the descriptor `words[1]` says, and report to `words[2]`.

    A process of its own does the work, and another one goes on if something kills it.
    """
    die_with(int(words[0]))
    for number in SILENT:
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    orders = _Orders(int(words[1]))
    task = orders.task()

    def ended(how: str) -> None:
        with suppress(OSError):
            warn(f"the process that uploads checkpoints ended with {how}; another one goes on")

    guarded(lambda: _work(task, orders, int(words[2])), ended)


def _work(task: dict[str, Any], orders: _Orders, out: int) -> None:
    # Nobody reads the dots before the end of the run.
    os.set_blocking(out, False)

    def sign() -> None:
        with suppress(BlockingIOError):
            os.write(out, b".")

    made = {"home": Path(task["home"]), "policy": Policy(**task["policy"])}
    result = Uploader(**(task | made), ended=orders.ended, sign=sign).run()
    os.set_blocking(out, True)
    os.write(out, f"\n{strict_json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
