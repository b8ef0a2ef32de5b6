"""Command lines whose Triton kernels run in the interpreter: a program, `python -m
tests.support.interpreted`.

Triton decides whether to interpret when it is imported, so this is a process of its own. It reads
JSON, names and the words of each command line, and prints losses and gradient norms of every step
of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.patience import patient

ROOT = Path(__file__).resolve().parents[2]


def answer_of(program: str, given: Any, timeout_s: float) -> Any:
    """Return what a program, whose Triton interprets, prints as JSON in its last line, after it
    read `given`.

    Raises `AssertionError` with what it printed if it did not end well.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=patient(timeout_s),
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def trained(runs: dict[str, list[str]], timeout_s: float = 200) -> dict[str, list[float]]:
    """Return losses of all steps, then gradient norms, of every run by its name; a run is the words
    behind `mtrain`.

    Raises `AssertionError` with what a run printed if it did not end well.
    """
    return answer_of("tests.support.interpreted", runs, timeout_s)  # type: ignore[no-any-return]


def _main() -> None:
    from tests.support.launched import Launched

    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as home:
        for i, (name, words) in enumerate(json.load(sys.stdin).items()):
            folder = Path(home) / str(i)
            folder.mkdir()
            launched = Launched(*words, f"log.runs_dir={folder}", cwd=folder)
            code = launched.wait(100)
            assert code == 0, f"{name} ended with {code}:\n{launched.output.read_text()}"
            metrics = next(folder.glob("*/metrics.jsonl")).read_text().splitlines()
            steps = [row for row in map(json.loads, metrics) if "loss" in row]
            found[name] = [row[key] for key in ("loss", "grad_norm") for row in steps]
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
