"""Rules of `launch`: what a job needs so that its machines start, and find the run again."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from mtrain.config.machine.devices import CPU, CUDA
from mtrain.config.rules.finding import Finding, each
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

KUBERNETES = "kubernetes"
SKYPILOT = "skypilot"
RAY = "ray"
# SkyPilot's names, by the GPU that a cluster file describes
ACCELERATORS = {
    "a100": "A100-80GB",
    "a100_40g": "A100",
    "a100_40g_pcie": "A100",
    "a100_pcie": "A100-80GB",
    "b200": "B200",
    "b300": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "h100": "H100",
    "h100_nvl": "H100",
    "h100_pcie": "H100",
    "h200": "H200",
    "h200_nvl": "H200",
    "l4": "L4",
    "l40s": "L40S",
    "rtx_4090": "RTX4090",
}


@rule(
    Code(
        "MT470",
        help="Set launch.image to an image in which mtrain is installed.",
        example="launch=kubernetes launch.volumes={/work:training}",
    ),
    reads="launch.image launch.kind",
)
def container_image(run: RunConfig) -> Iterator[Finding]:
    """Cannot make pods because launch.image names no container image."""
    if run.launch.kind == KUBERNETES and run.launch.image is None:
        yield Finding("MT470", "launch.image", hint="launch.image=REGISTRY/NAME:TAG")


@rule(
    Code(
        "MT471",
        help="Set launch.volumes or launch.workdir, so that the run folder lies on shared storage.",
        example="launch=kubernetes launch.image=mtrain:1",
    ),
    reads="launch.volumes launch.workdir launch.kind log.runs_dir",
)
def shared_runs(run: RunConfig) -> Iterator[Finding]:
    """Cannot keep the run folder because no storage that all machines share holds it."""
    launch = run.launch
    if launch.kind not in (KUBERNETES, SKYPILOT, RAY):
        return
    runs = posixpath.join(working_folder(run) or "", run.log.runs_dir)
    if launch.kind == RAY:
        if not runs.startswith("/"):
            yield Finding("MT471", "launch.workdir", runs, hint="launch.workdir=/SHARED/FOLDER")
        return
    place = posixpath.normpath(runs)
    if not any(f"{place}/".startswith(f"{mount}/") for mount in launch.volumes):
        mounts = f"volumes: {', '.join(launch.volumes) or 'none'}"
        hint = "launch.volumes={/work:NAME}"
        yield Finding("MT471", "launch.volumes", f"run folders: {place}; {mounts}", hint=hint)


def working_folder(run: RunConfig) -> str | None:
    """Return the folder in which each machine starts; None: the job decides it."""
    return run.launch.workdir or next(iter(run.launch.volumes), None)


@rule(
    Code(
        "MT472",
        help="Set launch.secret to a Secret of Kubernetes that has a key of each name.",
        example="launch=kubernetes launch.image=mtrain:1 launch.volumes={/work:training}"
        " launch.env=[HF_TOKEN]",
    ),
    reads="launch.env launch.secret launch.kind",
)
def secret_values(run: RunConfig) -> Iterator[Finding]:
    """Cannot pass variables to pods because a manifest holds no values and launch.secret is
    null.
    """
    launch = run.launch
    if launch.kind == KUBERNETES and launch.env and launch.secret is None:
        detail = f"launch.env: {', '.join(launch.env)}"
        yield Finding("MT472", "launch.secret", detail, hint="launch.secret=NAME")


@rule(
    Code(
        "MT473",
        help="Leave checkpoint.resume null: the job continues what it began. To continue a run that"
        " another job began, set log.name to its name and checkpoint.resume=auto.",
        example="launch=ray launch.workdir=/work checkpoint.resume=latest",
    ),
    reads="checkpoint.resume launch.kind",
)
def resumed_job(run: RunConfig) -> Iterator[Finding]:
    """Cannot resume another run because each start of the job, also after a failure, would go back
    to it.
    """
    resume = run.checkpoint.resume
    if run.launch.kind in (KUBERNETES, SKYPILOT, RAY) and resume not in (None, "auto"):
        yield Finding("MT473", "checkpoint.resume", fixes=each("checkpoint.resume", [None, "auto"]))


@rule(
    Code(
        "MT475",
        help="Set launch.accelerator to the name that `sky show-gpus` prints.",
        example="launch=skypilot launch.volumes={/work:training} cluster=h100x8 cluster.name=mine",
    ),
    reads="launch.accelerator launch.kind cluster.name cluster.device",
)
def accelerator_name(run: RunConfig) -> Iterator[Finding]:
    """Cannot request the GPU because SkyPilot's name of it is unknown."""
    if run.launch.kind != SKYPILOT or run.cluster.device == CPU.name:
        return
    if accelerator(run) is None:
        hint = "launch.accelerator=NAME, as `sky show-gpus` prints it"
        yield Finding("MT475", "launch.accelerator", f"cluster {run.cluster.name}", hint=hint)


def accelerator(run: RunConfig) -> str | None:
    """Return SkyPilot's name of the GPU; None: unknown."""
    name = run.cluster.name
    # h100x64 is 64 of h100
    base = name.rpartition("x")[0] if name.rpartition("x")[2].isdigit() else name
    return run.launch.accelerator or ACCELERATORS.get(base)


@rule(
    Code(
        "MT476",
        help="Set launch.resources to what the device's plug-in of Kubernetes provides.",
        example="launch=kubernetes launch.image=mtrain:1 launch.volumes={/work:training}"
        " cluster.device=musa",
    ),
    reads="launch.resources launch.kind cluster.device",
)
def device_resource(run: RunConfig) -> Iterator[Finding]:
    """Cannot request devices for pods because Kubernetes' name of the resource is unknown."""
    device = run.cluster.device
    known = device in (CPU.name, CUDA.name) or any("/" in name for name in run.launch.resources)
    if run.launch.kind == KUBERNETES and not known:
        hint = 'launch.resources={VENDOR/NAME:"8"}'
        yield Finding("MT476", "launch.resources", f"device {device}", hint=hint)


@rule(
    Code(
        "MT477",
        help="Name a PersistentVolumeClaim, which may give access to a bucket.",
        example='launch=kubernetes launch.image=mtrain:1 launch.volumes={/work:"s3://bucket"}',
    ),
    reads="launch.volumes launch.kind",
)
def claimed_volumes(run: RunConfig) -> Iterator[Finding]:
    """Cannot mount a volume because Kubernetes mounts claims, whose names have neither a slash nor
    a scheme.
    """
    for path, source in run.launch.volumes.items():
        if run.launch.kind == KUBERNETES and "/" in source:
            hint = f"launch.volumes={{{path}:CLAIM}}"
            yield Finding("MT477", "launch.volumes", f"{path}: {source}", hint=hint)
