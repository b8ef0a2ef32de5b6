"""The record of every compiled kernel, which must not get worse: `compiled.json` and the table in
the README.

`python -m mtrain_kernels.compiled [op ...] [--triton FOLDER]` compiles with the installed Triton,
or with the one in a folder, and writes both files anew, or the rows of the ops named; a change for
the worse so stands in the difference of a commit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtrain_kernels.aot import Row, accesses

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "compiled.json"
README = ROOT / "README.md"
ARCHS = (90, 100)
MARKS = ("<!-- compiled -->", "<!-- /compiled -->")
SLACK = 1.03  # of registers and cycles


def compile_apart(
    archs: Iterable[int] = ARCHS,
    models: Iterable[str] = (),
    triton: Path | None = None,
    names: Iterable[str] = (),
    processes: int = 2,
) -> Any:
    """Return the output of `mtrain_kernels.aot --json` for ops (all) in another process, with the
    Triton in a folder if given.
    """
    paths = [str(ROOT), *([str(triton)] if triton else []), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # Tests set it, and interpreted kernels compile to nothing.
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable,
        "-m",
        "mtrain_kernels.aot",
        *names,
        "--json",
        "--archs",
        ",".join(map(str, archs)),
    ]
    command += ["--processes", str(processes), *(["--models", ",".join(models)] if models else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    # The exit code also reports faults of kernels, which are in the output; only without any output
    # did the process fail.
    if not done.stdout:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def name_of(row: Row) -> str:
    """Return the name that a row is recorded under."""
    return f"{row.op}/{row.kernel}.{row.variant}/{row.model}/sm_{row.arch}"


def narrow(row: Row) -> float:
    """Return the share of the tile's bytes that goes through accesses of 8 or 16 bits a lane."""
    bits = {int(width): int(width) * count for width, count in row.accesses.items()}
    return sum(n for width, n in bits.items() if width < 32) / max(1, sum(bits.values()))


def numbers(row: Row) -> dict[str, float]:
    """Return the recorded figures of a row."""
    return {
        "registers": row.registers,
        "spilled": row.spill_bytes,
        "shared": row.shared_bytes,
        "narrow": round(narrow(row), 3),
        "issue": row.issue,
        "memory": row.memory,
    }


def worse(rows: Iterable[Row], version: str) -> list[str]:
    """List the figures that are worse than the record of this version of Triton; empty for a
    version without a record.
    """
    record = json.loads(RECORD.read_text()).get(version)
    found = []
    for row in rows if record is not None else ():
        name = name_of(row)
        now = numbers(row)
        if name not in record:
            found.append(f"{name} is not recorded: run python -m mtrain_kernels.compiled")
            continue
        before = record[name]
        for key in ("registers", "spilled", "narrow", "issue"):
            # `narrow` is a share that is often zero, for which a relative slack would allow
            # nothing.
            if now[key] > before[key] * SLACK + (0.01 if key == "narrow" else 0):
                found.append(f"{name}: {key} {before[key]} -> {now[key]} with triton {version}")
    return found


def table(rows: Iterable[Row]) -> str:
    """Return the rows as Markdown, a kernel a line; in bold where its instructions take longer than
    its memory.
    """
    kernels: dict[tuple[str, str, int, str], dict[int, Row]] = {}
    for row in rows:
        kernels.setdefault((row.op, row.kernel, row.variant, row.model), {})[row.arch] = row
    head = [
        "op",
        "kernel",
        "shape",
        "warps",
        "registers",
        "spilled",
        "shared",
        "bits a lane x accesses",
    ]
    head += [f"sm_{arch} issue / memory" for arch in ARCHS]
    lines = [head, ["---"] * 3 + ["---:"] * 4 + ["---"] + ["---:"] * len(ARCHS)]
    for (op, kernel, _, model), targets in kernels.items():
        both = [targets[arch] for arch in ARCHS if arch in targets]
        figures = ("registers", "spill_bytes", "shared_bytes")
        shown = [" / ".join(str(getattr(row, figure)) for row in both) for figure in figures]
        cycles = [_cycles(targets.get(arch)) for arch in ARCHS]
        lines.append([op, kernel, model, str(both[0].warps), *shown, accesses(both[0]), *cycles])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def merged(before: str, now: str, names: Iterable[str]) -> str:
    """Return the table `before` with the lines of the ops `names` taken from `now`; all of `now`
    for no names.
    """
    if not (chosen := set(names)):
        return now
    head, rule, *lines = before.strip().splitlines()
    kept = [line for line in lines if _op(line) not in chosen]
    return "\n".join([head, rule, *sorted(kept + now.splitlines()[2:], key=_op)])


def _op(line: str) -> str:
    return line.split("|")[1].strip()


def _cycles(row: Row | None) -> str:
    if row is None or not row.memory:
        return ""
    said = f"{row.issue:,} / {row.memory:,}"
    return f"**{said}**" if row.issue > row.memory else said


def main(arguments: list[str] | None = None) -> int:
    """Write the record, and the table for the installed Triton; the exit code is 1 if a kernel
    does not do.
    """
    parser = argparse.ArgumentParser(prog="python -m mtrain_kernels.compiled", description=__doc__)
    parser.add_argument("ops", nargs="*", help="whose rows are written anew; all without")
    parser.add_argument("--triton", type=Path, help="the folder of another Triton")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args(arguments)
    found = compile_apart(triton=chosen.triton, names=chosen.ops, processes=chosen.processes)
    rows = [Row(**row) for row in found["rows"]]
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    others = record.get(found["triton"], {}) if chosen.ops else {}
    kept = {
        name: figures
        for name, figures in others.items()
        if name.partition("/")[0] not in chosen.ops
    }
    record[found["triton"]] = kept | {name_of(row): numbers(row) for row in rows}
    lines = json.dumps(record, indent=1, sort_keys=True)
    RECORD.write_text(lines + "\n")
    if chosen.triton is None:
        before, _, rest = README.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        shown = merged(rest.partition(MARKS[1])[0], table(rows), chosen.ops)
        README.write_text(f"{before}{MARKS[0]}\n{shown}\n{MARKS[1]}{after}")
    print(f"{len(rows)} kernels with triton {found['triton']}", *found["faults"], sep="\n")
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
