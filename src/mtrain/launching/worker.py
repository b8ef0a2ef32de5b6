"""The process of one rank: it runs the job, and leaves a record of a failure."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain import startup, strict_json
from mtrain.config.schema.run import RunConfig
from mtrain.errors import (
    BadEnvironment,
    ConfigError,
    CorruptData,
    MtrainError,
    Preempted,
    Problem,
    Related,
    TrainingError,
    say_page,
)
from mtrain.launching.causes import describe
from mtrain.launching.environment import Place, apply, conflicts, environment
from mtrain.launching.limits import raise_files
from mtrain.world.rank_env import End, RankEnv


def enter(run: RunConfig, end: End) -> None:
    """Announce this rank to the others, then import megatron-core for the run's device, which takes
    seconds.

    `end` ends the process if the others refuse it meanwhile.

    Raises:
        BadEnvironment: a variable that the user set would change the run.
    """
    startup.mark(startup.PROCESS if startup.continued() else startup.COMPOSITION)
    ready_environment(run)
    # before the first connection: a rank of a large world needs one for each peer
    raise_files(RankEnv.here().size)
    from mtrain.world import join

    join.announce(run, end)
    from mtrain import mcore as adapter
    from mtrain.devices import registry

    adapter.install(registry.get(run.cluster.device))


def ready_environment(run: RunConfig) -> None:
    """Set the variables that the launcher has not set, before a library that reads them is
    imported.

    Raises:
        BadEnvironment: a variable that the user set would change the run.
    """
    settings = environment(run, place_here(), os.environ)
    apply(settings, os.environ)
    wrong = conflicts(settings)
    if wrong:
        raise BadEnvironment(*wrong)


def place_here() -> Place:
    """Return the place of this rank, as its launcher set it."""
    env = RankEnv.here()
    return Place.here(env.local_size, on_one_machine=env.size == env.local_size)


def record_name(rank: int) -> str:
    """Return the name of the file that records the failure of a rank."""
    return f"rank_{rank:05d}.json"


def run_rank(job: Callable[[], None], errors: Path, rank: int) -> int:
    """Run `job`; return the exit code, after writing a failure to `errors`."""
    try:
        job()
    except Preempted as stop:
        return stop.exit_code
    except BaseException as error:  # the process ends here, whatever the error
        record(error, errors, rank)
        code: int = describe(error)["exit_code"]
        return code
    return 0


def record(error: BaseException, errors: Path, rank: int) -> None:
    """Record how this rank failed, so that the launcher can find the cause."""
    body = describe(error) | {
        "rank": rank,
        "time": time.monotonic(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    try:
        errors.mkdir(parents=True, exist_ok=True)
        # renamed when complete, as the launcher may read the folder at any time
        draft = errors / f".{record_name(rank)}"
        draft.write_text(strict_json.dumps(body))
        draft.replace(errors / record_name(rank))
    except OSError:  # a full disk must not hide the error itself
        with suppress(OSError):
            say_page(f"rank {rank}: {body['kind']}: {body['message']}", error=True)


def end(error: MtrainError, errors: Path, rank: int) -> None:
    """End this process from any thread, leaving a record; its main thread may hang and hold
    Python's locks.
    """
    record(error, errors, rank)
    os._exit(error.exit_code)


def revive(body: dict[str, Any], prefix: str = "") -> MtrainError:
    """Return the error that `describe` described; an unexpected one becomes a training fault."""
    if body["kind"] == "ConfigError":
        return ConfigError([_problem(values) for values in body["problems"]])
    kinds = {error.exit_code: error for error in (BadEnvironment, CorruptData, TrainingError)}
    return kinds.get(body["exit_code"], TrainingError)(*f"{prefix}{body['message']}".split("\n"))


def _problem(values: dict[str, Any]) -> Problem:
    fields = {**values, "related": tuple(Related(**key) for key in values["related"])}
    return Problem(**fields)


def leave(code: int) -> None:
    """End this process now: no destructor may wait for a rank that has ended."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader may have closed the stream
            stream.flush()
    os._exit(code)
