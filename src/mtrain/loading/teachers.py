"""The teacher of a run that distils: refused before the run where it cannot teach; and the folder
that a critic starts from.

This module reads configurations and tokenizers, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtrain.config.compose.paths import run_folder_of, user_path
from mtrain.config.resolve.model_tokenizer import model_tokenizer, sha256_of, tokenizer_of
from mtrain.config.rules import findings
from mtrain.config.rules.objectives import ENCODERS
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem, Severity
from mtrain.plan.teacher import FIX, file_of_teacher, teacher_of
from mtrain.plan.teacher_file import KEY as FILE
from mtrain.plan.teacher_file import facts_problems, read_facts

KEY = "objective.teacher"
NAMED = 6
"""Ids that a message names."""
OF_A_TEACHER = ("model.", "parallel.", "kernels.", "precision.", "data.seq_length")
"""Keys whose rules a model that only runs forward may break."""


def problems(run: RunConfig, origins: Mapping[str, str], *, to_run: bool = True) -> list[Problem]:
    """Return the problems of the teacher of a resolved run, the first kind only: it is missing, has
    another vocabulary, or does not run in this layout.
    """
    if run.objective.criticises:
        return _of_critic(run, origins, to_run=to_run)
    name = run.objective.teacher
    if run.objective.distils and run.objective.teacher_file is not None:
        return _of_a_file(run, origins, to_run=to_run)
    if not run.objective.distils or not name:
        return []

    def one(code: str, why: str, fix: str, severity: Severity = "error") -> list[Problem]:
        return [Problem(code, KEY, name, why, fix, origins.get(KEY, ""), severity)]

    folder = None if run.objective.draws else Path(user_path(name))
    if folder is not None and file_of_teacher(folder) is None:
        why = f"{folder} has no run.yaml and no config.json"
        # A plan may be meant for a machine that has it.
        severity: Severity = "error" if to_run else "warning"
        return one("MT388", why, FIX, severity)
    try:
        teacher = teacher_of(run)
    except (ConfigError, ValueError) as error:
        why = error.problems[0].detail if isinstance(error, ConfigError) else str(error)
        return one("MT388", why, FIX)
    assert teacher is not None
    if apart := different_ids(run, teacher, folder):
        return one("MT389", apart, "a teacher with the student's tokenizer")
    wrong = in_this_layout(run, teacher)
    if teacher.model.family in ENCODERS or teacher.model.head:
        what = f"model.family={teacher.model.family} model.head={teacher.model.head}"
        wrong = [f"{what}: it is no decoder that writes text"]
    return [each for why in wrong for each in one("MT391", why, "another layout")]


def _of_a_file(run: RunConfig, origins: Mapping[str, str], *, to_run: bool) -> list[Problem]:
    """Return the problems of `objective.teacher_file`, as far as its facts show them."""
    assert run.objective.teacher_file is not None
    try:
        facts = read_facts(Path(user_path(run.objective.teacher_file)))
    except ConfigError as error:
        # A plan may be meant for a machine that has it.
        severity: Severity = "error" if to_run else "warning"
        origin = origins.get(FILE, "")
        return [replace(one, source=origin, severity=severity) for one in error.problems]
    return facts_problems(run, facts, origins.get(FILE, ""))


def _of_critic(run: RunConfig, origins: Mapping[str, str], *, to_run: bool) -> list[Problem]:
    key = "objective.critic"
    name = run.objective.critic
    if name is None or file_of_teacher(folder := Path(user_path(name))) is not None:
        return []
    why = f"{folder} has no run.yaml and no config.json"
    severity: Severity = "error" if to_run else "warning"
    return [Problem("MT374", key, name, why, FIX, origins.get(key, ""), severity)]


def in_this_layout(run: RunConfig, teacher: RunConfig) -> list[str]:
    """Return the rules that the teacher breaks in this layout, and the student does not."""
    own = {(found.code, found.path) for found in findings(run)}
    return [
        f"{found.path}: {found.rule}"
        for found in findings(teacher)
        if found.severity == "error"
        and (found.code, found.path) not in own
        and found.path.startswith(OF_A_TEACHER)
    ]


def different_ids(run: RunConfig, teacher: RunConfig, folder: Path | None) -> str:
    """Return how the vocabularies of student and teacher differ, or "".

    Tokenizers are compared where both are known, and otherwise numbers of ids.
    """
    mine = run.model.loss_vocab_size
    theirs = teacher.model.loss_vocab_size
    sizes = f"the teacher has {theirs} ids, the student {mine}" if mine != theirs else ""
    file = user_path(run.data.tokenizer) if run.data.tokenizer else model_tokenizer(run)
    if folder is None:
        return sizes
    home = run_folder_of(folder)
    other = tokenizer_of(home)
    if file is None or other is None or not Path(file).is_file():
        return sizes
    if sha256_of(Path(file)) == sha256_of(other):
        return sizes
    own = _tokens(Path(file))
    known = _tokens(other)
    apart = sorted(i for i in own.keys() | known.keys() if own.get(i) != known.get(i))
    if not apart:
        return sizes
    shown = ", ".join(
        f"{i} ({known.get(i, 'none')!r} there, {own.get(i, 'none')!r} here)" for i in apart[:NAMED]
    )
    more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
    return "; ".join(filter(None, (sizes, f"ids that differ: {shown}{more}")))


def _tokens(file: Path) -> dict[int, str]:
    """Return the token of each id of a tokenizer.json."""
    body: Any = json.loads(file.read_text(encoding="utf-8"))
    model = body.get("model") or {}
    held = model.get("vocab") or {}
    pairs = held.items() if isinstance(held, dict) else ((t[0], i) for i, t in enumerate(held))
    added = ((token["content"], token["id"]) for token in body.get("added_tokens") or ())
    return {number: token for token, number in (*pairs, *added)}
