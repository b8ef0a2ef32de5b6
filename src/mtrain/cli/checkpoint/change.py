"""`checkpoint prune` and `copy`: fewer checkpoints of a run, and one more elsewhere."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtrain import locks
from mtrain.ckpt import folder
from mtrain.ckpt.remote.place import Place
from mtrain.ckpt.remote.transfer import (
    download,
    download_into,
    fate_of,
    pruned,
    send_tokenizer,
    upload,
)
from mtrain.ckpt.retention import (
    Policy,
    Retention,
    is_complete,
    losses_of,
    named_by_others,
    retention,
)
from mtrain.ckpt.sources import address_of
from mtrain.ckpt.verification import verified
from mtrain.cli.atomic_output import drafted, new_folder
from mtrain.cli.checkpoint.look import one_address, one_checkpoint, one_folder
from mtrain.cli.named_values import Word, one_of, read_words, whole
from mtrain.cli.output import refusal, say_json
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import CHECKPOINTS, RUN_FILE, program
from mtrain.durable import not_read
from mtrain.errors import BadEnvironment, CorruptData, say
from mtrain.launching.folder import LOCK_FILE
from mtrain.object_store import is_remote
from mtrain.units import bytes_, number_of

USAGE = "CHECKPOINT NEW_FOLDER_OR_ADDRESS"
NULL = "null"
COPY_BYTES = 16 << 20
_steps = whole(None, 1, 1 << 31, "2", "a whole number of at least 1, or null for all")


def _or_null(word: Word, rule: str = "") -> Word:
    """Return a word that also takes null, which is not the same as leaving it out."""
    read = word.read
    return replace(
        word, read=lambda text: NULL if text == "null" else read(text), rule=rule or word.rule
    )


KNOWN = {
    "keep": _or_null(_steps),
    "keep_every": _or_null(_steps, "a whole number of at least 1, or null"),
    "keep_best": _or_null(
        Word(None, one_of("valid_loss"), example="valid_loss"), "valid_loss or null"
    ),
}


def prune(words: Sequence[str], *, dry_run: bool, as_json: bool) -> int:
    """Delete the checkpoints that a run would delete by itself; with `dry_run`, name them.

    Raises:
        ConfigError: the run does not exist, or a process writes to it.
        BadEnvironment: a folder cannot be removed.
    """
    values, rest = read_words(words, KNOWN)
    if len(rest) == 1 and is_remote(rest[0]):
        return _prune_remote(rest[0], values, dry_run=dry_run, as_json=as_json)
    home = one_folder(rest, "prune RUN [keep=N] [keep_every=N] [keep_best=valid_loss] [--dry-run]")
    root = home / CHECKPOINTS
    if not (home / RUN_FILE).is_file() or not root.is_dir():
        rule = f"{home} is no run with checkpoints"
        raise refusal(rule, f"{program()} checkpoint prune RUN", "MT502")
    policy = _policy(home, values)
    with nullcontext() if dry_run else _owned(home):
        found = fate(root, policy)
        sizes = {path: _size(path) for path in found.doomed}
        if not dry_run:
            _remove(found.doomed)
    _say_fate(str(home), policy, found, sizes, dry_run=dry_run, as_json=as_json)
    return 0


def _prune_remote(url: str, values: Mapping[str, Any], *, dry_run: bool, as_json: bool) -> int:
    """Delete checkpoints at an address, except the ones that `keep` and `keep_every` keep."""
    place = Place(url)
    if values["keep_best"] is not None or values["keep"] is None:
        rule = "cannot prune because an address has no run: neither its keys nor its losses"
        fix = f"{program()} checkpoint prune {url} keep=N [keep_every=N]"
        raise refusal(rule, fix, "MT002")
    given = {name: None if values[name] == NULL else values[name] for name in values}
    policy = Policy(given["keep"], given["keep_every"])
    every = place.checkpoints()
    if not every:
        rule = f"{place} has no checkpoint"
        raise refusal(rule, f"{program()} checkpoint prune ADDRESS keep=N", "MT502")
    found = fate_of(every, policy, {}) if dry_run else pruned(place, policy, {})
    bytes_of = {one.name: one.nbytes for one in every}
    sizes = {path: bytes_of[path.name] for path in found.doomed}
    _say_fate(place.url, policy, found, sizes, dry_run=dry_run, as_json=as_json)
    return 0


def _say_fate(
    home: str,
    policy: Policy,
    found: Retention,
    sizes: Mapping[Path, int],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Print which checkpoints were deleted, and why each of the others stays."""
    stay = (*found.kept, *found.newest)
    if as_json:
        say_json(
            {
                "run": home,
                "keep": policy.keep,
                "keep_every": policy.every,
                "keep_best": policy.best,
                "deleted": not dry_run,
                "checkpoints": [path.name for path in found.doomed],
                "bytes": sum(sizes.values()),
                "kept": [f"{kept.path.name}: {kept.why}" for kept in stay],
            }
        )
        return
    done = "would be deleted" if dry_run else "deleted"
    for path in found.doomed:
        say(f"{path.name}: {done}, {bytes_(sizes[path])}")
    for kept in stay:
        say(f"{kept.path.name}: stays, {kept.why}")
    total = bytes_(sum(sizes.values()))
    say(f"{home}: {number_of(len(found.doomed), 'checkpoint')} {done}, {total}")


def _policy(home: Path, values: Mapping[str, Any]) -> Policy:
    """Return the policy of a run, with the words of the command line in place of its keys."""
    own = Policy.of(read_run_file(home / RUN_FILE).checkpoint)
    names = {"keep": "keep", "every": "keep_every", "best": "keep_best"}
    given = {part: values[name] for part, name in names.items() if values[name] is not None}
    return replace(own, **{part: None if v == NULL else v for part, v in given.items()})


def fate(root: Path, policy: Policy) -> Retention:
    """Return which checkpoints in a folder go, and which stay."""
    every = folder.committed(root)
    return retention(
        every,
        policy,
        complete={path for path in every if is_complete(path)},
        losses=losses_of(root, policy),
        named=named_by_others(root, every),
        read=[path for path in every if folder.is_read(path)],
    )


def _remove(doomed: Sequence[Path]) -> None:
    for path in doomed:
        try:
            gone = folder.hidden(path)
            if gone is None:
                say(f"{path.name}: stays, a process began to read it", error=True)
            else:
                shutil.rmtree(gone)
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
        ConfigError: the checkpoint does not exist, or the new folder does.
        CorruptData: the checkpoint, or its copy, is damaged.
        BadEnvironment: the copy cannot be written.
    """
    if len(words) != 2 or any("=" in word and not is_remote(word) for word in words):
        rule = "cannot copy because it takes a checkpoint and a new folder"
        raise refusal(rule, f"{program()} checkpoint copy {USAGE}", "MT002")
    source = None
    named = words[0]
    if not is_remote(named):
        source = one_checkpoint([named], f"copy {USAGE}")
        # A folder may name a checkpoint in an object store.
        named = address_of(source) or named
    if source is None or is_remote(named) or is_remote(words[1]):
        return _copy_remote(named, words[1], as_json=as_json)
    out = new_folder(Path(words[1]).expanduser())
    with folder.reading(source):
        manifest = folder.read_manifest(source, verify=False)
        with drafted(out, "copying") as draft:
            for name in (*manifest["files"], folder.MANIFEST):
                _copy(source / name, draft / name)
            # The content of the disk counts, not what was sent to it.
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


def _copy_remote(source: str, target: str, *, as_json: bool) -> int:
    """Copy a checkpoint to an object store, out of one, or between two; see `copy`."""
    usage = f"copy {USAGE}"
    begun = time.monotonic()
    with ExitStack() as stack:
        if is_remote(source):
            from_place = one_address(source, usage)
            if not is_remote(target):
                out = new_folder(Path(target).expanduser())
                with drafted(out, "copying") as draft:
                    nbytes = download_into(from_place, draft)
                return _say_copied(from_place.url, str(out), nbytes, begun, as_json)
            # A store sends nothing to another one: the way is through this machine.
            scratch = Path(stack.enter_context(TemporaryDirectory(prefix="mtrain-")))
            path = scratch / from_place.name
            download(from_place, path)
            source = from_place.url
        else:
            path = one_checkpoint([source], usage)
            source = str(path)
            stack.enter_context(folder.reading(path))
            found = verified(path, folder.read_manifest(path, verify=False))
            if found.damage:
                raise CorruptData(*found.damage, f"{target} was not written")
        place = Place(target)
        if not place.is_checkpoint:
            if path.parent.name == CHECKPOINTS:
                send_tokenizer(path.parent.parent, place)
            place = place / folder.folder_name(folder.parse_manifest(path)["step"])
        sent = upload(path, place, read_back=True)
    return _say_copied(source, place.url, sent.nbytes, begun, as_json)


def _say_copied(source: str, target: str, nbytes: int, begun: float, as_json: bool) -> int:
    seconds = time.monotonic() - begun
    if as_json:
        say_json({"source": source, "copy": target, "bytes": nbytes, "seconds": seconds})
    else:
        rate = bytes_(nbytes / max(seconds, 1e-9))
        say(f"{target}: {bytes_(nbytes)} copied and compared at {rate}/s: as it was written")
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
