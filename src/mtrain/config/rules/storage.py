"""Storage: folders that can be written, checkpoints that exist, state that is not lost."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mtrain.config.paths import near_files, user_path
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.run import RunConfig


def folders_are_folders(run: RunConfig) -> Iterator[Finding]:
    """Neither the folder of runs nor the cache is a file, or lies under one."""
    for code, key, text in (
        ("MT431", "log.runs_dir", run.log.runs_dir),
        ("MT432", "data.cache_dir", run.data.cache_dir),
    ):
        path = user_path(text)
        existing = next((p for p in (path, *path.parents) if os.path.exists(p)), None)
        if not text or (existing is not None and not os.path.isdir(existing)):
            rule = f"{existing} is a file, and a folder is needed" if text else "is empty, and a folder is needed"
            default = "runs" if key == "log.runs_dir" else "~/.cache/mtrain"
            yield Finding(code, key, rule, ({key: default}, {key: f"{text}_folder"}))


def resume_point_exists(run: RunConfig) -> Iterator[Finding]:
    """A run goes on from `latest` or from a folder that exists."""
    resume = run.checkpoint.resume
    if resume is None or resume == "latest":
        return
    path = user_path(resume)
    if not os.path.isdir(path):
        rule = (
            "is a file, and a run folder is needed"
            if os.path.exists(path)
            else "there is no such run or checkpoint folder"
        )
        near: tuple[Change, ...] = tuple({"checkpoint.resume": n} for n in near_files(path) if os.path.isdir(n))
        changes: tuple[Change, ...] = (*near, {"checkpoint.resume": None}, {"checkpoint.resume": "latest"})
        yield Finding("MT433", "checkpoint.resume", rule, changes)


def run_folder_is_free(run: RunConfig) -> Iterator[Finding]:
    """A named run folder that is already there is not written over: the launcher refuses it."""
    if run.log.name is None or run.checkpoint.resume is not None:
        return
    folder = user_path(run.log.runs_dir) / run.log.name
    if os.path.exists(folder):
        free = next(
            f"{run.log.name}-{n}"
            for n in range(2, 10**6)
            if not os.path.exists(folder.parent / f"{run.log.name}-{n}")
        )
        rule = f"{folder} is there already, and training would refuse to write over it"
        fixes: tuple[Change, ...] = ({"log.name": free}, {"checkpoint.resume": str(folder)})
        yield Finding("MT434", "log.name", rule, fixes, "warning")


def something_is_saved(run: RunConfig) -> Iterator[Finding]:
    """Checkpoints that come after the last step never come."""
    c, steps = run.checkpoint, run.trainer.train_iters
    if c.save_interval is not None and c.save_interval > steps and not c.save_final:
        rule = f"a checkpoint every {c.save_interval} steps, of {steps}, and none at the end: nothing is saved"
        fixes: tuple[Change, ...] = ({"checkpoint.save_final": True}, {"checkpoint.save_interval": steps})
        yield Finding("MT435", "checkpoint.save_interval", rule, fixes, "warning")


RULES = (folders_are_folders, resume_point_exists, run_folder_is_free, something_is_saved)
