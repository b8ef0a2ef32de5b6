"""The certificate of a conversion: tensors of both sides, their hashes, and the steps between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.durable import sync

FILE = "conversion.json"
FORMAT = 1
PACKAGES = ("mtrain", "torch", "safetensors", "megatron-core", "transformers")
Held = tuple[str, Sequence[int], str]
"""Number format, shape and sha256 of a tensor's bytes."""


@dataclass
class Record:
    """The tensors that a conversion read and wrote, by name, and the steps between them."""

    source: dict[str, Held] = field(default_factory=dict)
    target: dict[str, Held] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    copies: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def add(self, other: Record) -> None:
        """Add the tensors and steps of another record."""
        self.source |= other.source
        self.target |= other.target
        self.steps += other.steps

    def note_read(self, reader: Any, match: Any) -> None:
        """Add the tensors that a `Reader` has read, and the steps of a `Match`."""
        held = reader.folder.tensors
        self.source |= {
            n: (held[n].dtype, held[n].shape, sha256) for n, sha256 in reader.hashes.items()
        }
        for step in match.steps:
            # a weight in fewer bits is first decoded, then the step runs
            words = [step.operation.name, *{reader.decoding(name) for name in step.theirs} - {""}]
            theirs = [part for name in step.theirs for part in reader.parts(name)]
            self.steps.append(
                {"theirs": theirs, "operation": ", ".join(reversed(words)), "ours": list(step.ours)}
            )
        self.copies = match.copies
        self.ignored = match.ignored


def write(path: Path, direction: str, kind: str, record: Record, logits: Mapping[str, Any]) -> None:
    """Write `conversion.json` into the folder `path`, with the result of comparing logits."""
    body = {
        "format": FORMAT,
        "direction": direction,
        "model_type": kind,
        "versions": versions(),
        "logits": dict(logits),
        "steps": record.steps,
        "copies": record.copies,
        "ignored": list(record.ignored),
        "source": {name: _held(held) for name, held in sorted(record.source.items())},
        "target": {name: _held(held) for name, held in sorted(record.target.items())},
    }
    (path / FILE).write_text(strict_json.dumps(body, indent=1) + "\n")
    sync(path / FILE)


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that a conversion may depend on."""
    out = {}
    for name in PACKAGES:
        try:
            out[name] = metadata.version(name)
        # a conversion may run without torch and transformers
        except metadata.PackageNotFoundError:
            continue
    return out


def _held(held: Held) -> dict[str, Any]:
    dtype, shape, sha256 = held
    return {"dtype": dtype, "shape": list(shape), "sha256": sha256}
