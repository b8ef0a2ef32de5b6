"""YAML of other systems: an emitter that no text can leave, and the parts of a Kubernetes manifest.

Sources: the YAML 1.1 and 1.2 specifications (a word that either reads as something else is quoted),
and Kubernetes' "Define Environment Variables for a Container" for `$(NAME)`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from mtrain.clusters import shell
from mtrain.clusters.job import Job
from mtrain.errors import ConfigError

FOLDER = "/etc/mtrain"
"""The folder of a pod with the files of its ConfigMap."""
RUN_FILE = "run.yaml"
MOST_BYTES = 1 << 20
"""The largest ConfigMap that Kubernetes stores."""
QUEUE = "kueue.x-k8s.io/queue-name"
# A scalar that no version of YAML reads as anything but this text
_PLAIN = re.compile(
    r"(?!(?i:y|n|yes|no|on|off|true|false|null|nan|inf)\Z)[A-Za-z/][A-Za-z0-9_./-]*\Z"
)

Document = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes every text except plain words."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts out: other readers may refuse anchors."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"'
    if _PLAIN.match(text):
        style = ""
    elif text.endswith("\n"):
        # PyYAML quotes a text that a literal block would change.
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def emitted(job: Job, stream: Iterable[Document]) -> str:
    """Return documents as a YAML stream below comments with the digest of the run."""
    body = yaml.dump_all(
        stream,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        width=1 << 20,
        explicit_start=True,
    )
    return "\n".join([*shell.head(job), body])


def documents(text: str, *, only: str | None = None, but: str | None = None) -> str:
    """Return the documents of a stream of `emitted` of one kind, or of all other kinds."""
    _, *bodies = re.split(r"^---$", text, flags=re.MULTILINE)
    kept = [body for body in bodies if (f"\nkind: {only or but}\n" in body) == (only is not None)]
    return "".join(f"---{body}" for body in kept)


def literal(text: str) -> str:
    """Return a text that Kubernetes' expansion of `$(NAME)` turns back into it."""
    return text.replace("$", "$$")


def named(job: Job, kind: str, version: str, spec: Mapping[str, Any]) -> Document:
    """Return the document of a job, with its namespace and queue."""
    metadata = _metadata(job, job.name)
    if job.launch.queue is not None:
        metadata["labels"] = {QUEUE: job.launch.queue}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": dict(spec)}


def configuration(job: Job, files: Mapping[str, str] | None = None) -> Document:
    """Return the ConfigMap with `run.yaml`, and other files.

    Its name changes with its contents, so that pods of a running job never see another run.

    Raises:
        ConfigError: it is larger than Kubernetes stores.
    """
    data = {RUN_FILE: job.yaml, **(files or {})}
    size = sum(len(name.encode()) + len(text.encode()) for name, text in data.items())
    if size > MOST_BYTES:
        detail = f"{size} bytes, at most {MOST_BYTES}"
        fix = "launch=slurm, or leave long lists out of the configuration"
        raise ConfigError.of("MT474", "launch.kind", job.launch.kind, detail, fix)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, map_name(job, files)),
        "immutable": True,
        "data": data,
    }


def map_name(job: Job, files: Mapping[str, str] | None = None) -> str:
    """Return the name of the ConfigMap."""
    content = "\0".join([job.yaml, *(text for _, text in sorted((files or {}).items()))])
    return f"{job.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _metadata(job: Job, name: str) -> dict[str, Any]:
    place = {"namespace": job.launch.namespace} if job.launch.namespace is not None else {}
    return {"name": name, **place}
