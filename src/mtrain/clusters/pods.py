"""Pods of Kubernetes: one for each machine, with a launcher that starts the machine's ranks.

Sources: Kubernetes' reference of PodSpec, and of a Job's `podFailurePolicy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.clusters import shell
from mtrain.clusters.job import Job
from mtrain.clusters.manifest import FOLDER, RUN_FILE, literal, map_name
from mtrain.clusters.variables import JOB
from mtrain.config.machine.devices import CUDA
from mtrain.config.rules.launch import working_folder
from mtrain.errors import BadEnvironment, ConfigError, CorruptData, Preempted

CONTAINER = "node"
"""The name of the container, which the torch runtime of Kubeflow Trainer expects."""
CONFIGURATION = f"{FOLDER}/{RUN_FILE}"
GIB_EACH = 8
"""Shared memory for each rank, in GiB, if `launch.shm_gib` is null."""
# Kubernetes' names of devices
GPUS = {CUDA.name: "nvidia.com/gpu"}
# Exit codes of a run that would fail in the same way again
FINAL = (ConfigError.exit_code, BadEnvironment.exit_code, CorruptData.exit_code)

Part = dict[str, Any]


def words(job: Job) -> list[str]:
    """Return the words that start mtrain in a pod."""
    return [*job.words(CONFIGURATION), *job.first]


def command(job: Job) -> list[str]:
    """Return the command of a container: mtrain itself, behind a shell only for `launch.setup`."""
    if job.launch.setup is None:
        return words(job)
    return ["bash", "-c", shell.SOURCED, "mtrain", job.launch.setup, *words(job)]


def pod(
    job: Job,
    runs: Sequence[str],
    variables: Mapping[str, str] | None = None,
    *,
    container: str = CONTAINER,
    policy: str | None = "Never",
    files: Mapping[str, str] | None = None,
) -> Part:
    """Return the spec of a pod.

    Args:
        job: the run.
        runs: the command; empty: the image's controller sets it.
        variables: further variables, with their values.
        container: the name of the container.
        policy: the restart policy; None: the controller sets it.
        files: the files next to `run.yaml`.
    """
    launch = job.launch
    set_here = {JOB: job.identity, **(variables or {})}
    environment: list[Part] = [
        {"name": name, "value": literal(value)} for name, value in set_here.items()
    ]
    for name in launch.env:
        key = {"name": launch.secret, "key": name}
        environment.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    resources = dict(launch.resources)
    device = GPUS.get(job.run.cluster.device)
    if job.devices_each and device is not None:
        resources.setdefault(device, str(job.devices_each))
    main: Part = {"name": container, "image": launch.image}
    if runs:
        main["command"] = [literal(text) for text in runs]
    folder = working_folder(job.run)
    if folder is not None:
        main["workingDir"] = folder
    main["env"] = environment
    if resources:
        main["resources"] = {"limits": resources}
    mounts, volumes = _storage(job, map_name(job, files))
    main["volumeMounts"] = mounts
    restart = {} if policy is None else {"restartPolicy": policy}
    return {
        **restart,
        "terminationGracePeriodSeconds": launch.grace_s,
        # Training neither calls the cluster nor reads the addresses of its services.
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [main],
        "volumes": volumes,
    }


def _storage(job: Job, configuration: str) -> tuple[list[Part], list[Part]]:
    """Return the mounts of a container and the volumes of its pod."""
    gib = job.launch.shm_gib or GIB_EACH * job.ranks_each
    mounts: list[Part] = [
        {"name": "mtrain-run", "mountPath": FOLDER, "readOnly": True},
        {"name": "mtrain-shm", "mountPath": "/dev/shm"},
    ]
    volumes: list[Part] = [
        {"name": "mtrain-run", "configMap": {"name": configuration}},
        {"name": "mtrain-shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{gib}Gi"}},
    ]
    # One claim may be seen on several folders, and is then one volume.
    known: dict[str, str] = {}
    for path, claim in job.launch.volumes.items():
        if claim not in known:
            known[claim] = f"storage-{len(known)}"
            source = {"persistentVolumeClaim": {"claimName": claim}}
            volumes.append({"name": known[claim], **source})
        mounts.append({"name": known[claim], "mountPath": path})
    return mounts, volumes


def job_spec(job: Job, template: Part) -> Part:
    """Return the spec of a Job with one pod for each machine.

    Any failure ends it, and the owner of the Job restarts all pods; a run that has saved continues
    in new pods, which count for nothing.
    """
    codes: Part = {"containerName": CONTAINER, "operator": "In"}
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "completionMode": "Indexed",
        "completions": job.machines,
        "parallelism": job.machines,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {**codes, "values": list(FINAL)}},
                {"action": "Ignore", "onExitCodes": {**codes, "values": [Preempted.exit_code]}},
                {"action": "Ignore", "onPodConditions": [disrupted]},
            ]
        },
        "template": {"spec": template},
    }


def failure_policy(job: Job) -> Part:
    """Return the failure policy of a JobSet: input that is wrong once is never tried again."""
    return {
        "maxRestarts": job.launch.restarts,
        "rules": [
            {
                "name": "final",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }
