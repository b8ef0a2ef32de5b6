"""The default length of a run, and its default intervals of evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve import fine_tuning
from mtrain.config.resolve.batches import samples_of, stages, steps_within
from mtrain.config.resolve.fine_tuning import visited_parameters
from mtrain.config.schema.run import RunConfig
from mtrain.units import count

CPU_STEPS = 80
CPU_INTERVAL = 40
"""Steps per minute on two cores with the default model, and with half of it."""
TOKENS_PER_PARAMETER = 20
CHINCHILLA = "Chinchilla (arXiv 2203.15556)"
MINUTES = 30.0
"""Minutes between checkpoints and evaluations on GPUs: a failure then costs half of that on
average.
"""


def is_fine_tuning(run: RunConfig) -> Mapping[str, tuple[Any, str]]:
    """Return whether a run fine-tunes: on chats, or with adapters of a frozen model."""
    if run.trainer.fine_tuning is not None:
        return {}
    chats = run.data.kind in fine_tuning.CHATS
    adapters = run.peft.kind is not None
    if chats or adapters:
        why = f"data.kind {run.data.kind}" if chats else f"peft.kind {run.peft.kind}"
        return {"trainer.fine_tuning": (True, why)}
    return {"trainer.fine_tuning": (False, "neither chats nor adapters")}


def train_iters(run: RunConfig) -> Mapping[str, tuple[Any, str]]:
    """Return the steps: epochs of chats; a minute on a CPU; else 20 tokens per parameter that a
    token visits.
    """
    t = run.trainer
    if t.train_iters is not None:
        return {}
    if t.fine_tuning and (run.data.kind in fine_tuning.CHATS or not _on_host(run)):
        return {"trainer.train_iters": fine_tuning.steps_of(run)}
    if _on_host(run):
        return {"trainer.train_iters": (CPU_STEPS, f"cluster.device {run.cluster.device}")}
    size = visited_parameters(run.model)
    samples = ceil(TOKENS_PER_PARAMETER * size / run.data.length)
    plan = stages(run)
    steps = steps_within(plan, samples)
    steps += samples_of(plan, steps) < samples
    why = (
        f"{TOKENS_PER_PARAMETER} tokens for each of {count(size)} parameters that a token visits:"
        f" {CHINCHILLA}"
    )
    return {"trainer.train_iters": (steps, why)}


def intervals(run: RunConfig) -> Mapping[str, tuple[Any, str]]:
    """Return the steps (on a CPU) or minutes (on GPUs) between evaluations and between
    checkpoints.
    """
    found: dict[str, tuple[Any, str]] = {}
    for section, name in (("trainer", "eval"), ("checkpoint", "save")):
        said = getattr(run, section)
        steps = f"{section}.{name}_interval"
        minutes = f"{section}.{name}_minutes"
        by_time = getattr(said, f"{name}_minutes")
        if getattr(said, f"{name}_interval") is not None:
            continue
        if by_time is not None:
            found[steps] = (0, f"{minutes} {by_time:g}")
        elif _on_host(run):
            found[steps] = (CPU_INTERVAL, f"cluster.device {run.cluster.device}")
        else:
            found[minutes] = (MINUTES, f"cluster.device {run.cluster.device}")
            found[steps] = (0, f"{minutes} {MINUTES:g}")
    return found


def _on_host(run: RunConfig) -> bool:
    return facts_of(run.cluster.device).on_host
