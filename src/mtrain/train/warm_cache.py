"""Records of the binaries that a run's kernels needed, in Triton's cache, for the next start.

A record belongs to a shape of run: the keys that decide its kernels, the GPU's generation, the
sources of the kernels and the versions of torch and Triton. It is a hint: missing, stale and
damaged entries are compiled at their launch, as without a record.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import Any

from mtrain_kernels.compilations import Launch, recorded

from mtrain import strict_json
from mtrain.config.schema.run import RunConfig

VARIABLE = "MTRAIN_WARMED"
"""The variable with the file of the report about compilation ahead of the launches."""
FOLDER = "mtrain-launches"
SECTIONS = ("model.", "precision.", "kernels.", "parallel.")
KEYS = (
    "cluster.device",
    "cluster.sm",
    "data.kind",
    "data.seq_length",
    "data.micro_batch_size",
    "objective.name",
    "optim.name",
    "trainer.cuda_graph_impl",
    "trainer.deterministic",
    "trainer.micro_batch_size",
)
"""Keys outside of `SECTIONS` that decide which kernels run; a missing one costs a compilation."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of Triton's cache."""
    if folder := environment.get("TRITON_CACHE_DIR"):
        return Path(folder)
    home = environment.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(home) / ".triton" / "cache"


def record_file(run: RunConfig, stage: int, environment: Mapping[str, str]) -> Path:
    """Return the file of the record of a pipeline stage of runs like this one."""
    flat = run.flat()
    facts = {key: value for key, value in flat.items() if key.startswith(SECTIONS) or key in KEYS}
    body = strict_json.dumps([facts, stage, _versions(), _sources()], sort_keys=True, default=str)
    name = hashlib.sha256(body.encode()).hexdigest()[:32]
    return cache_folder(environment) / FOLDER / f"{name}.json"


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "pytorch-triton"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@functools.cache
def _sources() -> str:
    """Return a digest of the kernels' sources: Triton compiles an edited kernel anew."""
    found = util.find_spec("mtrain_kernels")
    assert found is not None
    digest = hashlib.sha256()
    for root in found.submodule_search_locations or ():
        for file in sorted(Path(root).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def read(path: Path) -> list[Launch] | None:
    """Return the launches of a record; None if there is none, or it is damaged."""
    try:
        found = [Launch(**one) for one in json.loads(path.read_text())["launches"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = all(isinstance(value, str) for one in found for value in asdict(one).values())
    return found if whole and found else None


def known(run: RunConfig, stages: Iterable[int], given: Mapping[str, str]) -> list[Launch] | None:
    """Return the recorded launches of pipeline stages, without repetitions; None if a record is
    missing or damaged. `given` is the environment of the ranks.
    """
    found: dict[tuple[str, str], Launch] = {}
    for stage in stages:
        record = read(record_file(run, stage, given))
        if record is None:
            return None
        found |= {(one.kernel, one.data): one for one in record}
    return list(found.values())


def write(path: Path, launches: Iterable[Launch]) -> None:
    """Write a record; readers see it whole. Without an effect where the folder is not writable."""
    text = strict_json.dumps({"launches": [asdict(one) for one in launches]}, indent=1)
    _replace(path, text)


def keep(run: RunConfig, stage: int) -> None:
    """Record the kernels that this process has launched so far, for the next start."""
    launches = recorded()
    path = record_file(run, stage, os.environ)
    if launches and read(path) != launches:
        write(path, launches)


def tell(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report of a compilation ahead, for `told`."""
    _replace(path, strict_json.dumps(report))


def told(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the report of the compilation ahead of this run; None without one. While it goes on,
    the report says only that it has not ended.
    """
    path = environment.get(VARIABLE)
    if path is None:
        return None
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        report = None
    return report if isinstance(report, dict) else {"ended": False}


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(path)
    except OSError:  # the next start is slower
        draft.unlink(missing_ok=True)
