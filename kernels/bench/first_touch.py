"""A lease of a GPU as one command, without a network: what is right, how fast, where the gaps are.

    python kernels/bench/first_touch.py --budget 420 [--out DIR] [--stages parity,ops] [--again]
    python kernels/bench/first_touch.py --dry-run --budget 420  # on a CPU: tiny shapes, a few runs

It needs no installation: `PYTHONPATH=src:kernels` and the packages that mtrain depends on are
enough. Stages come in the order of their worth, and each has to end when its share of the budget is
spent; time that one leaves goes to the next, and what did not fit is a result that says so. Units
of parity and of `gpu_runs.yaml` run side by side. Every result is a line of JSON in
OUT/results.jsonl as soon as it is there, so a call that is cut off loses nothing, and the next one
goes on (`--again` begins anew). OUT/summary.json and OUT/page.txt put figures next to the plan and
the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from first_touch_results import (
    BY_NAME,
    HERE,
    PLAN,
    STAGES,
    WHOLE,
    Results,
    Stage,
    Walk,
    gate_error,
    workers_of,
)

STUCK = 124
"""Exit code of a stage that was ended because a unit took longer."""
POISONED = 3
"""Exit code of a stage whose device does not answer any more: a new process goes on."""


def run_stage(stage: str, results: Results, walk: Walk, worker: int = 0, of: int = 1) -> int:
    """Do the units of a stage that have no result, every `of`-th of them, in this process; returns
    the exit code.
    """
    import first_touch_device as device
    import first_touch_stages as stages

    units = stages.UNITS[stage](walk, results.folder)
    if worker == 0:
        results.add(stage, PLAN, units=list(units))
    for unit in list(units)[worker::of]:
        if unit in results.done(stage):
            continue
        results.add(stage, unit, begin=True, worker=worker)
        start = time.perf_counter()
        try:
            said = {"result": units[unit]()}
        except device.Skipped as reason:
            said = {"skipped": str(reason)}
        except Exception as error:  # what breaks is a result, and the others go on
            from run import last_line  # it imports torch

            said = {"error": last_line(error)}
        results.add(
            stage, unit, worker=worker, seconds=round(time.perf_counter() - start, 3), **said
        )
        if "error" in said and device.poisoned():
            return POISONED
    return 0


def drive(stages: list[str], results: Results, walk: Walk, budget_s: float) -> bool:
    """Start every stage and end it in time; False where something did not fit."""
    begin = time.monotonic()
    fits = True
    last = max(BY_NAME[name].until for name in stages)
    for name in stages:
        stage = BY_NAME[name]
        broken = gate_error(results) if stage.starts_runs else None
        if broken is not None:
            results.add(name, WHOLE, skipped=f"launch.py does not start: {broken}")
            continue
        # nothing of a dry run is worth more than the rest
        share = 1.0 if walk.dry else stage.until / last
        end = begin + budget_s * share
        fits &= Driven(stage, results, walk, end, budget_s).all_units()
        _tell(name, results)
    return fits


@dataclass(frozen=True)
class Driven:
    """A stage that is being done: its processes are started anew until its units are done or its
    time is up.
    """

    stage: Stage
    results: Results
    walk: Walk
    end: float
    """Deadline on the monotonic clock."""
    budget_s: float
    begun: float = field(default_factory=time.monotonic)

    def all_units(self) -> bool:
        """Do them; what had no time is noted. Returns whether all fitted."""
        of = workers_of(self.stage, self.walk.dry)
        with ThreadPoolExecutor(of) as pool:
            futures = [pool.submit(self._until_done, worker, of) for worker in range(of)]
            for future in futures:
                future.result()
        name = self.stage.name
        done = self.results.done(name)
        planned = self.results.planned(name)
        late = [unit for unit in ([WHOLE] if planned is None else planned) if unit not in done]
        for unit in late:
            self.results.add(name, unit, skipped=self._why_late(), late=True)
        return not late

    def _why_late(self) -> str:
        ends = f"when its share of the budget of {self.budget_s:g} s is spent"
        if self.begun + self.stage.limit_s < self.end:
            ends = f"after {self.stage.limit_s:g} s"
        return f"did not fit: the stage ends {ends}; the next call does it"

    def _until_done(self, worker: int, of: int) -> None:
        name = self.stage.name
        limit = self.begun + self.stage.limit_s
        while (left := min(self.end, limit) - time.monotonic()) > 1:
            code, said = _start(self.stage, self.results, self.walk, left, worker, of)
            if code == 0:
                return
            unit = self.results.open(name, worker)
            if code is None and self.end <= limit:
                if (
                    unit and self.results.tries(name, unit) > 1
                ):  # it would be begun anew by every call
                    self.results.add(
                        name, unit, error="did not end within the budgets of two calls"
                    )
                return
            if code != POISONED:
                why = {
                    None: "ran past the limit of its stage",
                    STUCK: f"took longer than {self.stage.unit_s:g} s",
                }.get(code, f"died with {code}: {_last(said)}")
                self.results.add(name, unit or WHOLE, error=why)
            if code is None or (
                unit is None and code != POISONED
            ):  # nothing was begun: it would die again
                return


def _start(
    stage: Stage, results: Results, walk: Walk, limit_s: float, worker: int = 0, of: int = 1
) -> tuple[int | None, str]:
    """Return the exit code of a stage's process, None where it ran past the limit, and what it
    wrote to stderr.
    """
    environment = dict(os.environ)
    if walk.dry:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(HERE / "first_touch.py"),
        "--stage",
        stage.name,
        "--out",
        str(results.folder),
    ]
    command += ["--worker", f"{worker}/{of}", *walk.words()]
    log = results.folder / (f"{stage.name}.log" if of == 1 else f"{stage.name}.{worker}.log")
    with log.open("ab") as file:
        begin = file.tell()
        child = subprocess.Popen(command, env=environment, stderr=file, start_new_session=True)
        try:
            code = _wait(child, lambda: results.size(stage.name, worker), limit_s, stage.unit_s)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, 9)  # the runs that it started, too
                child.wait()
    with log.open("rb") as file:
        file.seek(begin)
        return code, file.read().decode(errors="replace")


def _wait(
    child: subprocess.Popen[bytes], size: Callable[[], int], limit_s: float, unit_s: float
) -> int | None:
    """Return the exit code of a stage's process: None past the limit, `STUCK` where no result came
    for as long as a unit may take.
    """
    now = begin = time.monotonic()
    seen = size()
    while (left := begin + limit_s - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(min(left, 1.0))
        if (grown := size()) != seen:
            seen = grown
            now = time.monotonic()
        elif time.monotonic() - now > unit_s:
            return STUCK
    return None


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _tell(stage: str, results: Results) -> None:
    for unit, line in results.ends(stage).items():
        words = line.get("error") or line.get("skipped") or json.dumps(line.get("result"))
        kind = next((name for name in ("error", "skipped") if name in line), "")
        print(f"{stage:<12} {unit:<36} {kind:<8} {words[:240]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; returns 1 where something is wrong, else 2 where something did not fit, else
    0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("first_touch"))
    parser.add_argument(
        "--stages", default=",".join(BY_NAME), help="by comma, in any order; all unless named"
    )
    parser.add_argument(
        "--ops", default="", help="ops to compare and to measure, by comma; all unless named"
    )
    parser.add_argument(
        "--budget", type=float, default=24 * 3600.0, help="seconds after which this call ends"
    )
    parser.add_argument("--again", action="store_true", help="forget the results of these stages")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--whole", action="store_true", help="with --dry-run: all ops, not a sample"
    )
    parser.add_argument("--stage", choices=BY_NAME, help=argparse.SUPPRESS)
    parser.add_argument("--worker", default="0/1", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    results = Results(chosen.out.resolve())
    walk = Walk(chosen.dry_run, tuple(name for name in chosen.ops.split(",") if name), chosen.whole)
    if chosen.stage:
        worker, of = (int(number) for number in chosen.worker.split("/"))
        return run_stage(chosen.stage, results, walk, worker, of)
    unknown = [name for name in chosen.stages.split(",") if name not in BY_NAME]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; stages are {', '.join(BY_NAME)}")
    asked = [stage.name for stage in STAGES if stage.name in chosen.stages.split(",")]
    if chosen.again:
        results.forget(asked)
    fits = drive(asked, results, walk, chosen.budget)
    return _ended(results, walk, fits)


def _ended(results: Results, walk: Walk, fits: bool) -> int:
    import first_touch_summary

    wrong = first_touch_summary.write(
        results, walk, " ".join([Path(sys.executable).name, *sys.argv])
    )
    print(f"{results.folder / 'page.txt'}: {wrong} of what was tried went wrong")
    if wrong:
        return 1
    return 0 if fits else 2


if __name__ == "__main__":
    sys.exit(main())
