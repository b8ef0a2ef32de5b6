"""`train`: start a run here, or be one rank of it under torchrun."""

from __future__ import annotations

import traceback

from mtrain.cli.setup import load
from mtrain.config.compose import Composed
from mtrain.errors import MtrainError, message, say_page, warn
from mtrain.launching import torchrun
from mtrain.launching.worker import leave

TAKEN = "MT434"


def run(argv: list[str], *, debug: bool) -> int:
    """Train what `argv` describes; returns the exit code."""
    if torchrun.is_worker():
        return _as_worker(argv, debug)
    from mtrain.launching import local, preflight

    composed = load(argv)
    preflight.check(composed.run, argv)
    _warn(composed)
    if stray := torchrun.stray():
        warn(stray)
    local.launch(composed.run, argv)
    return 0


def _warn(composed: Composed) -> None:
    for warning in composed.warnings:
        if warning.code != TAKEN:  # whoever makes the run folder says it as an error
            say_page(warning.render(), error=True)


def _as_worker(argv: list[str], debug: bool) -> int:
    """As a rank of somebody else's launcher: after a failure tells the others, and ends the process at once.

    The first rank of each machine looks whether the machine can run it, and rank 0 prints the warnings.
    """
    from mtrain.launching import preflight

    try:
        composed = load(argv)
        if torchrun.is_first_here():
            preflight.check(composed.run, argv, ranks_here=torchrun.ranks_here())
        if torchrun.rank() == "0":
            _warn(composed)
        return torchrun.train(composed.run, argv)
    except BaseException as error:
        expected = isinstance(error, MtrainError | KeyboardInterrupt)
        if torchrun.is_for_this_rank(error, known=torchrun.tell_others(error)):
            if debug or not expected:
                traceback.print_exc()
            text = message(error) if isinstance(error, MtrainError) else str(error)
            say_page(f"rank {torchrun.rank()}: {text}", error=True)
        leave(error.exit_code if isinstance(error, MtrainError) else 130 if expected else 1)
        raise
