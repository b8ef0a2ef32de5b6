"""A batch script of SLURM: one task for each machine, a checkpoint before the time limit, and a
requeue that continues.

Sources: `man sbatch`, `man srun`, `man scontrol`, and the README of pyxis.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from mtrain.clusters import shell
from mtrain.clusters.job import AGAIN, Job
from mtrain.errors import Preempted
from mtrain.units import number_of

# Values in a directive are not read by a shell, so the schema admits none that would need quotes.
DIRECTIVES = ("partition", "account", "qos", "time", "segment")
# srun answers TERM with KILL, so SLURM has to send it: to the tasks of a job, but not to its batch
# script. A step that SLURM does not know yet would miss it.
STOP = (
    "stopped=yes",
    'while [ -n "$step" ] && kill -0 "$step" 2>/dev/null; do',
    '  steps=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i || true)',
    '  if [[ "$steps" =~ [.][0-9] ]]; then',
    '    scancel --signal=TERM "$SLURM_JOB_ID" || true',
    "    break",
    "  fi",
    "  sleep 1",
    "done",
)

# Parts of sbatch's messages -> the key that it refuses, and a remedy; `strerror` of SLURM has them
REFUSALS = (
    ("segment", "launch.segment", "launch.segment=null, or a SLURM whose sbatch has --segment"),
    ("invalid account", "launch.account", "an account of sacctmgr show associations user=$USER"),
    ("invalid partition", "launch.partition", "a partition that sinfo lists"),
    ("invalid qos", "launch.qos", "a quality of service that sacctmgr show qos lists"),
    ("time limit", "launch.time", "a time within the limit of sinfo --format='%P %l'"),
    ("node count", "cluster.nodes", "a number of machines that sinfo shows"),
    (
        "node config",
        "cluster.nodes",
        "machines with as many devices as sinfo --format='%D %G' shows",
    ),
)


def render(job: Job) -> str:
    """Return the batch script of a run."""
    return shell.script(
        _directives(job),
        shell.head(job),
        shell.begin(job),
        shell.configuration(job),
        _words(job),
        shell.prepared(job),
        _step(job),
        _ending(),
    )


def _directives(job: Job) -> Iterator[str]:
    launch = job.launch
    options = {
        "job-name": job.name,
        "nodes": job.machines,
        "ntasks-per-node": _tasks(job),
        "gpus-per-node": job.devices_each or None,
        "exclusive": "" if launch.exclusive else None,
        # B: only the batch script, which forwards the signal to its step
        "signal": f"B:TERM@{launch.grace_s}",
        "requeue": "",
        "open-mode": "append",
        **{name: getattr(launch, name) for name in DIRECTIVES},
    }
    for name, value in options.items():
        if value is not None:
            yield f"#SBATCH --{name}" + (f"={value}" if value != "" else "")


def _tasks(job: Job) -> int:
    """Return the number of tasks on each machine."""
    return job.ranks_each if job.launch.tasks == "device" else 1


def _words(job: Job) -> Iterator[str]:
    yield shell.array("words", job.words())
    yield 'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then'
    yield f"  {shell.array('words', [AGAIN], '+=')}"
    if job.first:
        yield "else"
        yield f"  {shell.array('words', job.first, '+=')}"
    yield "fi"
    yield f'if [ "$SLURM_JOB_NUM_NODES" -ne {job.machines} ]; then'
    if job.launch.relayout:
        yield '  words+=("cluster.nodes=$SLURM_JOB_NUM_NODES" parallel=auto)'
    else:
        machines = job.machines
        tasks = machines * _tasks(job)
        text = f"The run needs {number_of(machines, 'machine')}, and the job has another number:"
        restore = f"NumNodes={machines}-{machines} NumTasks={tasks}"
        yield f'  echo "{text} $SLURM_JOB_NUM_NODES. Submit it with launch.relayout=true, or" >&2'
        yield f'  echo "run scontrol update JobId=$SLURM_JOB_ID {restore} before it starts." >&2'
        yield "  exit 3"
    yield "fi"


def _step(job: Job) -> Iterator[str]:
    """Yield the lines that start the ranks, and forward TERM to them."""
    # SLURM would bind the only task of a machine to one core, and end the ranks of all machines as
    # soon as those of the first have saved.
    yield shell.array("srun", ["srun", "--cpu-bind=none", "--kill-on-bad-exit=0"])
    # SLURM_NTASKS keeps its first value when the job gets another number of machines.
    tasks = _tasks(job)
    yield f'srun+=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node={tasks})'
    yield f'srun+=(--ntasks="$((SLURM_JOB_NUM_NODES * {tasks}))")'
    launch = job.launch
    if launch.image is not None:
        yield shell.array("srun", [f"--container-image={launch.image}"], "+=")
        yield f"mounts={shlex.quote(','.join(launch.mounts))}"
        yield 'srun+=("--container-mounts=$PWD:$PWD${mounts:+,$mounts}")'
        yield 'srun+=("--container-workdir=$PWD")'
        if launch.env:
            yield f"names={','.join(launch.env)}"
            yield 'srun+=("--container-env=$names")'
    yield "stopped=no"
    yield from shell.forwarded('"${srun[@]}" "${words[@]}"', STOP)


def _ending() -> Iterator[str]:
    """Yield the lines that requeue a run which has saved a checkpoint and wants to continue."""
    # TERM ends a Python that has not read a line of mtrain yet.
    yield f'[ "$stopped" = no ] || [ "$code" -ne 143 ] || code={Preempted.exit_code}'
    yield f'if [ "$code" -eq {Preempted.exit_code} ]; then'
    # A job that somebody cancels gets TERM as well, and must not come back.
    yield '  state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T || true)'
    yield '  [ "$state" != RUNNING ] || scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'
