"""The first hour with a GPU as one command, without a network: what is right, how fast, where the gaps are.

    python kernels/bench/first_touch.py [--out first_touch] [--stages parity,ops] [--budget 540] [--again]
    python kernels/bench/first_touch.py --dry-run     # walks all of it on a CPU: tiny shapes, Triton's interpreter

Each stage is a process of its own with a time limit, and its units have one each. Every result is a line of JSON in
OUT/results.jsonl as soon as it is there, so that a call which is cut off loses nothing and the next one goes on
(`--again` begins anew). A stage that dies or takes too long ends with that as the result of what it was doing, and
goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

LIMITS_S = {
    "environment": 60,
    "parity": 900,
    "autotune": 900,
    "ops": 1800,
    "train": 1800,
    "rivals": 1200,
    "profile": 300,
}
"""Stages in their order, and how long one may take."""
UNIT_LIMITS_S = {
    "environment": 60,
    "parity": 120,
    "autotune": 240,
    "ops": 240,
    "train": 420,
    "rivals": 300,
    "profile": 120,
}
"""How long a unit of a stage may take: one that hangs does not cost the others their time."""
STUCK = 124
"""Exit code of a stage that was ended because a unit took longer."""
POISONED = 3
"""Exit code of a stage whose device does not answer any more: a new process goes on."""


class Results:
    """The lines of OUT/results.jsonl: `stage`, `unit`, and `result`, `error` or `skipped`; a unit is done once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "results.jsonl"

    def lines(self) -> Iterator[dict[str, Any]]:
        """All of them; the last may be cut off."""
        for text in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                yield json.loads(text)
            except ValueError:
                continue

    def size(self) -> int:
        """Bytes that are written."""
        return self.path.stat().st_size if self.path.exists() else 0

    def done(self, stage: str) -> set[str]:
        """Units of a stage that need not be done again."""
        ends = ("result", "error", "skipped")
        return {line["unit"] for line in self.lines() if line["stage"] == stage and any(end in line for end in ends)}

    def open(self, stage: str) -> str | None:
        """The unit that a stage began last, if it has no end."""
        begun = self._begun(stage)
        return begun[-1] if begun and begun[-1] not in self.done(stage) else None

    def tries(self, stage: str, unit: str) -> int:
        """How often a unit was begun."""
        return self._begun(stage).count(unit)

    def _begun(self, stage: str) -> list[str]:
        return [line["unit"] for line in self.lines() if line["stage"] == stage and line.get("begin")]

    def add(self, stage: str, unit: str, **said: Any) -> None:
        """One more line, on disk when this returns."""
        before = b""
        if self.path.exists() and self.path.stat().st_size:  # a line that was cut off ends here
            with self.path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                before = b"" if file.read() == b"\n" else b"\n"
        with self.path.open("ab") as file:
            file.write(before + json.dumps({"stage": stage, "unit": unit, **said}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True)
class Walk:
    """What all stages are told: whether it is a dry run, and how many models and ops of them."""

    dry: bool
    ops: tuple[str, ...]

    def words(self) -> list[str]:
        """The same on a command line."""
        return [*(["--dry-run"] if self.dry else []), *(["--ops", ",".join(self.ops)] if self.ops else [])]


def run_stage(stage: str, results: Results, walk: Walk) -> int:
    """Does the units of a stage that have no result, in this process; the exit code."""
    import first_touch_stages as stages
    from run import last_line

    for unit, work in stages.UNITS[stage](walk, results.folder).items():
        if unit in results.done(stage):
            continue
        results.add(stage, unit, begin=True)
        start = time.perf_counter()
        try:
            said = {"result": work()}
        except stages.Skipped as reason:
            said = {"skipped": str(reason)}
        except Exception as error:  # what breaks is a result, and the others go on
            said = {"error": last_line(error)}
        results.add(stage, unit, seconds=round(time.perf_counter() - start, 3), **said)
        if "error" in said and stages.poisoned():
            return POISONED
    return 0


def drive(stages: list[str], results: Results, walk: Walk, budget_s: float) -> bool:
    """Starts every stage until it is done; False where the budget ended before."""
    end = time.monotonic() + budget_s
    for stage in stages:
        stage_end = min(end, time.monotonic() + LIMITS_S[stage])
        while True:
            left = stage_end - time.monotonic()
            code, said = _start(stage, results, walk, left) if left > 1 else (None, "")
            if code == 0:
                break
            unit = results.open(stage)
            if code is None and stage_end == end:
                if unit and results.tries(stage, unit) > 1:  # it would be begun anew by every call
                    results.add(stage, unit, error="did not end within the budgets of two calls")
                    unit = None
                print(f"{stage}: the budget is spent; call again to go on" + (f" with {unit}" if unit else ""))
                return False
            if code != POISONED:
                why = {
                    None: "ran past the limit of its stage",
                    STUCK: f"took longer than {UNIT_LIMITS_S[stage]} s",
                }.get(code, f"died with {code}: {_last(said)}")
                results.add(stage, unit or "stage", error=why)
            if code is None or (unit is None and code != POISONED):  # nothing was begun: it would die again
                break
        _tell(stage, results)
    return True


def _start(stage: str, results: Results, walk: Walk, limit_s: float) -> tuple[int | None, str]:
    """The exit code of a stage's process, None where it ran past the limit, and what it wrote to stderr."""
    environment = {**os.environ, **({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if walk.dry else {})}
    command = [sys.executable, str(HERE / "first_touch.py"), "--stage", stage, "--out", str(results.folder)]
    log = results.folder / f"{stage}.log"
    with log.open("ab") as file:
        begin = file.tell()
        child = subprocess.Popen([*command, *walk.words()], env=environment, stderr=file, start_new_session=True)
        try:
            code = _wait(child, results, limit_s, UNIT_LIMITS_S[stage])
        finally:
            if child.poll() is None:
                os.killpg(child.pid, 9)  # the runs that it started, too
                child.wait()
    with log.open("rb") as file:
        file.seek(begin)
        return code, file.read().decode(errors="replace")


def _wait(child: subprocess.Popen[bytes], results: Results, limit_s: float, unit_s: float) -> int | None:
    """The exit code of a stage's process: None past the limit, `STUCK` where no result came for as long as a unit may
    take."""
    now = begin = time.monotonic()
    size = results.size()
    while (left := begin + limit_s - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(min(left, 1.0))
        if (grown := results.size()) != size:
            size, now = grown, time.monotonic()
        elif time.monotonic() - now > unit_s:
            return STUCK
    return None


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _tell(stage: str, results: Results) -> None:
    for line in results.lines():
        if line["stage"] == stage and not line.get("begin"):
            words = line.get("error") or line.get("skipped") or json.dumps(line.get("result", line.get("row")))
            kind = next((name for name in ("error", "skipped") if name in line), "")
            print(f"{stage:<12} {line['unit']:<36} {kind:<8} {words[:240]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages; the exit code is 1 where something is wrong, 2 where the budget ended before all was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_touch"))
    parser.add_argument("--stages", default=",".join(LIMITS_S), help="by comma; all unless named")
    parser.add_argument("--ops", default="", help="ops to compare and to measure, by comma; all unless named")
    parser.add_argument("--budget", type=float, default=24 * 3600.0, help="seconds after which this call ends")
    parser.add_argument("--again", action="store_true", help="forget the results that are there")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--stage", choices=LIMITS_S, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    results = Results(chosen.out.resolve())
    walk = Walk(chosen.dry_run, tuple(name for name in chosen.ops.split(",") if name))
    if chosen.stage:
        return run_stage(chosen.stage, results, walk)
    unknown = [name for name in chosen.stages.split(",") if name not in LIMITS_S]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; stages are {', '.join(LIMITS_S)}")
    if chosen.again:
        results.path.unlink(missing_ok=True)
    if not drive(chosen.stages.split(","), results, walk, chosen.budget):
        return 2
    wrong = [line for line in results.lines() if "error" in line or (line.get("result") or {}).get("wrong")]
    print(f"{results.path}: {len(wrong)} of what was tried went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
