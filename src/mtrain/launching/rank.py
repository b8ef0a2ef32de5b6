"""One rank of a run, in its own interpreter: `python -m mtrain.launching.rank RUN_FOLDER START`.

`START` is the folder of the start file, which is the run's, or one of this machine.

The environment has the number of the rank. The configuration is read from `run.yaml`, and is not
composed again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import RUN_FILE
from mtrain.errors import BadEnvironment, MtrainError, say_page
from mtrain.launching.environment import verify
from mtrain.launching.start import PARENT, read_start
from mtrain.launching.worker import end, leave, place_here, record_name, run_rank
from mtrain.processes import die_with
from mtrain.world.stacks import ERRORS


def perform(home: Path, start: Path, errors: Path, rank: int) -> None:
    """Do the job of the start file in `start` on this rank of the run in `home`.

    Raises:
        BadEnvironment: the start file is missing, it is for another `run.yaml`, or a variable that
            the run needs is not set.
        MtrainError: the error of the job.
    """
    job, digest = read_start(start)
    run = read_run_file(home / RUN_FILE)
    # ranks that train with different configurations would hang, or average unlike gradients
    if run.digest() != digest:
        raise BadEnvironment(
            f"{home / RUN_FILE} was changed after the run was started: its digest is"
            f" {run.digest()[:12]}, and the launcher's was {digest[:12]}",
            "  fix: leave run.yaml as it is while a run starts, and put the run folder where every"
            " machine reads the same files",
        )

    wrong = verify(run, place_here(), os.environ)
    if wrong:
        raise BadEnvironment(*wrong)

    def ended(error: MtrainError, speaks: bool) -> None:
        end(error, errors, rank)

    job.perform(run, home, ended)


def main(words: list[str]) -> None:
    """Run the rank that the environment names, in the run folder `words[0]`, and end the process.

    The last word is the folder of the start file.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher forwards a stop as SIGTERM
    parent = os.environ.pop(PARENT, "")
    if parent.isdigit():
        die_with(int(parent))
    home = Path(words[0])
    text = os.environ.get("RANK", "0")
    rank = int(text) if text.isdigit() else 0
    errors = home / ERRORS
    code = run_rank(lambda: perform(home, Path(words[-1]), errors, rank), errors, rank)
    record = errors / record_name(rank)
    # A launcher other than mtrain's started this rank, and does not read the record.
    if code and not parent and record.is_file():
        say_page(f"rank {rank}: {json.loads(record.read_text())['message']}", error=True)
    leave(code)


if __name__ == "__main__":
    main(sys.argv[1:])
