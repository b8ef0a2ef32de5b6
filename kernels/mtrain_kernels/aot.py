"""Ahead-of-time compilation of every kernel for GPUs that are absent: registers, shared memory,
spills and access widths of each binary.

Each op launches its kernels on meta tensors (`Op.launch`). A stand-in for Triton's driver names the
target, so the types, alignments, constants, warps and stages are those of a launch on that GPU.

`python -m mtrain_kernels.aot [op ...] [--models llama3_8b,...]
[--archs 90] [--once] [--json]` prints the table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mtrain_kernels import sass
from mtrain_kernels.compilations import targeting
from mtrain_kernels.registry import MODELS, ops

# Bytes that a block may use, by compute capability.
SHARED_LIMIT = {
    80: 163 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
}
# Spilled bytes per thread that are accepted: they come from a row of 16,384 columns.
SPILLS = {("wide_backward_kernel", 100): 16}


@dataclass(frozen=True)
class Row:
    """One compiled kernel: registers per thread, shared memory per block, spilled bytes per thread,
    a tile's work.

    `variant` numbers the compilations of one kernel. `accesses` counts the tile's accesses of
    global memory by bits a lane, `issue` and `memory` are cycles; see `sass`.
    """

    op: str
    model: str
    kernel: str
    arch: int
    warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    accesses: dict[int, int] = field(default_factory=dict)
    issue: int = 0
    memory: int = 0
    variant: int = 0

    def faults(self) -> list[str]:
        """List the faults of the binary as sentences; empty without faults."""
        where = f"{self.op} {self.kernel} sm_{self.arch} ({self.model})"
        found = []
        if self.spill_bytes > SPILLS.get((self.kernel, self.arch), 0):
            found.append(f"{where} spills {self.spill_bytes} bytes a thread")
        if self.shared_bytes > SHARED_LIMIT[self.arch]:
            limit = SHARED_LIMIT[self.arch]
            found.append(
                f"{where} needs {self.shared_bytes} bytes of shared memory; a block has {limit}"
            )
        return found


@contextmanager
def _compile_only(arch: int, compiled: dict[str, Any], once: bool) -> Iterator[None]:
    """Turn each launch, or with `once` the first of each kernel, into a compilation for `arch`,
    kept by hash.
    """
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if once and self.__name__ in {name for name, _ in compiled.values()}:
            return None
        # A warm-up compiles without a launch, so meta tensors suffice.
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        # Launches that differ only in sizes share a binary, which counts once.
        compiled.setdefault(kernel.hash, (self.__name__, kernel))
        return kernel

    JITFunction.run = compile_
    try:
        with targeting(arch):
            yield
    finally:
        JITFunction.run = run


def compile_op(name: str, model: str, arch: int, once: bool = False) -> list[Row]:
    """Compile every kernel that the op launches at a model's shape, for one compute capability
    (80, 90, 100).

    With `once`, the first variant of each.

    Raises `RuntimeError` under Triton's interpreter, which compiles nothing.
    """
    from mtrain_kernels.runtime import interpreted

    if interpreted():
        raise RuntimeError("ahead-of-time compilation needs a process without TRITON_INTERPRET")
    compiled: dict[str, Any] = {}
    with _compile_only(arch, compiled, once):
        ops()[name].launch(MODELS[model])
    variants = Counter[str]()
    rows = []
    for kernel_name, kernel in compiled.values():
        found = (
            kernel.metadata.num_warps,
            *_resources(kernel),
            *_work(kernel, arch),
            variants[kernel_name],
        )
        rows.append(Row(name, model, kernel_name, arch, *found))
        variants[kernel_name] += 1
    return rows


def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin"


def _work(kernel: Any, arch: int) -> tuple[dict[int, int], int, int]:
    """Return widths of accesses, issue cycles and memory cycles of a tile of a compiled kernel."""
    found = sass.read(
        kernel.asm["cubin"], kernel.asm["ttgir"], kernel.metadata.num_warps, arch, _tools()
    )
    return found.accesses, found.issue, found.memory


def _resources(kernel: Any) -> tuple[int, int, int]:
    """Return registers, shared bytes and spilled bytes (stack and local memory) of a compiled
    kernel, from its binary.
    """
    tool = _tools() / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        # Another process reads the file by its name.
        file.flush()
        said = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return usage["REG"], kernel.metadata.shared, usage["STACK"] + usage["LOCAL"]


def _attempt(name: str, model: str, arch: int, once: bool) -> list[Row] | str:
    try:
        return compile_op(name, model, arch, once)
    except Exception as error:  # one op that does not compile must not hide what the others need
        cause: BaseException = error
        # a fault inside a called function is hidden under the caller's
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return (
            f"{name} does not compile for sm_{arch} ({model}): {error}\n{type(cause).__name__}:"
            f" {cause}"
        )


def compile_all(
    names: Iterable[str] = (),
    models: Iterable[str] = (),
    archs: Iterable[int] = (80, 90, 100),
    processes: int = 2,
    once: bool = False,
) -> tuple[list[Row], list[str]]:
    """Compile ops (all) at models (each op's `aot_models`) for every arch, in processes; return
    rows and faults.

    With `once`, the first variant of each kernel.
    """
    models = list(models)
    jobs = [
        (name, model, arch, once)
        for name in list(names) or ops()
        for model in models or ops()[name].aot_models
        for arch in archs
        if arch >= ops()[name].oldest
    ]
    # forked processes have all that is imported here
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        found = list(pool.map(_attempt, *zip(*jobs, strict=True)))
    rows = [row for part in found if not isinstance(part, str) for row in part]
    faults = [part for part in found if isinstance(part, str)] + [
        fault for row in rows for fault in row.faults()
    ]
    return (
        sorted(rows, key=lambda row: (row.op, row.kernel, row.variant, row.model, row.arch)),
        faults,
    )


def table(rows: list[Row]) -> str:
    """Return the rows as text, one kernel and target a line."""
    head = (
        f"{'op':<16} {'kernel':<28} {'model':<14} {'arch':>6} warps registers shared(B) spilled(B)"
    )
    lines = [f"{head}  issue memory  accesses"]
    lines += [
        f"{r.op:<16} {r.kernel:<28} {r.model:<14} {f'sm_{r.arch}':>6} {r.warps:>5} {r.registers:>9}"
        f" {r.shared_bytes:>9} {r.spill_bytes:>10} {r.issue:>6} {r.memory:>6}  {accesses(r)}"
        for r in rows
    ]
    return "\n".join(lines)


def accesses(row: Row) -> str:
    """Return bits per lane and the number of accesses with them, as `128 x 4, 16 x 1`."""
    return ", ".join(
        f"{bits} x {count}"
        for bits, count in sorted(row.accesses.items(), key=lambda i: -int(i[0]))
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the table and every fault; the exit code is 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m mtrain_kernels.aot", description=__doc__)
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--models", type=lambda text: text.split(","), default=[])
    parser.add_argument(
        "--archs", type=lambda text: [int(a) for a in text.split(",")], default=list(SHARED_LIMIT)
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--once", action="store_true", help="the first variant of each kernel")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of the table")
    chosen = parser.parse_args(arguments)
    start = time.perf_counter()
    rows, faults = compile_all(
        chosen.ops, chosen.models, chosen.archs, chosen.processes, chosen.once
    )
    found = {
        "triton": importlib.metadata.version("triton"),
        "rows": [asdict(r) for r in rows],
        "faults": faults,
    }
    print(json.dumps(found) if chosen.json else table(rows))
    print(
        f"{len(rows)} binaries in {time.perf_counter() - start:.1f} s",
        *faults,
        sep="\n",
        file=sys.stderr,
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
