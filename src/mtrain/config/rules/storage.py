"""Storage rules: writable folders, existing checkpoints, and state that is saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mtrain.config.compose.paths import MANIFEST, RESUME_WORDS, RUN_FILE, names_near, user_path
from mtrain.config.disk.files import download_of, unreadable, unwritable
from mtrain.config.messages.suggestions import near_choice
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig


@rule(
    Code("MT431", help="Name a folder that can be written.", example="log.runs_dir=/dev/null"),
    reads="log.runs_dir",
    disk=True,
)
def runs_folder(run: RunConfig) -> Iterator[Finding]:
    """The runs folder can be created or written to."""
    yield from _folder("MT431", "log.runs_dir", run.log.runs_dir, "runs")


@rule(
    Code(
        "MT432", help="Name a folder that can be written.", example="data.cache_dir=/dev/null/cache"
    ),
    reads="data.cache_dir data.kind data.path data.blend",
    disk=True,
)
def cache_folder(run: RunConfig) -> Iterator[Finding]:
    """A run that needs the cache can create or write it, and training on text can read it.

    Synthetic tokens keep nothing there. Data derived from local .bin and .idx files stays in memory
    if the cache is not writable.
    """
    d = run.data
    remote = any("://" in name for name in (d.path or "", *(d.blend or ())))
    if d.kind == "mock" or (d.kind == "indexed" and not remote):
        return
    for found in _folder("MT432", "data.cache_dir", d.cache_dir, "~/.cache/mtrain"):
        if d.kind == "text" and os.path.isdir(user_path(d.cache_dir) / "seen"):
            rule = f"{found.rule}: only text that was tokenized before can be trained on"
            yield replace(found, rule=rule, severity="warning")
        else:
            yield found


def _folder(code: str, key: str, text: str, default: str) -> Iterator[Finding]:
    path = user_path(text)
    rule = unwritable(path) if text else "is empty, and a folder is needed"
    if rule is not None:
        fixes: tuple[Change, ...] = ({key: default}, {key: f"{text}_folder"})
        yield Finding(code, key, rule, fixes, hint=f"{key}=FOLDER that can be written")


@rule(
    Code(
        "MT433",
        help="Name a run or a checkpoint that exists, or begin a new run: checkpoint.resume=null.",
        example="checkpoint.resume=/nowhere/run",
    ),
    reads="checkpoint.resume",
    disk=True,
)
def resume_point(run: RunConfig) -> Iterator[Finding]:
    """A run resumes from `latest`, `auto`, a run folder or a checkpoint."""
    resume = run.checkpoint.resume
    if resume is None or resume in RESUME_WORDS:
        return
    path = user_path(resume)
    if not resume or os.path.isfile(path / RUN_FILE) or os.path.isfile(path / MANIFEST):
        rule = "" if resume else "is empty, and a run folder is needed"
    elif os.path.isdir(path):
        rule = f"is neither a run folder (no {RUN_FILE}) nor a checkpoint (no {MANIFEST})"
    elif not os.path.lexists(path):
        rule = "there is no such run or checkpoint folder"
    else:
        rule = unreadable(path) or "is a file, and a run folder is needed"
    if rule:
        names = [n for n in names_near(path) if os.path.isfile(Path(n, RUN_FILE))]
        if os.sep not in resume and not os.path.lexists(path):
            names += near_choice(resume, RESUME_WORDS)
        near: tuple[Change, ...] = tuple({"checkpoint.resume": n} for n in names)
        yield Finding("MT433", "checkpoint.resume", rule, (*near, {"checkpoint.resume": None}))


@rule(
    Code(
        "MT434",
        help="Give the run another name, or continue the existing one.",
        severity="warning",
        example="log.runs_dir=/ log.name=dev",
    ),
    reads="log.name checkpoint.resume log.runs_dir",
    disk=True,
)
def run_folder_name(run: RunConfig) -> Iterator[Finding]:
    """A named run folder is never overwritten: the launcher refuses an existing one."""
    if run.log.name is None or run.checkpoint.resume is not None:
        return
    folder = user_path(run.log.runs_dir) / run.log.name
    if os.path.exists(folder):
        free = next(
            f"{run.log.name}-{n}"
            for n in range(2, 10**6)
            if not os.path.exists(folder.parent / f"{run.log.name}-{n}")
        )
        rule = f"{folder} is there already, and a new run would refuse to write over it"
        fixes: tuple[Change, ...] = ({"log.name": free}, {"checkpoint.resume": str(folder)})
        yield Finding("MT434", "log.name", rule, fixes)


@rule(
    Code(
        "MT435",
        severity="warning",
        example="checkpoint.save_interval=1000 checkpoint.save_final=false",
    ),
    reads="checkpoint.save_interval trainer.train_iters checkpoint.save_final",
)
def save_schedule(run: RunConfig) -> Iterator[Finding]:
    """Checkpoints scheduled after the last step are never written."""
    c = run.checkpoint
    steps = run.trainer.steps
    if c.save_interval and c.save_interval > steps and not c.save_final:
        rule = (
            f"a checkpoint every {c.save_interval} steps, of {steps}, and none at the end: nothing"
            " is saved"
        )
        fixes: tuple[Change, ...] = (
            {"checkpoint.save_final": True},
            {"checkpoint.save_interval": steps},
        )
        yield Finding("MT435", "checkpoint.save_interval", rule, fixes)


@rule(
    Code(
        "MT436",
        "The weights to begin with are not there.",
        help=(
            "Name a run, a checkpoint or a Hugging Face folder that exists:"
            " checkpoint.init_from=FOLDER."
        ),
        example="checkpoint.init_from=/nowhere/weights",
    ),
    reads="checkpoint.init_from",
    disk=True,
)
def starting_weights(run: RunConfig) -> Iterator[Finding]:
    """A run starts from the weights of a run, a checkpoint or a Hugging Face folder."""
    start = run.checkpoint.init_from
    if start is None:
        return
    path = user_path(start)
    if not start or not any(
        os.path.isfile(path / name) for name in (RUN_FILE, MANIFEST, "config.json")
    ):
        rule = (
            f"there is neither a run or checkpoint ({RUN_FILE}) nor a Hugging Face folder"
            " (config.json)"
        )
        near: tuple[Change, ...] = tuple(
            {"checkpoint.init_from": name} for name in names_near(path)
        )
        hint = ""
        if not near and (download := download_of(start)) is not None:
            rule += "; if it is the name of a model on Hugging Face, nothing is downloaded here"
            hint = f"{download[0]}, then checkpoint.init_from={download[1]}"
        yield Finding(
            "MT436",
            "checkpoint.init_from",
            rule,
            (*near, {"checkpoint.init_from": None}),
            hint=hint,
        )


RULES = (
    runs_folder,
    cache_folder,
    resume_point,
    starting_weights,
    run_folder_name,
    save_schedule,
)
