"""The public Python API: what the verbs of the command line do, as functions.

    from mtrain import api

    run = api.load(["model=llama_tiny", "parallel=tp2", "trainer.train_iters=20"])
    print(api.plan(run)["step"])
    folder = api.train(run)
    print(api.generate(folder, ["import "]).texts[0].text)

`load` returns a `Loaded`. Its `raw` is the `UnresolvedRun` that was composed, in which null stands
for values to derive. Its `run` is the resolved `RunConfig`: ranks, batches, rates and all other
values that every run needs are set.

Importing this module does not import torch. `train`, `prove` and `generate` start local processes,
one per rank. Each function raises the errors of `mtrain.errors`, whose `exit_code` is that of the
verb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError
from mtrain.loading import configuration
from mtrain.loading.configuration import Loaded, TooFewDevices
from mtrain.train.generate.request import Request, Sampling, Texts, Written

if TYPE_CHECKING:
    # `check` calls `load` only: what starts ranks is imported by the functions that do
    from mtrain.launching.prove import Comparison, Proof
    from mtrain.world.faults import Fault

__all__ = [
    "Loaded",
    "Sampling",
    "Texts",
    "TooFewDevices",
    "Written",
    "generate",
    "load",
    "plan",
    "prove",
    "train",
]

load = configuration.load
"""Compose, resolve and validate a configuration; see `mtrain.loading.configuration.load`."""


def plan(loaded: Loaded) -> dict[str, Any]:
    """Count parameters, FLOPs, memory and time of a configuration.

    Takes about a second, without torch and without devices.

    Args:
        loaded: a configuration from `load`; `to_run=False` suffices.

    Returns:
        The facts of `mtrain plan --json`: parameters (numbers), memory of a rank of each pipeline
        stage (bytes), time of a step by part (seconds), FLOPs of a token, cost and duration.

    Raises:
        ConfigError: the family of the model cannot be counted.
    """
    from mtrain.plan.report import report

    try:
        return report(loaded.run)
    # `plan` raises a plain ValueError for a family without counts; here it gets its key and a fix.
    except ValueError as error:
        family = loaded.run.model.family
        fix = "a family that can be counted"
        raise ConfigError.of("MT254", "model.family", family, str(error), fix) from None


def train(loaded: Loaded, *, injected: Sequence[Fault] = ()) -> Path:
    """Train a configuration in local processes, to its end.

    Prints progress as `log.progress` sets it. A process that torchrun or another launcher started
    uses the command line instead, because it is one rank of the run.

    Args:
        loaded: a configuration from `load`.
        injected: faults for tests, see `mtrain.world.faults`.

    Returns:
        The run folder, with its checkpoints and metrics.

    Raises:
        ConfigError, BadEnvironment, CorruptData: before any rank starts.
        MtrainError: the error of the first rank that failed.
    """
    from mtrain.launching import local, preflight

    # Before any rank starts: a shortage ends here with its exit code, and leaves no run folder.
    preflight.check(loaded.run, loaded.argv)
    return local.launch(loaded.run, list(loaded.argv), injected)


def prove(
    loaded: Loaded,
    *,
    before: Callable[[RunConfig], None] | None = None,
    after: Callable[[Comparison], None] | None = None,
) -> Proof:
    """Train a layout and one rank from the same weights on the same samples, and compare them.

    Both are shrunk to this machine; see `mtrain.launching.prove.prove`.

    Args:
        loaded: a configuration from `load`.
        before: called with the shrunk run of each number format before it is trained.
        after: called with each comparison.

    Returns:
        The comparisons (relative errors and tolerances of losses, gradient norms, gradients and
        weights), the first module that differs, and modules with wrong dropout.

    Raises:
        ConfigError: the shrunk configuration breaks a rule.
        BadEnvironment: the layout has more ranks than this machine may start.
    """
    from mtrain.launching import prove as proof

    return proof.prove(loaded.run, loaded.argv, before=before, after=after)


def generate(
    folder: Path,
    prompts: Sequence[str],
    *,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    batch: int = 8,
    cache: bool = True,
    overrides: Sequence[str] = (),
) -> Texts:
    """Continue prompts with the newest checkpoint of a run.

    Args:
        folder: the folder of a run, or one of its checkpoints.
        prompts: the texts to continue.
        sampling: how tokens are drawn; by default 64 tokens at a temperature of 0.8.
        stop: texts before which a continuation ends.
        batch: prompts computed together.
        cache: cache keys and values, if the model allows it.
        overrides: settings such as `parallel=tp2`, for another layout, kernel or number format.

    Returns:
        A text for each prompt, in their order, with the number of new tokens and the seconds.

    Raises:
        ConfigError: the folder has no checkpoint or no tokenizer, or the model continues no text.
        BadEnvironment: this machine lacks devices or memory.
        CorruptData: the checkpoint is not as it was written.
    """
    from mtrain.launching import local, preflight
    from mtrain.loading.checkpoints import (
        WITHOUT_DATA,
        beneath,
        relaid,
        require_writing,
        run_file,
        source_of,
    )

    source = source_of(folder, "generate RUN")
    # The run is composed again with the user's overrides, so that the rules judge the new layout,
    # kernels and formats. Its corpus may be gone: only the tokenizer is needed.
    composed = load(
        [
            f"run={run_file(folder)}",
            *beneath([*WITHOUT_DATA, *relaid(folder, overrides)], list(overrides)),
        ]
    )
    configuration.say_replaced(composed)
    require_writing(composed.run)
    preflight.check(composed.run, composed.argv)
    request = Request(tuple(prompts), sampling or Sampling(), tuple(stop), batch, cache)
    return local.generate(composed.run, source, request)
