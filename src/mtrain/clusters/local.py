"""Scripts without a scheduler: for this machine, and for each machine under torchrun."""

from __future__ import annotations

from mtrain.clusters import shell
from mtrain.clusters.job import Job

PORT = 29_500


def render_local(job: Job) -> str:
    """Return a script that trains on the machine that runs it."""
    return _script(job, [])


def render_torchrun(job: Job) -> str:
    """Return a script that each machine runs, which finds the first one by MASTER_ADDR."""
    words = ["torchrun", "--nnodes", str(job.machines), "--nproc-per-node", str(job.ranks_each)]
    # torchrun's own start-up of Python would need a script, and launch.command is a program.
    words += ["--rdzv-backend", "c10d", "--no-python", "--rdzv-endpoint"]
    return _script(
        job,
        [
            'if [ -z "${MASTER_ADDR:-}" ]; then',
            '  echo "MASTER_ADDR is not set: export the first machine\'s host name" >&2',
            "  exit 3",
            "fi",
            shell.array("torchrun", words),
            f'words=("${{torchrun[@]}}" "$MASTER_ADDR:${{MASTER_PORT:-{PORT}}}" "${{words[@]}}")',
        ],
    )


def _script(job: Job, around: list[str]) -> str:
    return shell.script(
        shell.head(job),
        shell.begin(job),
        shell.configuration(job),
        [shell.array("words", [*job.words(), *job.first])],
        around,
        shell.prepared(job),
        ['exec "${words[@]}"'],
    )
