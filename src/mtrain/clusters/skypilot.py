"""A task of SkyPilot: the same script on each machine, of which each starts its ranks.

Sources: SkyPilot's references of the task's YAML and of its environment variables.
"""

from __future__ import annotations

from typing import Any

from mtrain.clusters import shell
from mtrain.clusters.job import Job
from mtrain.clusters.manifest import emitted
from mtrain.config.rules.launch import accelerator, working_folder
from mtrain.errors import Preempted


def render(job: Job) -> str:
    """Return the task of a run."""
    launch = job.launch
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.machines,
        "resources": _resources(job),
    }
    storage = {path: source for path, source in launch.volumes.items() if "://" in source}
    if storage:
        task["file_mounts"] = {
            path: {"source": source, "mode": "MOUNT"} for path, source in storage.items()
        }
    volumes = {path: source for path, source in launch.volumes.items() if path not in storage}
    if volumes:
        task["volumes"] = volumes
    if launch.env:
        # null: SkyPilot refuses to start unless `--secret NAME` gives the value
        task["secrets"] = dict.fromkeys(launch.env)
    task["run"] = shell.script(
        shell.begin(job, working_folder(job.run)),
        shell.configuration(job),
        [shell.array("words", [*job.words(), *job.first])],
        shell.prepared(job),
        ['exec "${words[@]}"'],
    )
    return emitted(job, [task])


def _resources(job: Job) -> dict[str, Any]:
    launch = job.launch
    resources: dict[str, Any] = {}
    if launch.infra is not None:
        resources["infra"] = launch.infra
    if job.devices_each:
        resources["accelerators"] = f"{accelerator(job.run)}:{job.devices_each}"
    if launch.image is not None:
        resources["image_id"] = f"docker:{launch.image}"
    if launch.spot:
        resources["use_spot"] = True
    # Lost machines are replaced in any case. Of the failures, only a saved run is started again.
    recovery = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [Preempted.exit_code]}
    resources["job_recovery"] = recovery
    return resources
