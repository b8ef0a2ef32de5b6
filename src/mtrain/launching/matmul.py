"""Which library makes the fp32 products of a CPU: measured once per machine, the same on all ranks."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.config.devices import facts_of
from mtrain.config.paths import RUN_FILE
from mtrain.config.run import RunConfig
from mtrain.config.run_file import read_run_file
from mtrain.errors import MtrainError
from mtrain.launching.preflight import threads_per_rank


def chosen(run: RunConfig, checkpoint: Path | None = None, found: dict[str, Any] | None = None) -> RunConfig:
    """`run` with `kernels.cpu_matmul` filled in where it is null: as in the checkpoint, else what is faster here.

    `found` is what `measure` returned in another process; None: the cache has it, or this process measures.

    A run goes on with the library that it began with, so that it ends bitwise where it would have ended.
    """
    if run.kernels.cpu_matmul not in (None, "auto") or not _applies(run):
        return run
    word = _recorded(checkpoint) or (found or measure(run))["library"]
    return run.model_copy(update={"kernels": run.kernels.model_copy(update={"cpu_matmul": word})})


def reason(run: RunConfig) -> str | None:
    """Why the library of a run is taken; None where it multiplies in no fp32 on a CPU."""
    word = run.kernels.cpu_matmul
    if word in (None, "auto"):
        return None
    found = _cache().get(_here(run), {})
    if found.get("library") != word:
        return "named, or taken from the checkpoint"
    return f"measured on {processor()}: oneDNN's fp32 products have {found['onednn_over_blas']:.2f} of the BLAS' rate"


def measure(run: RunConfig) -> dict[str, Any]:
    """`library` and `onednn_over_blas`, a ratio of rates: from the cache, or measured now by this process."""
    cache, key = _cache(), _here(run)
    if key not in cache:
        import torch
        from mtrain_kernels.linear import faster

        before = torch.get_num_threads()
        torch.set_num_threads(threads_per_rank(run.parallel.ranks or 1))
        library, ratio = faster()
        torch.set_num_threads(before)
        cache[key] = {"library": library, "onednn_over_blas": round(ratio, 3)}
        _keep(cache)
    return cache[key]


def is_known(run: RunConfig) -> bool:
    """Whether nothing needs to be measured for `run`."""
    return run.kernels.cpu_matmul not in (None, "auto") or not _applies(run) or _here(run) in _cache()


def processor() -> str:
    """This machine's processor, as it names itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _applies(run: RunConfig) -> bool:
    return facts_of(run.cluster.device).on_host and run.precision.format == "fp32"


def _here(run: RunConfig) -> str:
    return f"{processor()}, {threads_per_rank(run.parallel.ranks or 1)} threads, torch {metadata.version('torch')}"


def _file() -> Path:
    root = os.environ.get("MTRAIN_CACHE", "")
    return (Path(root) if root else Path("~/.cache/mtrain")).expanduser() / "matmul.json"


def _cache() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if _is_entry(v)} if isinstance(found, dict) else {}


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("library") not in ("blas", "onednn"):
        return False
    return isinstance(value.get("onednn_over_blas"), float)


def _keep(cache: dict[str, Any]) -> None:
    path = _file()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(strict_json.dumps(cache, indent=1))
        draft.replace(path)
    except OSError:  # measured again the next time
        draft.unlink(missing_ok=True)


def _recorded(checkpoint: Path | None) -> str | None:
    if checkpoint is None:
        return None
    try:
        word = read_run_file(checkpoint / RUN_FILE).kernels.cpu_matmul
    except (MtrainError, OSError):
        return None
    return None if word == "auto" else word
