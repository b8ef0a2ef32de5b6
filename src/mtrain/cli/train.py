"""`train`: start a run here, or be one rank of it under torchrun."""

from __future__ import annotations

import sys
import traceback

from mtrain.cli.setup import load
from mtrain.config.run import RunConfig
from mtrain.errors import BadEnvironment, BadInput, MtrainError
from mtrain.launching import torchrun
from mtrain.launching.worker import leave

TAKEN = "MT434"


def run(argv: list[str], *, debug: bool) -> int:
    """Train what `argv` describes; returns the exit code."""
    composed = load(argv)
    if torchrun.is_worker():
        return _as_worker(composed.run, argv, debug)
    from mtrain.launching import local, preflight

    preflight.check(composed.run, argv)
    for warning in composed.warnings:
        if warning.code != TAKEN:  # the launcher says it as an error
            print(warning.render(), file=sys.stderr)
    local.launch(composed.run, argv)
    return 0


def _as_worker(configured: RunConfig, argv: list[str], debug: bool) -> int:
    """As a rank of somebody else's launcher: ends the process at once after a failure."""
    try:
        return torchrun.train(configured, argv)
    except BaseException as error:
        expected = isinstance(error, MtrainError | KeyboardInterrupt)
        if debug or not expected:
            traceback.print_exc()
        if not isinstance(error, BadInput | BadEnvironment) or torchrun.rank() == 0:
            print(f"rank {torchrun.rank()}: {error}", file=sys.stderr)
        leave(error.exit_code if isinstance(error, MtrainError) else 130 if expected else 1)
        raise
