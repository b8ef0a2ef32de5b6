"""The library of a CPU's fp32 GEMMs, measured once per machine, the same on all ranks."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.config.compose.lock_file import read_run_file
from mtrain.config.compose.paths import RUN_FILE
from mtrain.config.machine.devices import facts_of
from mtrain.config.machine.installed import cache_folder, version_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import MtrainError
from mtrain.launching.preflight import threads_per_rank

# Results that this process or a child of it measured, in addition to those of the cache
_MEASURED: dict[str, Any] = {}


def chosen(
    run: RunConfig, checkpoint: Path | None = None, measured: dict[str, Any] | None = None
) -> RunConfig:
    """Return `run` with `kernels.cpu_matmul` filled in if it is null: from the checkpoint, or else
    the faster one.

    A resumed run keeps its library, so that it ends bitwise where it would have ended. `measured`
    is the result of `measure` in another process, for a launcher that must not start threads. If it
    is missing, and the cache has no result, this process measures.
    """
    if run.kernels.cpu_matmul not in (None, "auto") or not _applies(run):
        return run
    if measured is not None and _is_entry(measured):
        _MEASURED[_here(run)] = measured
    # the libraries add in different orders, so another one would change the bits of a resumed run
    word = _recorded(checkpoint) or measure(run)["library"]
    return run.model_copy(update={"kernels": run.kernels.model_copy(update={"cpu_matmul": word})})


def reason(run: RunConfig) -> str | None:
    """Return why a run has its library; None if it makes no fp32 products on a CPU."""
    word = run.kernels.cpu_matmul
    if word in (None, "auto"):
        return None
    result = _known().get(_here(run), {})
    if result.get("library") != word:
        return "named, or taken from the checkpoint"
    ratio = result["onednn_over_blas"]
    return f"measured on {processor()}: oneDNN's fp32 products have {ratio:.2f} of the BLAS' rate"


def measure(run: RunConfig) -> dict[str, Any]:
    """Return `library` and `onednn_over_blas`, a ratio of rates, from the cache or measured by this
    process.

    The result is written to the cache if possible. Measuring starts threads, so a process that will
    fork ranks lets a child measure, and passes the child's result to `chosen`.
    """
    known = _known()
    key = _here(run)
    if key not in known:
        import torch
        from mtrain_kernels.linear import faster

        # with the threads of a rank: which library is faster depends on their number
        before = torch.get_num_threads()
        torch.set_num_threads(threads_per_rank(run.parallel.ranks))
        library, ratio = faster()
        torch.set_num_threads(before)
        _MEASURED[key] = {"library": library, "onednn_over_blas": round(ratio, 3)}
        known = _known()
        _keep(known)
    return known[key]


def is_known(run: RunConfig) -> bool:
    """Return whether `run` needs no measurement."""
    return (
        run.kernels.cpu_matmul not in (None, "auto") or not _applies(run) or _here(run) in _known()
    )


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _applies(run: RunConfig) -> bool:
    return facts_of(run.cluster.device).on_host and run.precision.format == "fp32"


def _here(run: RunConfig) -> str:
    return (
        f"{processor()}, {threads_per_rank(run.parallel.ranks)} threads, torch"
        f" {version_of('torch')}"
    )


def _file() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "matmul.json"


def _known() -> dict[str, Any]:
    """Return the results of this machine, measured by this process or earlier."""
    path = _file()
    try:
        cached = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        cached = {}
    kept = {k: v for k, v in cached.items() if _is_entry(v)} if isinstance(cached, dict) else {}
    return kept | _MEASURED


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("library") not in ("blas", "onednn"):
        return False
    return isinstance(value.get("onednn_over_blas"), float)


def _keep(known: dict[str, Any]) -> None:
    """Write the results to the cache; where that is impossible, the next run measures again."""
    path = _file()
    if path is None:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(strict_json.dumps(known, indent=1))
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _recorded(checkpoint: Path | None) -> str | None:
    if checkpoint is None:
        return None
    try:
        word = read_run_file(checkpoint / RUN_FILE).kernels.cpu_matmul
    except (MtrainError, OSError):
        return None
    return None if word == "auto" else word
