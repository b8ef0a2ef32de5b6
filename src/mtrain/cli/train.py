"""`train`: start a run here, or be one rank of it under torchrun, srun, mpirun or their like."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mtrain import api
from mtrain.api import Loaded, load
from mtrain.cli.check import length_in_words
from mtrain.cli.output import refusal
from mtrain.config.compose.paths import program
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.errors import ConfigError, MtrainError, Problem, message, say, say_page, warn
from mtrain.launching import torchrun
from mtrain.launching.worker import leave
from mtrain.object_store import is_remote
from mtrain.units import number_of
from mtrain.world import faults
from mtrain.world.faults import Fault
from mtrain.world.launchers import Launched

TAKEN = "MT434"


def train(
    words: list[str],
    *,
    multirun: bool,
    as_json: bool,
    restarts: str | None,
    inject: str | None,
    debug: bool,
) -> int:
    """Train one configuration, or with -m every combination."""
    words = [*words, *_restarting(restarts)]
    if multirun:
        from mtrain.cli import multirun as sweep

        if inject is not None:
            raise refusal("--inject: a sweep takes no faults", "train, without -m")
        return sweep.train(words, debug=debug, as_json=as_json)
    return run(words, debug=debug, injected=_faults(inject))


def _restarting(restarts: str | None) -> list[str]:
    return [] if restarts is None else [f"resilience.restarts={restarts}"]


def _faults(text: str | None) -> tuple[Fault, ...]:
    try:
        return () if text is None else faults.parse(text)
    except ValueError as error:
        raise refusal(f"--inject: {error}", "--inject FAULT@STEP[:RANK]") from None


def resume(words: list[str], *, restarts: str | None, inject: str | None, debug: bool) -> int:
    """Train on with the configuration in a run folder, under the further words.

    Raises:
        ConfigError: no folder is given, or it is neither a run nor a checkpoint.
    """
    from mtrain.loading.checkpoints import beneath, quoted, relaid, run_file, target_of

    usage = f"{program()} resume runs/<name> [overrides]"
    target, overrides = target_of([*words, *_restarting(restarts)], "resume", usage)
    # The run of an address gets its own folder.
    place = Path(words[0]) if not is_remote(words[0]) else words[0]
    given = [f"run={run_file(target)}", f"checkpoint.resume={quoted(place)}"]
    words = [*given, *beneath(relaid(target, overrides), overrides)]
    return run(words, debug=debug, injected=_faults(inject))


def run(argv: list[str], *, debug: bool, injected: Sequence[Fault] = ()) -> int:
    """Train what `argv` describes; return the exit code."""
    place = torchrun.here()
    # srun with one task a machine starts no ranks: mtrain does, as torchrun would.
    if place is not None and place.one_a_machine:
        return _as_machine(argv, place, injected)
    if place is not None:
        faults.arm(map(str, injected), place.rank)
        return _as_worker(argv, place, debug)
    composed = load(argv)
    _warn(composed)
    if stray := torchrun.unused_variable():
        warn(stray)
    folder = api.train(composed, injected=injected)
    # Without words this is somebody's first run.
    if not argv:
        say(*next_steps(folder))
    return 0


def next_steps(folder: Path) -> list[str]:
    """Return the next commands after a first run."""
    steps = (
        ("data=text data.path=FOLDER", "train on text of your own"),
        (f'generate {folder} prompt="import"', "text from what was trained"),
        (
            f"resume {folder} trainer.train_iters=400 checkpoint.accept_changes=true",
            "train it for longer",
        ),
        (
            "check model=llama3_8b cluster=h100x8",
            "validate a large model, without starting anything",
        ),
        ("plan recipe=llama3/70b_h100x64", "its memory and time"),
        ("help", "everything else"),
    )
    width = max(len(words) for words, _ in steps)
    return ["", "next:", *(f"  {program()} {words:<{width}}  {what}" for words, what in steps)]


def _warn(composed: Loaded) -> None:
    """Report warnings, and the length of the run where it was derived, and not a laptop's."""
    run = composed.run
    derived = run.trainer.fine_tuning or not facts_of(run.cluster.device).on_host
    if derived and (length := length_in_words(composed)):
        say(f"trainer.train_iters={run.trainer.steps}{length}")
    for warning in composed.warnings:
        # the process that makes the run folder reports it as an error
        if warning.code != TAKEN:
            say_page(warning.render(), error=True)


def _refuse_restarts(run: RunConfig, place: Launched) -> None:
    """Refuse restarts of a run whose ranks this process does not start, or not all of them."""
    restarts = run.resilience.restarts
    if restarts:
        instead = "restarts=0, and torchrun --max-restarts=N or another start of the job"
        fix = f"resilience.{instead} with checkpoint.resume=auto"
        detail = f"{place.launcher}, {number_of(place.size, 'task')}"
        raise ConfigError([Problem("MT437", "resilience.restarts", restarts, detail, fix)])


def _as_machine(argv: list[str], place: Launched, injected: Sequence[Fault]) -> int:
    """Start the ranks of this machine, as the one process that a scheduler started on it."""
    from mtrain.launching import directed, preflight

    def compose(machines: int) -> RunConfig:
        composed = load(argv, machines=machines)
        ranks_here = max(1, composed.run.parallel.ranks // machines)
        preflight.check(composed.run, argv, ranks_here=ranks_here)
        _warn(composed)
        return composed.run

    return directed.launch(place, argv, injected, compose)


def _as_worker(argv: list[str], place: Launched, debug: bool) -> int:
    """Train as a rank of another launcher; after a failure tell the others, and end the process at
    once.

    Rank 0 composes and prints the warnings, and the first rank of each machine checks that machine.
    """
    from mtrain.launching import preflight

    machine = _machine(place)

    def compose() -> RunConfig:
        composed = load(argv, machine, machines=place.size // place.local_size)
        _refuse_restarts(composed.run, place)
        if torchrun.rank() == "0":
            _warn(composed)
        return composed.run

    try:
        chosen = torchrun.shared_config(argv, compose)
        # Every rank would find the same faults of the machine.
        if torchrun.is_first_here():
            preflight.check(chosen, argv, machine, ranks_here=torchrun.ranks_here())
        return torchrun.train(chosen, argv)
    except BaseException as error:
        expected = isinstance(error, MtrainError | KeyboardInterrupt)
        if torchrun.is_for_this_rank(error, known=torchrun.report_to_others(error)):
            if debug or not expected:
                traceback.print_exc()
            text = message(error) if isinstance(error, MtrainError) else str(error)
            say_page(f"rank {torchrun.rank()}: {text}", error=True)
        code = getattr(error, "exit_code", 130 if expected else 1)
        # At an ordinary exit a destructor could wait for a rank that has ended.
        leave(code)
        raise


def _machine(place: Launched) -> Machine:
    """Return this machine with the devices of all tasks, of which each may see only its own."""
    machine = Machine.here()
    if place.launcher != "torchrun" and machine.gpus == 1 and place.local_size > 1:
        return replace(machine, gpus=place.local_size)
    return machine
