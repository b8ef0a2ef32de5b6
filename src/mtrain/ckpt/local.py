"""Checkpoints of a run on a disk of its machine, or in its memory, of which the newest is kept.

Needs no torch.

They lie in `LOCAL_DIR/RUN-PATH-TOKEN/checkpoints/step_N` and have the format of all others. `RUN`
is the name of the run folder, `PATH` the hash of its path, and `TOKEN` a word that `local.json` in
the run folder has as well. The manifest repeats that name, so a checkpoint of another run is never
taken for one of this run.

Of a run on several machines, each has a part of its own, in `checkpoints_M` of machine M: all
pieces that its ranks hold, so that they need no other machine. A part is used only if every machine
has its part of the same step.

With `checkpoint.local_replicas`, the part of machine M is also in `replica_M_on_K` of other
machines K (`ckpt.replication`). A machine that lacks its part gets it back from one of them, and
only then is the step used.

A start that does not continue from a local checkpoint draws a new token: the run takes another
course from there, and the disks of other machines may hold checkpoints of the old one.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mtrain import durable, strict_json
from mtrain.ckpt import folder
from mtrain.ckpt.verification import verified
from mtrain.config.compose.paths import CHECKPOINTS, LOCAL_FILE, MANIFEST, user_path
from mtrain.errors import BadEnvironment, MtrainError, first_line

FILE = LOCAL_FILE
OWNER = "local_of"
"""The fact of a manifest that names the run of a local checkpoint."""
PART = "machine"
"""The fact of a manifest with the number of the machine whose part it is, and of all machines."""
KEY = "checkpoint.local_dir"
REPLICA = "replica"
"""The beginning of the names of folders with copies of other machines' parts."""
LEFTOVERS = ("step_*", ".saving-*", ".deleted-*", ".replaced-*", ".superseded-*")
MOST_LETTERS = 180
"""Letters of a run folder's name in the name of its local folder."""


@dataclass(frozen=True)
class Local:
    """The place of a run's local checkpoints."""

    root: Path
    owner: str
    """The run's name in their manifests."""
    machine: int | None = None
    """The machine whose parts they are; None: they are whole."""


@dataclass(frozen=True)
class Held:
    """The parts of local checkpoints that a machine holds, by their steps."""

    name: str
    """The machine, in words."""
    parts: Sequence[int] = ()
    """Its own parts; they are intact."""
    replicas: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Machine -> copies of its parts, which may be damaged."""


@dataclass(frozen=True)
class Elsewhere:
    """The other machines of a run, which may hold parts of local checkpoints."""

    grid: Mapping[str, int]
    """The layout of the run."""
    machines: int
    ask: Callable[[Path, int], Mapping[int, Held]]
    """Returns, for a run folder and a step, the later checkpoints that other machines hold."""
    bring: Callable[[Path, int, int, int], str]
    """Has, for a run folder, a step and a machine, that machine get its part from another one;
    returns why it cannot, or an empty text.
    """


_elsewhere: list[Elsewhere] = []


@contextmanager
def asking(elsewhere: Elsewhere) -> Iterator[None]:
    """Have `newest` ask other machines in this block."""
    _elsewhere.append(elsewhere)
    try:
        yield
    finally:
        _elsewhere.pop()


@dataclass(frozen=True)
class _Noted:
    """The content of `local.json`."""

    token: str = ""
    """Empty: the run has no place now."""
    folders: tuple[Path, ...] = ()
    places: tuple[str, ...] = ()
    """The values of `local_dir` so far, as real paths."""

    def write(self, home: Path) -> None:
        body = {
            "home": os.path.realpath(home),
            "token": self.token,
            "folders": [str(path) for path in self.folders],
            "places": list(self.places),
        }
        draft = home / f".{FILE}"
        durable.write(draft, strict_json.dumps(body).encode())
        draft.replace(home / FILE)


def place_of(home: Path, local_dir: str | None, machine: int | None = None) -> Local | None:
    """Return the place that `begin` prepared for a run folder or a machine's; None without one."""
    noted = _noted(home)
    if local_dir is None or not noted.token:
        return None
    found = _place(local_dir, home, noted.token)
    if found not in noted.folders:
        return None
    return Local(found / _root_name(machine), found.name, machine)


def part_of(home: Path, checkpoint: Path | None, machine: int | None) -> Path | None:
    """Return the part of a machine, if `checkpoint` is a local one of a run on several machines."""
    if checkpoint is None or not is_part(checkpoint) or not holds(home, checkpoint):
        return checkpoint
    return checkpoint.parent.with_name(_root_name(machine)) / checkpoint.name


def is_part(checkpoint: Path) -> bool:
    """Return whether a path is that of the part of a machine."""
    return checkpoint.parent.name.startswith(f"{CHECKPOINTS}_")


def follow(home: Path, local_dir: str | None, step: int, machine: int) -> None:
    """Prepare the place of another machine than the one whose process owns the run folder.

    The run continues from `step`: later parts are deleted, and those of other courses of the run.

    Raises:
        BadEnvironment: `local_dir` cannot be written, or the place belongs to somebody else.
    """
    place = place_of(home, local_dir, machine)
    if place is None or local_dir is None:
        return
    mine = place.root.parent
    _make(mine, local_dir, machine)
    course = mine.name.rpartition("-")[0]
    for other in mine.parent.glob(f"{glob.escape(course)}-*"):
        if other != mine and _is_ours(other):
            for root in _roots_of(other, machine):
                _clear(root)
    for root in _roots_of(mine, machine):
        _forget_after(root, step)


def intact(home: Path, than: int, machine: int) -> list[int]:
    """Return the steps later than `than` whose parts a machine holds whole."""
    found = []
    for place in _noted(home).folders:
        if _is_ours(place):
            parts = folder.folders(place / _root_name(machine))
            found += [folder.step_of(p) for p in parts if not _fault(p, place.name)]
    return [step for step in found if step > than]


def replica_root(root: Path, of: int, on: int) -> Path:
    """Return a machine's folder of copies of another one's parts; its own parts are in `root`."""
    return root.with_name(f"{REPLICA}_{of}_on_{on}")


def replicas(home: Path, than: int, machine: int) -> dict[int, list[Path]]:
    """Return the copies of parts later than step `than` on a machine: machine -> its parts."""
    found: dict[int, list[Path]] = {}
    for place in filter(_is_ours, _noted(home).folders):
        for root in place.glob(f"{REPLICA}_*_on_{machine}"):
            number = root.name.split("_")[1]
            if number.isdecimal():
                later = [path for path in folder.committed(root) if folder.step_of(path) > than]
                found.setdefault(int(number), []).extend(later)
    return found


def fault_of(part: Path) -> str:
    """Return why a part, or a copy of one, cannot be used; empty: it is whole, and this run's."""
    return _fault(part, part.parent.parent.name)


def root_for(home: Path, machine: int) -> Path:
    """Return the folder to which a machine gets its parts back; it is made.

    Raises:
        BadEnvironment: it cannot be written, or the run has none.
    """
    folders = _noted(home).folders
    if not folders:
        raise BadEnvironment(f"{home / FILE} names no place for local checkpoints")
    _make(folders[0], str(folders[0].parent), machine)
    return folders[0] / _root_name(machine)


def begin(home: Path, checkpoint: Path | None, local_dir: str | None) -> None:
    """Prepare the place of a run's local checkpoints, for the process that owns its folder.

    `checkpoint` is the one that the run continues from. Later local ones are deleted, and all of
    them if it is no local one.

    Raises:
        BadEnvironment: `local_dir` cannot be written, or the place belongs to somebody else.
    """
    noted = _noted(home)
    if checkpoint is not None and holds(home, checkpoint):
        forget_after(home, folder.step_of(checkpoint))
    else:
        remove(home)
        noted = _Noted(secrets.token_hex(8), (), noted.places)
    if local_dir is None:
        return
    place = _place(local_dir, home, noted.token)
    _make(place, local_dir, 0 if _elsewhere else None)
    folders = dict.fromkeys((place, *noted.folders))
    places = dict.fromkeys((*noted.places, os.path.realpath(place.parent)))
    _Noted(noted.token, tuple(folders), tuple(places)).write(home)


def holds(home: Path, checkpoint: Path) -> bool:
    """Return whether a checkpoint is a local one of the run in a folder."""
    return checkpoint.parent.parent in _noted(home).folders


def newest(home: Path, than: int, notes: list[str]) -> Path | None:
    """Return the newest local checkpoint of a run that is whole and later than step `than`; None if
    there is none. One that is passed over gets a line in `notes`.
    """
    noted = _noted(home)
    found: list[Path] = []
    for place in noted.folders:
        if not _is_ours(place):
            why = "belongs to somebody else" if os.path.lexists(place) else "is not on this machine"
            notes.append(f"{place} {why}: its local checkpoints are passed over")
            continue
        found += folder.folders(place / CHECKPOINTS) + folder.folders(place / _root_name(0))
    held: Mapping[int, Held] = {}
    if _elsewhere and noted.folders:
        held = _elsewhere[-1].ask(home, than)
        # A machine that is new here has none of its own, and others may have copies.
        own = noted.folders[0] / _root_name(0)
        steps = {step for one in held.values() for step in one.replicas.get(0, ())}
        missing = {own / folder.folder_name(step) for step in steps}
        found += missing.difference(found)
    for path in sorted(found, key=folder.step_of, reverse=True):
        if folder.step_of(path) <= than:
            break
        why = _fault(path, path.parent.parent.name)
        if _elsewhere and is_part(path):
            why = _incomplete(home, path, why, held, notes)
        elif not why and _elsewhere:
            why = "other machines do not hold it"
        elif not why and is_part(path):
            why = _unfit(path)
        if not why:
            return path
        notes.append(f"{path}: local checkpoint passed over: {why}")
    return None


def exist(home: Path) -> bool:
    """Return whether a run has a local checkpoint on this machine, whole or not."""
    return any(folder.committed(root) for root in _roots(home))


def forget_after(home: Path, step: int) -> None:
    """Delete local checkpoints later than `step`, and leftovers of interrupted saves."""
    for root in _roots(home):
        _forget_after(root, step)


def _forget_after(root: Path, step: int) -> None:
    with suppress(OSError):
        folder.sweep(root)
    for path in folder.folders(root):
        if folder.step_of(path) > step:
            shutil.rmtree(path, ignore_errors=True)


def remove(home: Path) -> None:
    """Delete all local checkpoints of a run on this machine, with their folders."""
    for root in _roots(home):
        _clear(root)
    noted = _noted(home)
    if noted.token:
        with suppress(OSError):
            _Noted(places=noted.places).write(home)


def clear(place: Local) -> None:
    """Delete the checkpoints of a machine and their folders; the run folder keeps its note."""
    for root in _roots_of(place.root.parent, place.machine or 0):
        _clear(root)


def _clear(root: Path) -> None:
    for path in [one for pattern in LEFTOVERS for one in root.glob(pattern)]:
        shutil.rmtree(path, ignore_errors=True)
    for path in (root, root.parent):
        with suppress(OSError):  # something else is in there
            path.rmdir()


def _incomplete(
    home: Path, path: Path, fault: str, held: Mapping[int, Held], notes: list[str]
) -> str:
    """Return why a step cannot be used, of which `path` is the part of the first machine and has
    this `fault`; empty: each machine has its part, after those without one got it back from others.
    """
    if not fault and (why := _unfit(path)):
        return why
    step = folder.step_of(path)
    every = {0: Held("machine 0", () if fault else (step,), steps_of(replicas(home, 0, 0))), **held}
    lacking = [number for number, one in every.items() if step not in one.parts]
    alone = [n for n in lacking if not any(step in h.replicas.get(n, ()) for h in every.values())]
    if alone:
        names = ", ".join(every[number].name for number in alone if number)
        return f"{names} does not hold its part" if 0 not in alone else fault
    for number in lacking:
        problem = ""
        for holder, one in every.items():
            if step not in one.replicas.get(number, ()):
                continue
            problem = _elsewhere[-1].bring(home, step, number, holder)
            if not problem:
                name = every[number].name
                notes.append(f"{name} lacks its part of local step {step}: copied from {one.name}")
                break
            notes.append(f"{one.name} cannot give {every[number].name} its part: {problem}")
        if problem:
            return f"{every[number].name} does not hold its part"
    return fault_of(path) or _unfit(path)


def steps_of(found: Mapping[int, Sequence[Path]]) -> dict[int, list[int]]:
    """Return the steps of the parts of `replicas`."""
    return {number: [folder.step_of(path) for path in paths] for number, paths in found.items()}


def _unfit(path: Path) -> str:
    """Return why the parts of an intact one's step cannot be used in the layout of this start."""
    state = folder.parse_manifest(path)["state"]
    machines = state.get(PART, [0, 0])[1]
    if not _elsewhere or _elsewhere[-1].machines != machines:
        return f"it is the part of one of {machines} machines"
    return "it was written in another layout" if state["grid"] != _elsewhere[-1].grid else ""


def _root_name(machine: int | None) -> str:
    return CHECKPOINTS if machine is None else f"{CHECKPOINTS}_{machine}"


def _roots(home: Path) -> Iterator[Path]:
    for place in _noted(home).folders:
        if _is_ours(place):
            yield from (place / CHECKPOINTS, *place.glob(f"{CHECKPOINTS}_*"))
            yield from place.glob(f"{REPLICA}_*_on_*")


def _roots_of(place: Path, machine: int) -> list[Path]:
    """Return the folders of a machine in a place."""
    return [place / _root_name(machine), *place.glob(f"{REPLICA}_*_on_{machine}")]


def _noted(home: Path) -> _Noted:
    """Return the note of a run folder, without folders that are not named after this run."""
    try:
        body = json.loads((home / FILE).read_text())
        token = body["token"]
        named = [Path(text) for text in body["folders"]]
        places = tuple(map(str, body["places"]))
        # It may have come with the run folder of somebody else: never delete in any folder.
        if body["home"] != os.path.realpath(home) or not isinstance(token, str):
            return _Noted()
    except (OSError, ValueError, KeyError, TypeError):
        return _Noted()
    name = _name(home, token)
    folders = tuple(path for path in named if path.name == name and path.is_absolute())
    return _Noted(token, folders, places)


def _place(local_dir: str, home: Path, token: str) -> Path:
    return user_path(local_dir).absolute() / _name(home, token)


def _name(home: Path, token: str) -> str:
    path = os.path.realpath(home)
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    return f"{os.path.basename(path)[:MOST_LETTERS]}-{digest}-{token}"


def _is_ours(place: Path) -> bool:
    """Return whether a place is a folder of this user; /dev/shm is open to all."""
    try:
        status = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _make(place: Path, local_dir: str, machine: int | None) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        why = "" if _is_ours(place) else f"{place} belongs to somebody else"
        if not why and not os.access(place, os.W_OK | os.X_OK):
            why = f"{place} takes no new files"
        if not why:
            (place / _root_name(machine)).mkdir(exist_ok=True)
    except OSError as error:
        why = f"{error.filename or place}: {error.strerror or error}"
    if why:
        raise BadEnvironment(
            f"{KEY}={local_dir}: cannot hold local checkpoints because {why}",
            f"  fix: {KEY}=FOLDER that can be written",
        )


def _fault(path: Path, owner: str) -> str:
    """Return why a local checkpoint cannot be used; empty: it is whole, and the run's own."""
    try:
        written = (path / MANIFEST).stat().st_mtime_ns
    except OSError:
        return f"it has no {MANIFEST}, so it was not committed"
    return _examined(path, owner, written)


@cache
def _examined(path: Path, owner: str, written: int) -> str:
    """Return the fault of a checkpoint whose manifest was `written` then: it is read once."""
    try:
        manifest = folder.read_manifest(path, verify=False)
        found = manifest["state"].get(OWNER)
        if found != owner:
            return f"it belongs to {found or 'another run'}"
        if manifest["step"] != folder.step_of(path):
            return f"it is of step {manifest['step']}"
        return "; ".join(verified(path, manifest).damage[:1])
    except MtrainError as error:
        return first_line(error)
