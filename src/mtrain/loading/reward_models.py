"""The model of rewards of a run on prompts: refused before the run where it cannot judge.

This module reads configurations, without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import CHECKPOINTS, RUN_FILE, user_path
from mtrain.config.resolve.model_tokenizer import tokenizer_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, Problem, Severity
from mtrain.loading.teachers import in_this_layout
from mtrain.plan.teacher import file_of_teacher, has_reward_model, reward_model_of

KEY = "rollout.reward_model"
FIX = "a run of objective=reward, or a Hugging Face folder of a classifier of one label"


def problems(run: RunConfig, origins: Mapping[str, str], *, to_run: bool = True) -> list[Problem]:
    """Return the problems of the model of rewards of a resolved run, the first kind only: it is
    missing, gives no scores, cannot read answers, or does not run in this layout.
    """
    name = run.rollout.reward_model
    if not has_reward_model(run) or not name:
        return []

    def one(why: str, fix: str = FIX, severity: Severity = "error") -> list[Problem]:
        return [Problem("MT397", KEY, name, why, fix, origins.get(KEY, ""), severity)]

    folder = Path(user_path(name))
    file = file_of_teacher(folder)
    if file is None:
        # A plan may be meant for a machine that has it.
        severity: Severity = "error" if to_run else "warning"
        return one(f"{folder} has no run.yaml and no config.json", FIX, severity)
    try:
        other = reward_model_of(run)
    except (ConfigError, ValueError) as error:
        why = error.problems[0].detail if isinstance(error, ConfigError) else str(error)
        return one(why)
    assert other is not None
    if other.model.head != "value":
        return one(f"it has no value head (model.family={other.model.family})")
    if file.name == RUN_FILE and read_run_file(file).peft.kind is not None:
        return one("the run has adapters", "the folder that `convert export` writes of it")
    home = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    if tokenizer_of(home) is None:
        return one(f"{home} has no tokenizer.json, so that it cannot read answers")
    if not _has_template(home):
        return one(f"{home} has no chat template, so that it cannot read answers")
    if run.parallel.fsdp != "none":
        return one("it is not sharded by FSDP", "parallel.fsdp=none")
    return [each for why in in_this_layout(run, other) for each in one(why, "another layout")]


def _has_template(home: Path) -> bool:
    """Return whether a folder has the chat template of its tokenizer."""
    if (home / "chat_template.jinja").is_file():
        return True
    try:
        body = json.loads((home / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(body, dict) and bool(body.get("chat_template"))
