"""One rank's process: run the job, and leave a record of how it failed."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from mtrain.errors import MtrainError, Preempted

PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "recv timeout",
    "timed out waiting",
    "application timeout caused pair closure",
    "remote process exited",
    "no more data",
)


def record_name(rank: int) -> str:
    """Name of the file that holds how a rank failed."""
    return f"rank_{rank:05d}.json"


def run_rank(job: Callable[[], None], errors: Path, rank: int) -> int:
    """Run `job`; returns the exit code, after writing what went wrong to `errors`."""
    try:
        job()
    except Preempted as stop:
        return stop.exit_code
    except BaseException as error:  # the process ends here, whatever it was
        record(error, errors, rank)
        return error.exit_code if isinstance(error, MtrainError) else 1
    return 0


def record(error: BaseException, errors: Path, rank: int) -> None:
    """Write how this rank failed, for the launcher to tell cause from consequence."""
    text = str(error)
    body = {
        "rank": rank,
        "kind": type(error).__name__,
        "message": text,
        "exit_code": error.exit_code if isinstance(error, MtrainError) else 1,
        "expected": isinstance(error, MtrainError),
        "peer_lost": not isinstance(error, MtrainError) and any(sign in text.lower() for sign in PEER_LOST),
        "time": time.monotonic(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    try:
        errors.mkdir(parents=True, exist_ok=True)
        draft = errors / f".{record_name(rank)}"
        draft.write_text(json.dumps(body))
        draft.replace(errors / record_name(rank))
    except OSError:  # a full disk must not hide the error itself
        sys.stderr.write(body["traceback"] if isinstance(body["traceback"], str) else text)


def leave(code: int) -> None:
    """End this process now: no destructor may wait for a rank that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
