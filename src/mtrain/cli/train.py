"""`train`: start a run here, or be one rank of it under torchrun."""

from __future__ import annotations

import sys
import traceback

from mtrain.cli.setup import load
from mtrain.errors import MtrainError
from mtrain.launching import torchrun
from mtrain.launching.worker import leave


def run(argv: list[str], *, debug: bool) -> int:
    """Train what `argv` describes; returns the exit code."""
    composed = load(argv)
    if torchrun.is_worker():
        return _as_worker(composed.run, argv, debug)
    from mtrain.launching import local, preflight

    preflight.check(composed.run, argv)
    for warning in composed.warnings:
        print(warning.render(), file=sys.stderr)
    local.launch(composed.run, argv)
    return 0


def _as_worker(configured: object, argv: list[str], debug: bool) -> int:
    try:
        return torchrun.train(configured, argv)  # type: ignore[arg-type]
    except BaseException as error:
        if debug or not isinstance(error, MtrainError):
            traceback.print_exc()
        print(f"rank {torchrun.rank()}: {error}", file=sys.stderr)
        leave(error.exit_code if isinstance(error, MtrainError) else 1)
        raise
