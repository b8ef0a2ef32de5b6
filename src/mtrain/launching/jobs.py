"""The jobs of a rank, by name: forked and executed ranks run the same function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from mtrain.config.schema.run import RunConfig
from mtrain.launching.worker import enter
from mtrain.train.generate.request import Questions, Request, Sampling
from mtrain.world import faults
from mtrain.world.rank_env import End, RankEnv

# The name of the job that trains, whose folder is a run's
TRAIN = "train"


@dataclass(frozen=True)
class Job:
    """The job of the ranks of a run, as values that JSON can hold."""

    name: str
    """A key of `JOBS`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, **arguments: Any) -> Job:
        """Return a job with JSON arguments: paths as text, dataclasses as mappings."""
        return cls(name, {key: _plain(value) for key, value in arguments.items()})

    def perform(self, run: RunConfig, home: Path, end: End) -> None:
        """Do the job in the run's folder `home`; `end` ends a process that hangs."""
        JOBS[self.name](run, home, end, **self.arguments)


# The job that trains one step and writes the masks for `dropout_compare.wrong_masks`
MASKS = Job("observe_masks")


def _train(
    run: RunConfig,
    home: Path,
    end: End,
    checkpoint: str | None,
    weights: str | None,
    accept_changes: bool,
    injected: Sequence[str],
    known: int,
) -> None:
    faults.arm(injected, RankEnv.here().rank)
    # run.yaml does not record this key, which concerns a single start of the run.
    resumed = run.checkpoint.model_copy(update={"accept_changes": accept_changes})
    run = run.model_copy(update={"checkpoint": resumed})
    enter(run, end)
    from mtrain.train.run import Paths, train

    paths = Paths(home, _path(checkpoint), _path(weights))
    if run.resilience.in_process:
        from mtrain.launching.in_process import train_with_restarts

        train_with_restarts(run, paths, end, injected, known)
        return
    train(run, lambda world: paths, end)


def _observe(run: RunConfig, home: Path, end: End, **how: bool) -> None:
    enter(run, end)
    from mtrain.train.verify import prove

    prove.observe(run, home, **how)


def _observe_masks(run: RunConfig, home: Path, end: End) -> None:
    enter(run, end)
    from mtrain.train.verify import dropout_probe

    dropout_probe.observe_masks(run, home)


def _generate(
    run: RunConfig,
    home: Path,
    end: End,
    checkpoint: str,
    tokenizer: str,
    output: str,
    request: Mapping[str, Any],
) -> None:
    enter(run, end)
    from mtrain.train.generate.write import write

    texts = {name: tuple(request[name]) for name in ("prompts", "stop")}
    values = {**request, **texts, "sampling": Sampling(**request["sampling"])}
    write(run, Path(checkpoint), Path(tokenizer), Request(**values), Path(output))


def _evaluate(
    run: RunConfig,
    home: Path,
    end: End,
    checkpoint: str,
    tokenizer: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    enter(run, end)
    from mtrain.train.generate import evaluation

    evaluation.evaluate(run, Path(checkpoint), _path(tokenizer), limit, as_json)


def _answer(
    run: RunConfig,
    home: Path,
    end: End,
    checkpoint: str,
    tokenizer: str,
    questions: Mapping[str, Any],
    as_json: bool,
) -> None:
    enter(run, end)
    from mtrain.train.generate import harness

    values = {**questions, "tasks": tuple(questions["tasks"])}
    rebuilt = Questions(**values)
    harness.answer(run, Path(checkpoint), Path(tokenizer), rebuilt, as_json)


def _logits(
    run: RunConfig, home: Path, end: End, checkpoint: str, ids: list[int], out: str
) -> None:
    enter(run, end)
    from mtrain.train.run import logits

    logits(run, Path(checkpoint), ids, Path(out))


def _bisect(
    run: RunConfig,
    home: Path,
    end: End,
    checkpoint: str | None,
    out: str,
    step: int,
    usual: Sequence[float],
) -> None:
    enter(run, end)
    from mtrain.train.suspects.bisect import bisect

    bisect(run, _path(checkpoint), step, usual, Path(out))


def _distil(run: RunConfig, home: Path, end: End, out: str) -> None:
    enter(run, end)
    from mtrain.train.teacher_file import write

    write(run, Path(out))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value


def path_text(path: Path | None) -> str | None:
    """Return a path as text for JSON, or None."""
    return None if path is None else str(path)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


# Name -> the function that a rank runs, called with the run, its folder, the function that ends the
# process, and the arguments.
JOBS: dict[str, Callable[..., None]] = {
    TRAIN: _train,
    "observe": _observe,
    "observe_masks": _observe_masks,
    "generate": _generate,
    "evaluate": _evaluate,
    "answer": _answer,
    "logits": _logits,
    "bisect": _bisect,
    "distil": _distil,
}
