"""`checkpoint prune` and `copy`: fewer checkpoints of a run, and one more elsewhere."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from mtrain import locks
from mtrain.ckpt import folder
from mtrain.ckpt.retention import Retention, is_complete, retention
from mtrain.ckpt.verification import verified
from mtrain.cli.atomic_output import drafted, new_folder
from mtrain.cli.checkpoint.look import one_checkpoint, one_folder
from mtrain.cli.named_values import read_words, whole
from mtrain.cli.output import refusal, say_json
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import CHECKPOINTS, RUN_FILE, program
from mtrain.durable import not_read
from mtrain.errors import BadEnvironment, CorruptData, say
from mtrain.launching.folder import LOCK_FILE
from mtrain.units import bytes_, number_of

USAGE = "CHECKPOINT NEW_FOLDER"
ALL = "all"
MOST_RUNS = 10_000
"""Runs next to this one whose configurations are looked through for its checkpoints."""
COPY_BYTES = 16 << 20
_keep = whole(None, 1, 1 << 31, "2", "a whole number of at least 1, or null for all")
KNOWN = {"keep": replace(_keep, read=lambda text: ALL if text == "null" else _keep.read(text))}


def prune(words: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    """Delete the checkpoints of a run that `checkpoint.keep` would delete; with `dry_run`, name
    them.

    Raises:
        ConfigError: there is no such run, or a process writes to it.
        BadEnvironment: a folder cannot be removed.
    """
    values, rest = read_words(words, KNOWN)
    home = one_folder(rest, "prune RUN [keep=N] [--dry-run]")
    root = home / CHECKPOINTS
    if not (home / RUN_FILE).is_file() or not root.is_dir():
        rule = f"{home} is no run with checkpoints"
        raise refusal(rule, f"{program()} checkpoint prune RUN", "MT502")
    keep = values["keep"] or read_run_file(home / RUN_FILE).checkpoint.keep
    with nullcontext() if dry_run else _owned(home):
        found = fate(root, None if keep == ALL else keep)
        sizes = {path: _size(path) for path in found.doomed}
        if not dry_run:
            _remove(found.doomed)
    if as_json:
        say_json(
            {
                "run": str(home),
                "keep": None if keep == ALL else keep,
                "deleted": not dry_run,
                "checkpoints": [path.name for path in found.doomed],
                "bytes": sum(sizes.values()),
                "kept": [path.name for path in found.newest]
                + [f"{kept.path.name}: {kept.why}" for kept in found.kept],
            }
        )
        return 0
    done = "would be deleted" if dry_run else "deleted"
    for path in found.doomed:
        say(f"{path.name}: {done}, {bytes_(sizes[path])}")
    for kept in found.kept:
        say(f"{kept.path.name}: stays, {kept.why}")
    for path in found.newest:
        say(f"{path.name}: stays, one of the newest")
    total = bytes_(sum(sizes.values()))
    say(f"{home}: {number_of(len(found.doomed), 'checkpoint')} {done}, {total}")
    return 0


def fate(root: Path, keep: int | None) -> Retention:
    """Return which checkpoints in a folder go, and which stay."""
    every = folder.committed(root)
    return retention(
        every,
        keep,
        complete={path for path in every if is_complete(path)},
        named=_named(root, every),
        read=[path for path in every if folder.is_read(path)],
    )


def _named(root: Path, every: Sequence[Path]) -> list[Path]:
    """Return the checkpoints that the configuration of another run names as its start."""
    home = root.parent
    texts = []
    for file in islice(home.absolute().parent.glob(f"*/{RUN_FILE}"), MOST_RUNS):
        if file.parent.name != home.name:
            with suppress(OSError, ValueError):
                texts.append(file.read_text())
    return [
        path
        for path in every
        if any(re.search(rf"{re.escape(str(path.absolute()))}(?!\d)", text) for text in texts)
    ]


def _remove(doomed: Sequence[Path]) -> None:
    for path in doomed:
        try:
            shutil.rmtree(folder.hidden(path))
        except OSError as error:
            raise BadEnvironment(f"{path} cannot be removed: {error.strerror or error}") from None


@contextmanager
def _owned(home: Path) -> Iterator[None]:
    """Own a run folder, as a run does, so that none saves meanwhile.

    Raises:
        ConfigError: another process owns it.
        BadEnvironment: it cannot be written.
    """
    path = home / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise BadEnvironment(f"{path} cannot be written: {error.strerror or error}") from None
    try:
        held = locks.lock(descriptor, path)
    except locks.Taken as taken:
        os.close(descriptor)
        with suppress(OSError):
            taken.owner = taken.owner or path.read_text().strip()
        rule = f"cannot be pruned because {home} is in use by {taken.owner or 'another process'}"
        fix = "wait until the run has ended; it prunes by itself"
        raise refusal(rule, fix, "MT501", "log.name", home.name) from None
    try:
        yield
    finally:
        held.release()
        os.close(descriptor)


def copy(words: Sequence[str], *, as_json: bool) -> int:
    """Write a verified copy of a checkpoint: a new folder that appears when every byte of it has
    been read back and compared.

    Raises:
        ConfigError: there is no such checkpoint, or the new folder exists.
        CorruptData: the checkpoint, or what was written, is not as it should be.
        BadEnvironment: the copy cannot be written.
    """
    if len(words) != 2 or any("=" in word for word in words):
        rule = "cannot copy because it takes a checkpoint and a new folder"
        raise refusal(rule, f"{program()} checkpoint copy {USAGE}", "MT002")
    source = one_checkpoint(words[:1], f"copy {USAGE}")
    out = new_folder(Path(words[1]).expanduser())
    with folder.reading(source):
        manifest = folder.read_manifest(source, verify=False)
        with drafted(out, "copying") as draft:
            for name in (*manifest["files"], folder.MANIFEST):
                _copy(source / name, draft / name)
            # What the disk holds now counts, not what was sent to it.
            found = verified(draft, folder.parse_manifest(draft))
            if found.damage:
                lines = [line.replace(str(draft), str(source)) for line in found.damage]
                raise CorruptData(*lines, f"{out} was not written")
    if as_json:
        body = {"source": str(source), "copy": str(out), "files": found.files}
        say_json({**body, "bytes": found.nbytes, "seconds": found.seconds})
        return 0
    say(
        f"{out}: {number_of(found.files, 'file')}, {bytes_(found.nbytes)}, read back at"
        f" {bytes_(found.rate)}/s: as it was written"
    )
    return 0


def _copy(source: Path, target: Path) -> None:
    """Copy the bytes of a file.

    Raises:
        BadEnvironment, CorruptData: the source cannot be read.
    """
    try:
        reader = source.open("rb", buffering=0)
    except OSError as error:
        raise not_read(source, error) from None
    with reader, target.open("xb", buffering=0) as writer:
        shutil.copyfileobj(reader, writer, COPY_BYTES)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
