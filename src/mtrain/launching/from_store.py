"""The checkpoint of an object store that a run continues or starts from.

A folder of the run on this machine goes on, if there is one; else one is made, with the
configuration of the checkpoint. In it a folder represents the checkpoint, and ranks read the parts
that they need from the store (see `ckpt.sources`). Weights to start from get a folder below that of
the runs.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtrain import durable
from mtrain.ckpt import folder as ckpt_folder
from mtrain.ckpt.remote import transfer
from mtrain.ckpt.remote.place import Place
from mtrain.config.compose.paths import CHECKPOINTS, RUN_FILE, user_path
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadPlace, ConfigError
from mtrain.launching import folder, resume
from mtrain.launching.uploads import KEY, note, noted, reached
from mtrain.object_store import is_remote

RESUME = "checkpoint.resume"
START = "checkpoint.init_from"
WEIGHTS = ".weights"
"""The folder, in that of the runs, of the checkpoints that runs have started from."""
LATEST = "latest"
NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,200}")


def brought(
    run: RunConfig, *, launch: str | None, restarted: str | None, say: Callable[[str], None]
) -> RunConfig:
    """Return a run that resumes a run folder, in which a folder represents the checkpoint of an
    address; the same run if its `checkpoint.resume` needs none.

    `auto` and `latest` take the newest checkpoint of `checkpoint.remote` if no folder here has a
    later one; `auto` only that of the same launch or of the same `log.name`.

    Raises:
        ConfigError: there is no checkpoint at the address that is named.
        CorruptData: an object has changed since it was written.
        BadEnvironment, BadPlace: the store or the disk refuses.
    """
    how = folder.resume_of(run, restarted)
    if run.checkpoint.init_from is not None and is_remote(run.checkpoint.init_from):
        run = _with_weights(run, run.checkpoint.init_from, say, again=how is not None)
    if how is not None and is_remote(how):
        return _resumed(run, how, RESUME, say, named=True)
    remote = run.checkpoint.remote
    if remote is None:
        return run
    if how == LATEST:
        return _resumed(run, remote, KEY, say)
    with reached(KEY, remote):
        owner = Place(remote).owner()
    same = launch is not None and owner.get("launch") == launch
    if how == resume.AUTO and (same or run.log.name in (owner.get("run"), None)):
        own = same or run.log.name is not None
        return _resumed(run, remote, KEY, say) if own else run
    return run


def _with_weights(
    run: RunConfig, url: str, say: Callable[[str], None], *, again: bool
) -> RunConfig:
    """Return a run that starts from a folder with the newest checkpoint of an address, or with the
    one that it names; `again`: a start that may resume keeps an earlier one's choice.
    """
    digest = hashlib.sha256(url.encode()).hexdigest()[:8]
    label = re.sub(r"[^\w.+-]", "-", url.rstrip("/").rpartition("/")[2])
    home = user_path(run.log.runs_dir) / WEIGHTS / f"{label}-{digest}"
    started = _with(run, init_from=str(home))
    if again and ckpt_folder.committed(home / CHECKPOINTS):
        return started
    with reached(START, url):
        newest = Place(url).newest()
        if newest is None:
            raise nothing_at(START, url)
        with folder.owned(home, run):
            taken = _refer(newest, home, say)
            # Runs start from the newest checkpoint in the folder.
            for other in ckpt_folder.folders(home / CHECKPOINTS):
                if other.name != taken.name and not ckpt_folder.is_read(other):
                    shutil.rmtree(other, ignore_errors=True)
    return started


def _with(run: RunConfig, **keys: Any) -> RunConfig:
    section = run.checkpoint.model_copy(update=keys)
    return run.model_copy(update={"checkpoint": section})


def nothing_at(key: str, url: str) -> ConfigError:
    """Return the error of an address without a committed checkpoint."""
    rule = f"cannot continue because {url} has no committed checkpoint"
    return ConfigError.of("MT502", key, url, rule, f"leave out {key}")


def _resumed(
    run: RunConfig, url: str, key: str, say: Callable[[str], None], *, named: bool = False
) -> RunConfig:
    with reached(key, url):
        place = Place(url)
        newest = place.newest()
        if newest is None:
            if not named:
                return run
            raise nothing_at(key, url)
        source = place.url.rpartition("/")[0] if place.is_checkpoint else place.url
        home = _home(run, source, Place(source).owner())
        if home is None:
            return run
        step = ckpt_folder.step_of(Path(newest.name))
        here = resume.newest(home, [])
        missing = here is None or ckpt_folder.step_of(here) < step
        # Whoever starts again by itself finds its folder, and waits until it is free.
        if not missing and not named and run.checkpoint.resume != LATEST:
            return run
        if named or missing:
            with folder.owned(home, run):
                # Noted first: another try goes on in this folder.
                if not noted(home):
                    note(home, None, "", source=source)
                here = _refer(newest, home, say)
                ours = run.checkpoint.remote == source
                identity = secrets.token_hex(8)
                note(home, source if ours else None, identity, brought=ours, source=source)
    # A named step continues from there; otherwise the newest checkpoint decides, also a local one.
    target = here if named and place.is_checkpoint else home
    return _with(run, resume=str(target))


def _home(run: RunConfig, source: str, owner: Mapping[str, Any]) -> Path | None:
    """Return the folder on this machine of the run that wrote to an address, which may have to be
    made; None: the folder of that name has another run.
    """
    root = user_path(run.log.runs_dir)
    every = sorted(root.glob("*"), key=lambda path: path.name) if root.is_dir() else []
    for path in every:
        facts = noted(path)
        same = source in (facts.get("url"), facts.get("source"))
        if same and run.log.name in (None, path.name) and not path.is_symlink():
            return path
    text = str(owner.get("run", ""))
    name = run.log.name or (text if NAME.fullmatch(text) else source.rpartition("/")[2])
    home = root / name
    if not folder.is_begun(home):
        return home
    return None if run.log.name else home.with_name(folder.free_name(home))


def _refer(place: Place, home: Path, say: Callable[[str], None]) -> Path:
    """Make a folder of a run represent a checkpoint, unless the run has it; return its path."""
    root = home / CHECKPOINTS
    final = root / place.name
    marker = final / ckpt_folder.MANIFEST
    if marker.is_file() and marker.read_bytes() == place.read(ckpt_folder.MANIFEST):
        return final
    draft = root / f"{ckpt_folder.FETCHING}{place.name}"
    say(f"reading {place} where it is")
    try:
        for other in root.glob(f"{ckpt_folder.FETCHING}*"):
            shutil.rmtree(other, ignore_errors=True)
        draft.mkdir(parents=True)
        transfer.referred(place, draft, final)
        if ckpt_folder.is_checkpoint(final):
            final.rename(root / f".superseded-{final.name}")
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        durable.sync(root)
        if not (home / RUN_FILE).exists():
            shutil.copyfile(final / RUN_FILE, home / RUN_FILE)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise _no_place(home, f"{error.filename or home}: {why}") from None
    return final


def _no_place(home: Path, why: str) -> BadPlace:
    rule = f"cannot hold what describes a checkpoint because {why}"
    return BadPlace.of("MT431", "log.runs_dir", str(home.parent), rule, "another disk")
