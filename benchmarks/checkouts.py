"""The time of a step, and of a start, of two checkouts of mtrain, in turn.

    python benchmarks/checkouts.py OTHER [--rounds 5] [--steps 40] [--out FILE] [OVERRIDES ...]

OTHER is the folder of another checkout; this one is compared with it, with everything at its
default. In each round both train twice, `FEW` steps and `--steps` more, in processes of their own.
The difference of the two is the time of the steps, and the rest the start. CPU seconds are those of
the command and its ranks, which a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from step_overhead import DEFAULTS, circumstances

HERE = Path(__file__).parents[1]
FEW = 5


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("overrides", nargs="*", help="keys of the configuration")
    options = parser.parse_intermixed_args()
    words = [*DEFAULTS, *options.overrides]
    places = {"other": options.other.resolve(), "this": HERE}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in places}
    for number in range(options.rounds):
        for name, place in sorted(places.items(), reverse=number % 2 == 0):
            for key, value in timed(place, words, options.steps).items():
                found[name].setdefault(key, []).append(value)
    result: dict[str, Any] = {
        key: {
            "this": statistics.median(found["this"][key]),
            "other": statistics.median(values),
            "ratio": statistics.median(found["this"][key]) / statistics.median(values),
            "ratios": [a / b for a, b in zip(found["this"][key], values, strict=True)],
        }
        for key, values in found["other"].items()
    }
    result |= {"rounds": options.rounds, "steps": options.steps, **circumstances()}
    result |= {"other": commit_of(places["other"]), "load_average": os.getloadavg()[0]}
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def timed(place: Path, words: list[str], steps: int) -> dict[str, float]:
    """Return the seconds of a step and of a start of a checkout, by CPU and by the wall."""
    few = trained(place, words, FEW)
    many = trained(place, words, FEW + steps)
    found: dict[str, float] = {}
    for clock, seconds in few.items():
        step = (many[clock] - seconds) / steps
        found |= {f"step_{clock}_s": step, f"start_{clock}_s": seconds - FEW * step}
    return found


def trained(place: Path, words: list[str], steps: int) -> dict[str, float]:
    """Train a number of steps in a process; return its seconds by clock."""
    path = os.pathsep.join(str(place / part) for part in ("src", "kernels"))
    own = [f"trainer.train_iters={steps}", "log.name=run", "log.progress=none"]
    own += ["trainer.eval_iters=0", "checkpoint.save_final=false"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        subprocess.run(
            [sys.executable, str(place / "launch.py"), *words, *own],
            cwd=home,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": cpu, "wall": time.perf_counter() - begun}


def commit_of(place: Path) -> str:
    """Return the commit of a checkout, or the name of another folder."""
    words = ["git", "-C", str(place), "rev-parse", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or place.name


if __name__ == "__main__":
    raise SystemExit(main())
