"""Jobs of Ray: a script for `ray job submit`, and the files of a RayJob.

Ray only places one process on each machine, which starts the machine's ranks. `ray_job` is the
program that places them.

Sources: Ray's documentation of `ray job submit` and of placement groups.
"""

from __future__ import annotations

from pathlib import Path

from mtrain import strict_json
from mtrain.clusters import shell
from mtrain.clusters.job import Job
from mtrain.clusters.manifest import FOLDER, RUN_FILE
from mtrain.clusters.variables import JOB
from mtrain.config.rules.launch import working_folder

PROGRAM = "ray_job.py"
SETTINGS = "job.json"
PLACE = "FILE"
"""The file of the configuration in the words of a job; the program replaces it."""
ENTRY_POINT = f"python {FOLDER}/{PROGRAM}"
"""Command of a RayJob."""
END_OF_PROGRAM = "END_OF_RAY_JOB_PY"
END_OF_SETTINGS = "END_OF_JOB_JSON"


def files(job: Job) -> dict[str, str]:
    """Return the files next to `run.yaml`: the program, and its commands for each machine."""
    run = [*job.words(PLACE), *job.first]
    if job.launch.setup is not None:
        run = ["bash", "-c", shell.SOURCED, "mtrain", job.launch.setup, *run]
    settings = {
        "machines": job.machines,
        "devices": job.devices_each,
        "folder": working_folder(job.run),
        "needed": job.launch.env,
        "variables": {JOB: job.identity},
        "words": run,
    }
    program = Path(__file__).with_name(PROGRAM).read_text(encoding="utf-8")
    return {PROGRAM: program, SETTINGS: strict_json.dumps(settings, indent=1) + "\n"}


def render(job: Job) -> str:
    """Return a script that submits a run to the Ray cluster of RAY_ADDRESS, and follows it."""
    texts = files(job)
    return shell.script(
        shell.head(job),
        [
            "set -euo pipefail",
            # Ray copies the folder to the cluster, and runs the entry point in the copy.
            "folder=$(mktemp -d)",
            "trap 'rm -rf \"$folder\"' EXIT",
        ],
        shell.here_document(f'"$folder/{RUN_FILE}"', job.yaml, shell.END),
        shell.here_document(f'"$folder/{PROGRAM}"', texts[PROGRAM], END_OF_PROGRAM),
        shell.here_document(f'"$folder/{SETTINGS}"', texts[SETTINGS], END_OF_SETTINGS),
        [f'ray job submit --working-dir "$folder" -- python {PROGRAM}'],
    )
