"""The teacher of a run that distils: its model, from the file of its folder, in the layout of the
student.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import (
    RUN_FILE,
    choices_of_group,
    run_folder_of,
    user_path,
)
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.objective import DRAWN, ObjectiveConfig
from mtrain.config.schema.parallel import RecomputeConfig
from mtrain.config.schema.peft import PeftConfig
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import ConfigError

HF_CONFIG = "config.json"
FIX = "a run, a checkpoint or a Hugging Face folder"
MACHINE = Machine(cpu_cores=1, memory_bytes=0)


def teacher_of(run: RunConfig) -> RunConfig | None:
    """Return the run that the teacher of a resolved run is, on the student's ranks; None without
    one, if a file stands for it, or if its folder is not on this machine.

    Raises:
        ConfigError: its configuration cannot be read, or is of a model that is not known here.
        ValueError: its model does not go together with the keys of the student's run.
    """
    name = run.objective.teacher
    if not run.objective.distils or name is None or run.objective.teacher_file is not None:
        return None
    if run.objective.draws:
        choice = name.partition(":")[2]
        return in_layout_of(run, _choice(choice) if choice else run.model)
    file = file_of_teacher(Path(user_path(name)))
    if file is None:
        return None
    stamp = file.stat()
    return in_layout_of(run, _model(file, (stamp.st_mtime_ns, stamp.st_size)))


def has_reward_model(run: RunConfig) -> bool:
    """Return whether a model of rewards judges answers; nobody judges synthetic ones."""
    return run.objective.rolls and run.rollout.scores and run.data.kind == "prompts"


def reward_model_of(run: RunConfig) -> RunConfig | None:
    """Return the run that the model of rewards of a resolved run is, on the policy's ranks; None
    without one, or if its folder is not on this machine.

    Raises as `teacher_of` does.
    """
    name = run.rollout.reward_model
    if not has_reward_model(run) or name is None:
        return None
    file = file_of_teacher(Path(user_path(name)))
    if file is None:
        return None
    stamp = file.stat()
    return in_layout_of(run, _model(file, (stamp.st_mtime_ns, stamp.st_size)))


def other_model_of(run: RunConfig) -> RunConfig | None:
    """Return the run of the frozen model next to that of a resolved run: its teacher, or its model
    of rewards; None without one.

    Raises as `teacher_of` does.
    """
    return teacher_of(run) or reward_model_of(run)


def file_of_teacher(folder: Path) -> Path | None:
    """Return the file with the model of a run folder, of a checkpoint or of a Hugging Face folder;
    None if it has none.
    """
    home = run_folder_of(folder)
    files = (folder / RUN_FILE, home / RUN_FILE, folder / HF_CONFIG)
    return next((file for file in files if os.path.isfile(file)), None)


def _choice(name: str) -> ModelConfig:
    """Return the model of a choice of the group `model`."""
    from mtrain.recipes.delta import section

    if name not in choices_of_group("model"):
        why = f"model={name} is no choice"
        raise ConfigError.of("MT388", "objective.teacher", f"{DRAWN}:{name}", why, FIX)
    model: ModelConfig = section("model", name)  # type: ignore[assignment]
    return model


@lru_cache(maxsize=8)
def _model(file: Path, stamp: tuple[int, ...]) -> ModelConfig:
    if file.name == RUN_FILE:
        return read_run_file(file).model
    # Here: Hydra is only imported where a folder of Hugging Face is read.
    from mtrain.recipes.huggingface.importer import import_config

    return resolve(import_config(file).run, MACHINE).model


def in_layout_of(run: RunConfig, model: ModelConfig) -> RunConfig:
    """Return a run of another model that only runs forward, in the layout and with the kernels and
    samples of `run`.

    Where the stages of `run` do not divide its layers, they hold as equal numbers as possible.
    """
    p = run.parallel
    blocks = p.pp * p.vpp
    size, rest = divmod(model.num_layers, blocks)
    # The first and the last stage have the embedding and the output layer, too.
    larger = [*range(1, blocks - 1), blocks - 1, 0][:rest]
    even = tuple(size + (block in larger) for block in range(blocks))
    parallel = p.model_copy(
        update={
            "pipeline_layout": None,
            "layers_per_stage": even if rest else None,
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "recompute": RecomputeConfig(granularity="none"),
            "fsdp": "none",
            "fsdp_sharding": None,
        }
    )
    sections = dict(run) | {
        "model": model,
        "parallel": parallel,
        "peft": PeftConfig(),
        "objective": ObjectiveConfig(name="reward" if model.head else "next_token"),
        "precision": run.precision.unquantized(run.precision.format),
        "checkpoint": run.checkpoint.model_copy(update={"init_from": None, "resume": None}),
    }
    changed = UnresolvedRun.model_construct(**sections)
    return resolve(UnresolvedRun.model_validate(changed.model_dump()), MACHINE)
