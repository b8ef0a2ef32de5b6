"""The draft folder of a corpus, and the journal with which a killed build resumes.

`PREFIX.partial/` has the settings, the growing files and `journal`, which gets a line for each unit
after its bytes are in the files. An incomplete line is ignored. A resumed build truncates the files
to the last line of the journal, compares their checksums while it recomputes the hash of the
tokens, and continues after the last correct unit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from mtrain import durable, locks, strict_json
from mtrain.data.preprocess.record import refuse_misread
from mtrain.data.preprocess.sources import LOCK
from mtrain.data.preprocess.workers import COUNTED, Result
from mtrain.errors import BadEnvironment, ConfigError

BIN = "tokens.bin"
LENGTHS = "lengths"
SEQUENCES = "sequences"
REJECTS = "rejects.jsonl"
# The files that each unit appends to, in the order of the journal's sizes; the tokens first
GROWING = (BIN, LENGTHS, SEQUENCES, REJECTS)
SETTINGS = "settings.json"
JOURNAL = "journal"
# Seconds of work that a machine that loses power may lose
SYNC_S = 2.0
BLOCK = 8 << 20


class Totals:
    """The counts of a corpus, in all and by file."""

    def __init__(self, sources: int) -> None:
        self.of = [dict.fromkeys((*COUNTED, "rejected"), 0) for _ in range(sources)]
        self.largest = -1

    def sum(self, name: str) -> int:
        """Return a count over all files."""
        return sum(counts[name] for counts in self.of)

    def add(self, line: dict[str, Any]) -> None:
        """Add the counts of a line of the journal."""
        self.largest = max(self.largest, line["largest"])
        for source, counts in line["parts"]:
            for name, number in counts.items():
                self.of[source][name] = self.of[source].get(name, 0) + number


class Draft:
    """A growing corpus, as a context that holds its lock; see the module.

    Raises:
        ConfigError: another process makes the same corpus, or the draft has other settings.
        BadEnvironment: the disk cannot be written.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], names: list[str], *, fresh: bool
    ) -> None:
        self.folder = folder
        self.names = names
        self.totals = Totals(len(names))
        self.units = 0
        self.finished = False
        self.sha256 = hashlib.sha256()
        self._settings = settings
        self._fresh = fresh
        self._files: dict[str, BinaryIO] = {}
        self._synced = time.monotonic()

    def __enter__(self) -> Draft:
        with disk(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / LOCK, "ab")
            try:
                self._held = locks.lock(self._lock.fileno(), self.folder / LOCK)
            except locks.Taken as taken:
                self._lock.close()
                rule = "cannot be written because another process makes this corpus now"
                if taken.owner:
                    rule += f": {taken.owner}"
                raise ConfigError.of(
                    "MT622", "out", str(self.folder), rule, "wait for it, or another out="
                ) from None
            try:
                self._start()
            except BaseException:
                self._unlock()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._unlock()

    def _unlock(self) -> None:
        self._held.release()
        self._lock.close()

    def _start(self) -> None:
        path = self.folder / SETTINGS
        settings = (strict_json.dumps(self._settings, sort_keys=True, indent=1) + "\n").encode()
        if self._fresh and path.exists():
            path.unlink()
        if path.exists():
            self._refuse_other_settings(path.read_bytes(), settings)
        else:
            # old files go before the new settings exist: else a kill in between would leave tokens
            # of one build under the settings of another
            for name in (*GROWING, JOURNAL):
                (self.folder / name).unlink(missing_ok=True)
            draft = path.with_suffix(".new")
            durable.write(draft, settings)
            draft.replace(path)
        for name in (*GROWING, JOURNAL):
            self._files[name] = open(self.folder / name, "ab")  # noqa: SIM115
        self._resume()

    def _refuse_other_settings(self, recorded: bytes, settings: bytes) -> None:
        """Refuse to add to tokens that were made with other settings or of other files."""
        if recorded == settings:
            return
        try:
            before = json.loads(recorded)
            now = json.loads(settings)
            differing = sorted(
                key for key in before.keys() | now.keys() if before.get(key) != now.get(key)
            )
        except (ValueError, AttributeError, RecursionError):
            differing = ["settings"]
        rule = (
            "cannot be resumed because the killed run that left it had other"
            f" {', '.join(differing)} (or input files that changed since)"
        )
        fix = "the same command, on the same files; or fresh=true to start again"
        raise ConfigError.of("MT622", "out", str(self.folder), rule, fix, "command line")

    def _resume(self) -> None:
        """Take over the units of the journal whose bytes are intact, and truncate the rest."""
        kept = 0
        place = [0, 0, 0, 0]
        sizes = [(self.folder / name).stat().st_size for name in GROWING]
        end = 0
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(open(self.folder / name, "rb")) for name in GROWING]
            for line, stop in _journal(self.folder / JOURNAL):
                if "done" in line:
                    self.finished = True
                    end = stop
                    break
                grown = line["bytes"]
                reached = [a + b for a, b in zip(place, grown, strict=True)]
                if line["unit"] != kept or any(a > b for a, b in zip(reached, sizes, strict=True)):
                    break
                if not self._absorb(files, grown, line["crc"]):
                    break
                self.totals.add(line)
                kept += 1
                place = reached
                end = stop
        self.units = kept
        if not self.finished:
            for name, size in zip((*GROWING, JOURNAL), (*place, end), strict=True):
                os.truncate(self.folder / name, size)

    def _absorb(self, files: Sequence[BinaryIO], grown: list[int], crcs: list[int]) -> bool:
        """Hash the next bytes of all files again, and return whether they are as written."""
        # a copy, as the bytes of a damaged unit have no part in the digest
        digest = self.sha256.copy()
        found = list[int]()
        for file, size in zip(files, grown, strict=True):
            crc = 0
            while size and (block := file.read(min(size, BLOCK))):
                size -= len(block)
                crc = zlib.crc32(block, crc)
                if file is files[0]:
                    digest.update(block)
            found.append(crc)
        if found != crcs:
            return False
        self.sha256 = digest
        return True

    def commit(self, result: Result) -> None:
        """Append the result of a unit; units come in their order.

        Raises:
            ConfigError: as `refuse_misread`, before anything is written.
        """
        rejects = b"".join(self._rejects(result))
        grown = (result.tokens, result.lengths, result.sequences, rejects)
        parts = [
            (part.source, part.counts | {"rejected": len(part.rejected)}) for part in result.parts
        ]
        line = {
            "unit": self.units,
            "bytes": [len(data) for data in grown],
            "crc": [result.crc, *map(zlib.crc32, grown[1:])],
            "largest": result.largest,
            "parts": parts,
        }
        with disk(self.folder):
            for name, data in zip(GROWING, grown, strict=True):
                self._files[name].write(data)
                self._files[name].flush()
            # the line comes last: bytes without a line are truncated by the next start
            self._add(line)
            self.sha256.update(result.tokens)
            if time.monotonic() - self._synced > SYNC_S:
                self.sync()
        self.totals.add(line)
        self.units += 1

    def _rejects(self, result: Result) -> Iterator[bytes]:
        # a worker counts records from the beginning of its part, and users from that of the file
        before = dict[int, int]()
        for part in result.parts:
            base = before.get(part.source, 0) + self.totals.of[part.source]["records"]
            before[part.source] = before.get(part.source, 0) + part.counts["records"]
            for one in part.rejected:
                refuse_misread(one, self.names[part.source], base + one.number if one.number else 0)
                held = {
                    "file": self.names[part.source],
                    "line": base + one.number or None,
                    "why": one.why,
                }
                yield (strict_json.dumps(held) + "\n").encode()

    def _add(self, line: dict[str, Any]) -> None:
        text = strict_json.dumps(line)
        self._files[JOURNAL].write(f"{zlib.crc32(text.encode()):08x} {text}\n".encode())
        self._files[JOURNAL].flush()

    def sync(self) -> None:
        """Write everything to the disk: the bytes first, then the journal with their sizes."""
        for name in (*GROWING, JOURNAL):
            os.fsync(self._files[name].fileno())
        self._synced = time.monotonic()

    def done(self) -> None:
        """Mark all files as complete; only their renames are left."""
        with disk(self.folder):
            self.sync()
            self._add({"done": True})
            os.fsync(self._files[JOURNAL].fileno())
        self.finished = True

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def last_rejects(self, many: int = 3) -> list[str]:
        """Return the first lines of the rejects file."""
        with open(self.folder / REJECTS, "rb") as file:
            found = [json.loads(line) for _, line in zip(range(many), file, strict=False)]
        return [
            f"  {one['file']}{':' + str(one['line']) if one['line'] else ''}: {one['why']}"
            for one in found
        ]


def _journal(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the lines of a journal and where each ends, up to the first incomplete one."""
    place = 0
    with open(path, "rb") as file:
        for raw in file:
            place += len(raw)
            crc, _, text = raw.partition(b" ")
            if not raw.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text[:-1]):
                return
            yield json.loads(text), place


@contextlib.contextmanager
def disk(place: Path) -> Iterator[None]:
    """Turn a failure of the disk into a message."""
    try:
        yield
    except OSError as error:
        free = "?"
        with contextlib.suppress(OSError):
            there = next(p for p in (place, *place.parents) if os.path.isdir(p))
            free = f"{shutil.disk_usage(there).free >> 20} MiB free at {there}"
        raise BadEnvironment(
            f"{error.filename or place}: {error.strerror or error} ({free})",
            "  fix: out= where files can be written; `data tokenize` continues what it has begun",
        ) from error


def finish(moves: list[tuple[Path, Path]], place: Callable[[Path], None]) -> None:
    """Rename the files that still have their draft names, and sync their folders with `place`."""
    for old, new in moves:
        if old.exists():
            old.replace(new)
    for folder in {new.parent for _, new in moves}:
        place(folder)
