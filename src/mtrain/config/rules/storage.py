"""Storage rules: writable folders, existing checkpoints, and state that is saved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import MANIFEST, RESUME_WORDS, RUN_FILE, names_near, user_path
from mtrain.config.compose.write_paths import real_path
from mtrain.config.disk.files import download_of, unreadable, unwritable
from mtrain.config.messages.suggestions import near_choice
from mtrain.config.rules.finding import Change, Finding, each, multiples
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig
from mtrain.object_store import is_remote, unusable

RESUME = "checkpoint.resume"
START = "checkpoint.init_from"
INTERVAL = "checkpoint.save_interval"
FINAL = "checkpoint.save_final"
MINUTES = "checkpoint.save_minutes"
EVERY = "checkpoint.keep_every"
BEST = "checkpoint.keep_best"
LOCAL = "checkpoint.local_dir"
LOCALLY = "checkpoint.local_interval"
REPLICAS = "checkpoint.local_replicas"
REMOTE = "checkpoint.remote"
NO_LOCAL = {LOCAL: None, LOCALLY: None}
RUNS = "log.runs_dir"
EVALUATED = "trainer.eval_interval"
WRITABLE = "Name a folder that can be written."


@rule("MT431", reads="log.runs_dir", disk=True)
def runs_folder(run: RunConfig) -> Iterator[Finding]:
    """Require a folder of runs that can be written."""
    yield from _folder("MT431", "log.runs_dir", run.log.runs_dir, "runs")


@rule(
    Code("MT432", help=WRITABLE, example="data.cache_dir=/dev/null/cache"),
    reads="data.cache_dir data.kind data.path data.blend",
    disk=True,
)
def cache_folder(run: RunConfig) -> Iterator[Finding]:
    """Cannot write the cache of tokens.

    Synthetic tokens keep nothing there. Data derived from local .bin and .idx files stays in memory
    if the cache is not writable, and text that was tokenized before is only read.
    """
    d = run.data
    remote = any("://" in name for name in (d.path or "", *(d.blend or ())))
    if d.kind == "mock" or (d.kind == "indexed" and not remote):
        return
    for found in _folder("MT432", "data.cache_dir", d.cache_dir, "~/.cache/mtrain"):
        if d.kind == "text" and os.path.isdir(user_path(d.cache_dir) / "seen"):
            detail = f"{found.detail}: only text that was tokenized before can be trained on"
            yield replace(found, detail=detail, severity="warning")
        else:
            yield found


def _folder(code: str, key: str, text: str, default: str) -> Iterator[Finding]:
    why = unwritable(user_path(text)) if text else "its name is empty"
    if why is not None:
        # A sibling of the refused folder may be writable, if a file was in the way.
        fixes = each(key, [default, f"{text}_folder"])
        yield Finding(code, key, why, fixes, hint=f"{key}=FOLDER that can be written")


@rule(
    Code(
        "MT433",
        help=f"Name a run or a checkpoint that exists, or begin a new run: {RESUME}=null.",
        example=f"{RESUME}=/nowhere/run",
    ),
    reads=RESUME,
    disk=True,
)
def resume_point(run: RunConfig) -> Iterator[Finding]:
    """Cannot resume because this is neither latest, auto, a run folder nor a checkpoint."""
    resume = run.checkpoint.resume
    if resume is None or resume in RESUME_WORDS:
        return
    if is_remote(resume):
        if why := unusable(resume):
            yield Finding("MT433", RESUME, why, each(RESUME, [None]))
        return
    path = user_path(resume)
    if not resume:
        detail = "it is empty"
    elif os.path.isfile(path / RUN_FILE) or os.path.isfile(path / MANIFEST):
        return
    elif os.path.isdir(path):
        detail = f"no {RUN_FILE} and no {MANIFEST} in it"
    elif not os.path.lexists(path):
        detail = "there is no such folder"
    else:
        detail = unreadable(path) or "a file"
    # Only names that can be resumed are suggestions.
    names = [n for n in names_near(path) if os.path.isfile(Path(n, RUN_FILE))]
    if os.sep not in resume and not os.path.lexists(path):
        names += near_choice(resume, RESUME_WORDS)
    yield Finding("MT433", RESUME, detail, each(RESUME, [*names, None]))


@rule("MT436", reads=START, disk=True)
def starting_weights(run: RunConfig) -> Iterator[Finding]:
    """Require a run, a checkpoint or a Hugging Face model in the folder of weights."""
    start = run.checkpoint.init_from
    if start is None:
        return
    if is_remote(start):
        if why := unusable(start):
            yield Finding("MT436", START, why, each(START, [None]))
        return
    path = user_path(start)
    files = (RUN_FILE, MANIFEST, "config.json")
    # One file tells the three apart: a run's, a checkpoint's, Hugging Face's.
    if start and any(os.path.isfile(path / name) for name in files):
        return
    near = names_near(path)
    detail = f"no {RUN_FILE} and no config.json in it"
    hint = ""
    if not near and (download := download_of(start)) is not None:
        detail += "; if it is the name of a model on Hugging Face, nothing is downloaded here"
        hint = f"{download[0]}, then {START}={download[1]}"
    yield Finding("MT436", START, detail, each(START, [*near, None]), hint=hint)


@rule(
    Code(
        "MT434",
        help="Give the run another name, or resume the existing one.",
        severity="warning",
        example="log.runs_dir=/ log.name=dev",
    ),
    reads=f"log.name {RESUME} log.runs_dir",
    disk=True,
)
def run_folder_name(run: RunConfig) -> Iterator[Finding]:
    """Cannot begin a run of this name because its folder exists and is never overwritten."""
    name = run.log.name
    if name is None or run.checkpoint.resume is not None:
        return
    folder = user_path(run.log.runs_dir) / name
    if os.path.exists(folder):
        # The first free number continues what the user would type.
        numbered = (f"{name}-{n}" for n in range(2, 10**6))
        free = next(other for other in numbered if not os.path.exists(folder.parent / other))
        yield Finding("MT434", "log.name", str(folder), [{"log.name": free}, {RESUME: str(folder)}])


@rule(
    Code("MT435", severity="warning", example=f"{INTERVAL}=1000 {FINAL}=false"),
    reads=f"{INTERVAL} trainer.train_iters {FINAL}",
)
def save_schedule(run: RunConfig) -> Iterator[Finding]:
    """Cannot save a checkpoint because the run ends before the first one."""
    c = run.checkpoint
    steps = run.trainer.steps
    if c.save_interval and c.save_interval > steps and not c.save_final:
        detail = f"one every {c.save_interval} steps, of {steps}, and none at the end"
        yield Finding("MT435", INTERVAL, detail, [{FINAL: True}, {INTERVAL: steps}])


@rule(
    Code(
        "MT430",
        help=f"Set `{EVALUATED}` and `trainer.eval_iters`, or leave `{BEST}` out.",
        example=f"{BEST}=valid_loss trainer.eval_iters=0",
    ),
    reads=(
        f"{BEST} trainer.eval_iters {EVALUATED} trainer.eval_minutes trainer.train_iters {INTERVAL}"
    ),
)
def best_without_evaluation(run: RunConfig) -> Iterator[Finding]:
    """Cannot keep the best checkpoint because no evaluation during the run tells which it is."""
    t = run.trainer
    if run.checkpoint.keep_best is None or (t.eval_iters and (t.eval_interval or t.eval_minutes)):
        return
    every = min(run.checkpoint.save_interval or max(1, t.steps // 10), t.steps)
    change = {EVALUATED: t.eval_interval or every, "trainer.eval_iters": t.eval_iters or 10}
    when = "evaluated only at the end" if t.eval_iters else "trainer.eval_iters=0"
    yield Finding("MT430", BEST, when, [change, {BEST: None}])


@rule(
    Code(
        "MT438", severity="warning", example=f"{EVERY}=250 {INTERVAL}=100 trainer.train_iters=400"
    ),
    reads=f"{EVERY} {INTERVAL} {MINUTES} trainer.train_iters {FINAL}",
)
def permanent_checkpoints(run: RunConfig) -> Iterator[Finding]:
    """Cannot keep a checkpoint permanently because no saved step is a multiple of this."""
    c = run.checkpoint
    every = c.keep_every
    steps = run.trainer.steps
    if every is None or (c.save_final and not steps % every):
        return
    saved = c.save_interval
    if saved and lcm(saved, every) <= steps:
        return
    if saved:
        first = lcm(saved, every)
        detail = f"saved every {saved} steps of {steps}, and step {first} would be the first"
        fixes = each(EVERY, [m for m in multiples(every, saved) if m <= steps])
    elif c.save_minutes is not None:
        detail = f"saved every {c.save_minutes:g} minutes, at any step"
        fixes = each(INTERVAL, [every] if every <= steps else [])
    else:
        detail = f"saved only at the end, after step {steps}"
        fixes = each(INTERVAL, [every] if every <= steps else [])
    yield Finding("MT438", EVERY, detail, [*fixes, {EVERY: None}])


@rule("MT455", reads=f"{LOCAL} {LOCALLY} cluster.nodes parallel.ranks launch.kind launch.tasks")
def local_checkpoints_of_machines(run: RunConfig) -> Iterator[Finding]:
    """Require one process of mtrain on each machine of a run with local checkpoints."""
    machines = min(run.cluster.nodes, run.parallel.ranks)
    kind = run.launch.kind
    by_rank = kind == "torchrun" or (kind != "local" and run.launch.tasks == "device")
    if run.checkpoint.local_dir is not None and machines > 1 and by_rank:
        detail = f"{run.parallel.ranks} ranks on {machines} machines, each started by {kind}"
        yield Finding("MT455", LOCAL, detail, [NO_LOCAL], unset=True)


@rule(
    Code(
        "MT456",
        help=f"Set `{LOCALLY}`, shorter than `{INTERVAL}`, or leave both local keys out.",
        example=f"{LOCAL}=/dev/shm",
    ),
    reads=f"{LOCALLY} {LOCAL} {INTERVAL} trainer.train_iters {FINAL}",
)
def local_schedule(run: RunConfig) -> Iterator[Finding]:
    """Cannot make local checkpoints.

    Steps that are saved in the run folder need none: a warning.
    """
    c = run.checkpoint
    if c.local_dir is None:
        return
    every = c.local_interval
    steps = run.trainer.steps
    shorter = min(c.save_interval or steps, steps) // 2
    fixes: list[Change] = [*each(LOCALLY, [shorter] if shorter else []), NO_LOCAL]
    if every is None:
        yield Finding("MT456", LOCAL, f"{LOCALLY} is not set", fixes)
    elif c.save_interval and not every % c.save_interval:
        detail = f"each {every}th step is saved in the run folder ({INTERVAL}={c.save_interval})"
        yield Finding("MT456", LOCALLY, detail, fixes, "warning", also=(INTERVAL,))
    elif every > steps or (every == steps and c.save_final):
        yield Finding("MT456", LOCALLY, f"the run has {steps} steps", fixes, "warning")


@rule(
    Code("MT457", help=WRITABLE, example=f"{LOCAL}=/dev/null {LOCALLY}=10"),
    reads=f"{LOCAL} {LOCALLY} {RUNS}",
    disk=True,
)
def local_folder(run: RunConfig) -> Iterator[Finding]:
    """Cannot hold local checkpoints.

    On the disk of the run folders they cost as much as others, and are lost with it: a warning.
    """
    local = run.checkpoint.local_dir
    if local is None:
        return
    found = list(_folder("MT457", LOCAL, local, "/dev/shm"))
    yield from found
    fixes: list[Mapping[str, Any]] = [{LOCAL: "/dev/shm"}, NO_LOCAL]
    place = real_path(local)
    runs = real_path(run.log.runs_dir)
    if not place or not runs:
        return  # no path: reported above, or by the rule of its key
    if os.path.commonpath((place, runs)) == runs:
        detail = f"it is in the folder of runs, {runs}, where each folder is a run"
        yield Finding("MT457", LOCAL, detail, fixes, also=(RUNS,))
    elif not found and (disk := _disk_of(place)) is not None and disk == _disk_of(runs):
        detail = f"cannot be faster than {RUNS}={run.log.runs_dir} because both are on one disk"
        yield Finding("MT457", LOCAL, detail, fixes, "warning", also=(RUNS,))


@rule("MT479", reads=f"{REPLICAS} cluster.nodes parallel.ranks")
def replicas_on_machines(run: RunConfig) -> Iterator[Finding]:
    """Require more machines than a part of a local checkpoint has copies."""
    replicas = run.checkpoint.local_replicas
    machines = min(run.cluster.nodes, run.parallel.ranks)
    if replicas is not None and replicas >= machines:
        detail = "the run has 1 machine" if machines == 1 else f"the run has {machines} machines"
        fewer = each(REPLICAS, [machines - 1] if machines > 1 else [])
        yield Finding("MT479", REPLICAS, detail, [*fewer, {REPLICAS: None}])


@rule("MT459", reads=REMOTE)
def remote_address(run: RunConfig) -> Iterator[Finding]:
    """Require an address that holds no secret and that other processes can read."""
    remote = run.checkpoint.remote
    if remote is not None and (why := unusable(remote, lasting=True)):
        yield Finding("MT459", REMOTE, why, [{REMOTE: None}], hint=f"{REMOTE}=s3://BUCKET/PREFIX")


@rule(
    Code(
        "MT490",
        severity="warning",
        example=f"{REMOTE}=s3://bucket/run {FINAL}=false {INTERVAL}=0",
    ),
    reads=f"{REMOTE} {INTERVAL} {MINUTES} {FINAL}",
)
def remote_without_saves(run: RunConfig) -> Iterator[Finding]:
    """Cannot upload checkpoints because the run saves none."""
    if run.checkpoint.remote is not None and not run.checkpoint.saves:
        yield Finding("MT490", REMOTE, fixes=[{FINAL: True}, {REMOTE: None}])


def _disk_of(path: str) -> int | None:
    """Return the number of the file system that holds a path, or will hold it."""
    for folder in (Path(path), *Path(path).parents):
        try:
            return os.stat(folder).st_dev
        except OSError:
            continue
    return None
