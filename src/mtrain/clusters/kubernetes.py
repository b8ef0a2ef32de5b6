"""Manifests of Kubernetes: a ConfigMap with the run, and a JobSet, TrainJob, PyTorchJob or RayJob.

Sources: the API references of JobSet, Kubeflow Trainer, the Kubeflow training operator (version 1)
and KubeRay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mtrain.clusters import placement, shell
from mtrain.clusters.job import Job
from mtrain.clusters.manifest import Document, configuration, emitted, map_name, named
from mtrain.clusters.pods import CONTAINER, Part, command, failure_policy, job_spec, pod, words
from mtrain.clusters.variables import MACHINE, MACHINES
from mtrain.errors import Preempted

TRAINJOB = "TrainJob"
RUNTIME = "TrainingRuntime"
TRAINER = "trainer.kubeflow.org"
# The training operator restarts pods that end with 128 or more, as after a signal.
RESTARTED = 143
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10_001}


def render(job: Job) -> str:
    """Return the manifest of a run.

    Raises:
        ConfigError: the configuration does not fit into a ConfigMap.
    """
    return emitted(job, KINDS[job.launch.resource](job))


def _jobset(job: Job) -> list[Document]:
    # The first pod of the only Job, by the name that the headless service of the JobSet gives it.
    first = f"{job.name}-{CONTAINER}-0-0.{job.name}"
    variables = {"JOB_COMPLETIONS": str(job.machines), "MASTER_ADDR": first}
    spec = _set_of(job, pod(job, command(job), variables))
    spec["network"] = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return [configuration(job), named(job, "JobSet", "jobset.x-k8s.io/v1alpha2", spec)]


def _set_of(job: Job, template: Part, labels: Mapping[str, str] | None = None) -> Part:
    """Return the spec of a JobSet with one Job."""
    metadata = {"metadata": {"labels": dict(labels)}} if labels else {}
    return {
        "failurePolicy": failure_policy(job),
        "replicatedJobs": [
            {
                "name": CONTAINER,
                "replicas": 1,
                "template": {**metadata, "spec": job_spec(job, template)},
            }
        ],
    }


def _trainjob(job: Job) -> list[Document]:
    """Return a runtime that describes the pods, and the TrainJob that names it."""
    name = map_name(job)
    # Kubeflow's torch runtime numbers the pods, and sets PET_NNODES and PET_MASTER_ADDR.
    role = {f"{TRAINER}/trainjob-ancestor-step": "trainer"}
    runtime = {
        "mlPolicy": {"numNodes": job.machines, "torch": {}},
        "template": {"spec": _set_of(job, pod(job, command(job)), role)},
    }
    settings = configuration(job)
    labels = {"labels": {f"{TRAINER}/framework": "torch"}}
    spec = {
        "runtimeRef": {"apiGroup": TRAINER, "kind": RUNTIME, "name": name},
        "trainer": {"numNodes": job.machines},
    }
    return [
        settings,
        {
            "apiVersion": f"{TRAINER}/v1alpha1",
            "kind": RUNTIME,
            "metadata": {**settings["metadata"], **labels},
            "spec": runtime,
        },
        named(job, TRAINJOB, f"{TRAINER}/v1alpha1", spec),
    ]


def _pytorchjob(job: Job) -> list[Document]:
    """Return a PyTorchJob, whose pods with exit code 75 the training operator restarts."""
    script = "\n".join(
        [
            "set -euo pipefail",
            f'export {MACHINE}="$RANK" {MACHINES}="$WORLD_SIZE"',
            # They number pods here, and would number ranks.
            "unset RANK WORLD_SIZE",
            shell.array("words", words(job)),
            *shell.prepared(job),
            *shell.forwarded('"${words[@]}"'),
            f'[ "$code" -ne {Preempted.exit_code} ] || code={RESTARTED}',
            'exit "$code"',
            "",
        ]
    )
    template = pod(job, ["bash", "-c", script], container="pytorch", policy=None)
    replicas = {"Master": 1, "Worker": job.machines - 1}
    spec = {
        "runPolicy": {"cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": {
            role: {
                "replicas": count,
                "restartPolicy": "ExitCode",
                "template": {"spec": template},
            }
            for role, count in replicas.items()
            if count
        },
    }
    return [configuration(job), named(job, "PyTorchJob", "kubeflow.org/v1", spec)]


def _rayjob(job: Job) -> list[Document]:
    """Return a RayJob whose cluster has a pod for each machine: the head and its workers."""
    files = placement.files(job)
    template = pod(job, [], container="ray", policy=None, files=files)
    (container,) = template["containers"]
    container["ports"] = [{"containerPort": port, "name": name} for name, port in PORTS.items()]
    group = {"rayStartParams": {}, "template": {"spec": template}}
    cluster: Part = {
        "headGroupSpec": {**group, "rayStartParams": {"dashboard-host": "0.0.0.0"}},
    }
    others = job.machines - 1
    if others:
        size = {"replicas": others, "minReplicas": others, "maxReplicas": others}
        cluster["workerGroupSpecs"] = [{"groupName": "machines", **size, **group}]
    spec = {
        "entrypoint": placement.ENTRY_POINT,
        "shutdownAfterJobFinishes": True,
        # It cannot tell exit codes apart, so nothing would keep invalid input from a second try.
        "backoffLimit": 0,
        "rayClusterSpec": cluster,
    }
    return [configuration(job, files), named(job, "RayJob", "ray.io/v1", spec)]


KINDS: Mapping[str, Callable[[Job], list[Document]]] = {
    "jobset": _jobset,
    "trainjob": _trainjob,
    "pytorchjob": _pytorchjob,
    "rayjob": _rayjob,
}
