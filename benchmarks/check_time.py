"""How long `check` takes, as a whole process, beside `import megatron.core` on the same machine at the same time.

    python benchmarks/check_time.py [--rounds 3] [--out FILE] [RECIPE ...]

Every shared recipe, one process after another, with an import of megatron.core in each round. Times are of
the wall and of the CPU (user and system); of each the fastest round counts: a busy machine only adds. The ratio is of
the fastest import and the slowest recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMPORT = [sys.executable, "-c", "import megatron.core"]


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("recipes", nargs="*", help="names of shared recipes; none: all of them")
    options = parser.parse_args()
    shared = sorted(
        p.relative_to(ROOT / "recipes").with_suffix("").as_posix() for p in ROOT.glob("recipes/**/*.yaml")
    )
    result = measured(options.recipes or shared, options.rounds)
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def measured(recipes: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of the wall and the CPU of each recipe and of the import, the fastest of `rounds`, and their ratios."""
    commands = {name: [sys.executable, str(ROOT / "launch.py"), "check", f"recipe={name}"] for name in recipes}
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        for name, command in {"megatron.core": IMPORT, **commands}.items():
            wall, cpu = timed(command)
            old = best.get(name, (wall, cpu))
            best[name] = min(old[0], wall), min(old[1], cpu)
    engine = best.pop("megatron.core")
    slowest = {i: max(best, key=lambda name, i=i: best[name][i]) for i in (0, 1)}  # type: ignore[misc]
    return {
        "rounds": rounds,
        "check_wall_s": {name: round(wall, 3) for name, (wall, _) in best.items()},
        "check_cpu_s": {name: round(cpu, 3) for name, (_, cpu) in best.items()},
        "import_megatron_core_s": {"wall": round(engine[0], 3), "cpu": round(engine[1], 3)},
        "slowest": {"wall": slowest[0], "cpu": slowest[1]},
        "ratio": {
            "wall": round(engine[0] / best[slowest[0]][0], 1),
            "cpu": round(engine[1] / best[slowest[1]][1], 1),
        },
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
    }


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds of the wall and of the CPU that a process takes.

    Raises:
        RuntimeError: it fails.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
