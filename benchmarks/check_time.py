"""Times of `check` and of a run of one step, as whole processes, against `import megatron.core`.

    python benchmarks/check_time.py [--rounds 3] [--out FILE] [RECIPE ...]

Each round checks every shared recipe, one process after another, and imports megatron.core. Wall
and CPU time (user and system) are measured, and the fastest round counts, because a busy machine
only adds time. The ratio divides the fastest import by the slowest recipe. `first_step` is a run of
the default model, from the command to its end after one step and its checkpoint, on one rank and on
two, divided by the import; the first round tokenizes its corpus.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMPORT = [sys.executable, "-c", "import megatron.core"]


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("recipes", nargs="*", help="names of shared recipes; none: all of them")
    options = parser.parse_args()
    shared = sorted(
        p.relative_to(ROOT / "recipes").with_suffix("").as_posix()
        for p in ROOT.glob("recipes/**/*.yaml")
    )
    result = measured(options.recipes or shared, options.rounds, ("tp1", "tp2"))
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measured(recipes: list[str], rounds: int, layouts: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the seconds of each recipe, of one step in each of `layouts` and of the import, and
    their ratios.
    """
    commands = {
        name: [sys.executable, str(ROOT / "launch.py"), "check", f"recipe={name}"]
        for name in recipes
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "trainer.train_iters=1",
            "trainer.eval_iters=0",
            "trainer.sample_tokens=0",
            f"log.runs_dir={folder}",
        ]
        runs = {
            name: [sys.executable, str(ROOT / "launch.py"), f"parallel={name}", *words]
            for name in layouts
        }
        best = fastest({"megatron.core": IMPORT, **commands, **runs}, rounds)
    engine = best.pop("megatron.core")
    runs_took = {name: best.pop(name) for name in layouts}
    slowest_wall = max(best, key=lambda name: best[name][0])
    slowest_cpu = max(best, key=lambda name: best[name][1])
    return {
        "rounds": rounds,
        "check_wall_s": {name: round(wall, 3) for name, (wall, _) in best.items()},
        "check_cpu_s": {name: round(cpu, 3) for name, (_, cpu) in best.items()},
        "import_megatron_core_s": {"wall": round(engine[0], 3), "cpu": round(engine[1], 3)},
        "slowest": {"wall": slowest_wall, "cpu": slowest_cpu},
        "ratio": {
            "wall": round(engine[0] / best[slowest_wall][0], 1),
            "cpu": round(engine[1] / best[slowest_cpu][1], 1),
        },
        "first_step": {
            name: {
                "wall_s": round(wall, 3),
                "wall": round(wall / engine[0], 2),
                "cpu": round(cpu / engine[1], 2),
            }
            for name, (wall, cpu) in runs_took.items()
        },
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
    }


def fastest(commands: dict[str, list[str]], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the least wall and CPU seconds of each command in `rounds`."""
    best: dict[str, tuple[float, float]] = {}
    # all take turns, so that a busy minute slows down every command alike
    for _ in range(rounds):
        for name, command in commands.items():
            wall, cpu = timed(command)
            old = best.get(name, (wall, cpu))
            best[name] = min(old[0], wall), min(old[1], cpu)
    return best


def timed(command: list[str]) -> tuple[float, float]:
    """Return the wall and CPU seconds of a process.

    Raises:
        RuntimeError: the process fails.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
