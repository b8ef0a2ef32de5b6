"""The published schemas of Kubernetes, JobSet, Kubeflow and SkyPilot, on rendered jobs.

`python -m tests.support.validators FOLDER` prints, as JSON, file -> the faults of each file with a
job, and what is missing of the packages. Run it with the folder of `make .launch-test` in
PYTHONPATH: these packages bring others that mtrain has in other releases.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

KUBERNETES = "1.37"
PACKAGES = {
    "kubernetes": "kubernetes_validate",
    "trainer": "kubeflow_trainer_api",
    "training": "kubeflow.training",
    "skypilot": "sky",
}
"""Validator -> its package, as it is imported."""
Document = Mapping[str, Any]


def missing() -> dict[str, str]:
    """Return the validators that cannot be imported here, each with the reason."""
    out = {}
    for name, package in PACKAGES.items():
        try:
            _schemas() if name == "skypilot" else importlib.import_module(package)
        except ImportError as error:
            out[name] = f"{package}: {error}"
    return out


def faults(document: Document) -> Iterator[str]:
    """Yield what is wrong with one document of Kubernetes."""
    judge = KINDS.get(document["kind"])
    if judge is None:
        yield f"no validator knows the kind {document['kind']}"
    else:
        yield from judge(document)


def _core(document: Document) -> Iterator[str]:
    """Validate a kind that Kubernetes itself has, refusing unknown fields."""
    validator = importlib.import_module("kubernetes_validate")
    try:
        validator.validate(dict(document), KUBERNETES, strict=True)
    except validator.ValidationError as error:
        yield f"{document['kind']} {list(error.path)}: {error.message}"


def _pod(spec: Document) -> Iterator[str]:
    yield from _core(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": dict(spec)}
    )


def _model(name: str, data: Document) -> Iterator[str]:
    """Validate with a model of Kubeflow's trainer, which drops fields that it does not know."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    try:
        known = getattr(models, name).from_dict(dict(data)).to_dict()
    except ValueError as error:
        yield f"{name}: {error}"
        return
    yield from _dropped(name, data, known)


def _dropped(name: str, data: Document, known: Document) -> Iterator[str]:
    if known != data:
        yield f"{name}: fields that it lacks or adds: {_difference(data, known)}"


def _difference(data: Any, known: Any, path: str = "") -> list[str]:
    if not isinstance(data, dict) or not isinstance(known, dict):
        if isinstance(data, list) and isinstance(known, list) and len(data) == len(known):
            pairs = enumerate(zip(data, known, strict=True))
            return [text for at, two in pairs for text in _difference(*two, f"{path}[{at}]")]
        return [] if data == known else [path]
    return [
        text
        for key in {**data, **known}
        for text in _difference(data.get(key), known.get(key), f"{path}.{key}")
    ]


def _jobset_spec(spec: Document) -> Iterator[str]:
    yield from _model("JobsetV1alpha2JobSetSpec", spec)
    for part in spec["replicatedJobs"]:
        metadata = {"name": part["name"], **part["template"].get("metadata", {})}
        body = part["template"]["spec"]
        yield from _core(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body}
        )
        yield from _pod(body["template"]["spec"])


def _jobset(document: Document) -> Iterator[str]:
    yield from _jobset_spec(document["spec"])


def _runtime(document: Document) -> Iterator[str]:
    yield from _model("TrainerV1alpha1TrainingRuntime", document)
    yield from _jobset_spec(document["spec"]["template"]["spec"])


def _trainjob(document: Document) -> Iterator[str]:
    yield from _model("TrainerV1alpha1TrainJob", document)


def _pytorchjob(document: Document) -> Iterator[str]:
    client = importlib.import_module("kubeflow.training").ApiClient()
    response = SimpleNamespace(data=json.dumps(document))
    try:
        known = client.deserialize(response, "KubeflowOrgV1PyTorchJob")
    except ValueError as error:
        yield f"PyTorchJob: {error}"
        return
    yield from _dropped("PyTorchJob", document, client.sanitize_for_serialization(known))
    for replicas in document["spec"]["pytorchReplicaSpecs"].values():
        yield from _pod({"restartPolicy": "Never", **replicas["template"]["spec"]})


def _rayjob(document: Document) -> Iterator[str]:
    """Validate the pods; KubeRay publishes no schema in a package."""
    cluster = document["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())):
        yield from _pod(group["template"]["spec"])


KINDS: Mapping[str, Callable[[Document], Iterator[str]]] = {
    "ConfigMap": _core,
    "JobSet": _jobset,
    "TrainingRuntime": _runtime,
    "TrainJob": _trainjob,
    "PyTorchJob": _pytorchjob,
    "RayJob": _rayjob,
}


def _schemas() -> ModuleType:
    """Import SkyPilot's schemas without its server, which needs sixty more packages."""
    if "sky" not in sys.modules:
        (file,) = (
            file
            for file in importlib.metadata.files("skypilot") or ()
            if file.as_posix() == "sky/__init__.py"
        )
        package = _stub("sky", __version__=importlib.metadata.version("skypilot"))
        package.__path__ = [str(Path(str(file.locate())).parent)]
        modes = SimpleNamespace(supported_modes=lambda: ["none"])
        _stub("sky.skylet.autostop_lib", AutostopWaitFor=modes)
        daemons = _stub("sky.server.daemons", INTERNAL_REQUEST_DAEMONS=[])
        _stub("sky.server", daemons=daemons, __path__=[])
    return importlib.import_module("sky.utils.schemas")


def _stub(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module
    return module


def task_faults(task: Document) -> Iterator[str]:
    """Yield what SkyPilot refuses of a task."""
    jsonschema = importlib.import_module("jsonschema")
    schemas = _schemas()
    parts = {"task": task, "resources": task["resources"]}
    for name, part in parts.items():
        schema = getattr(schemas, f"get_{name}_schema")()
        for error in jsonschema.Draft7Validator(schema).iter_errors(part):
            yield f"{name} {list(error.path)}: {error.message}"


def main(folder: Path) -> None:
    """Print what is missing, or else the faults of each file of a folder."""
    absent = missing()
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.yaml")) if not absent else ():
        documents = list(yaml.load_all(file.read_text(), yaml.CSafeLoader))
        judge = faults if "kind" in documents[0] else task_faults
        found[file.name] = [fault for document in documents for fault in judge(document)]
    print(json.dumps({"missing": absent, "faults": found}, allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
