"""`python -m tests.faults [--rows 1,2,5-9 | --third K] [--list]`: the fault matrix, with the
results of its tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.matrix import PARTS, ROOT, Row, gone, gpu_only, numbers_of, rows, third

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
RAN = (0, 1)
"""Exit codes of pytest after all tests were run."""


@dataclass(frozen=True)
class Result:
    """The end of one case of a test."""

    test: str
    outcome: str
    seconds: float


def main() -> int:
    """Print the matrix; return 1 if a test failed, was not run or does not exist."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rows", type=numbers_of, help="rows, such as 1,2,5-9; all")
    chosen.add_argument(
        "--third", type=int, choices=range(1, PARTS + 1), help="the rows of a third of the matrix"
    )
    parser.add_argument("--list", action="store_true", help="run nothing")
    given = parser.parse_args()
    numbers = third(given.third) if given.third else given.rows
    some = [row for row in rows() if numbers is None or row.row in numbers]
    tests = list(dict.fromkeys(test for row in some for test in row.tests))
    if missing := gone(tests):
        print("\n".join(f"there is no test {test}" for test in missing))
        return 1
    begun = time.monotonic()
    results = [] if given.list else _run(tests)
    if results is None:
        return 1
    lost = [] if given.list else [test for test in tests if not _of(test, results)]
    for row in some:
        _print(row, None if given.list else results)
    print("Only a GPU can show:", *(f"  {fault}" for fault in gpu_only()), sep="\n")
    states = Counter(row.state for row in some)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"\n{len(some)} faults: {counted}")
    if not given.list:
        print(f"{_counts(results)}, {time.monotonic() - begun:.0f} s in all")
    for test in lost:
        print(f"pytest gave no result of {test}")
    return int(bool(lost) or any(result.outcome == FAILED for result in results))


def _run(tests: list[str]) -> list[Result] | None:
    """Run tests in a process of pytest; return their results, or None if it could not run them."""
    if not tests:
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"
        words = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-q", f"--junitxml={file}"]
        # standard output has the matrix only
        done = subprocess.run([*words, *tests], cwd=ROOT, stdout=sys.stderr, check=False)
        if done.returncode not in RAN:
            print(f"pytest ended with exit code {done.returncode} and did not run the tests")
            return None
        return _read(file)


def _read(file: Path) -> list[Result]:
    """Return the results in a JUnit file of pytest."""
    found = []
    for case in ElementTree.parse(file).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/")
        tags = {child.tag for child in case}
        outcome = SKIPPED if "skipped" in tags else PASSED
        if tags & {"failure", "error"}:
            outcome = FAILED
        test = f"{path}.py::{case.attrib['name']}"
        found.append(Result(test, outcome, float(case.attrib["time"])))
    return found


def _of(test: str, results: Iterable[Result]) -> list[Result]:
    """Return the results of a node id, or of all cases of its function."""
    return [one for one in results if one.test == test or one.test.startswith(f"{test}[")]


def _counts(results: list[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in (PASSED, FAILED, SKIPPED))


def _print(row: Row, results: list[Result] | None) -> None:
    """Print a row; `results` is None if nothing was run."""
    print(f"{row.row:2}  {row.fault}: {row.state}")
    print(f"    expected: {row.expected}")
    if row.why_not:
        print(f"    because {row.why_not}")
    if row.lacks:
        print(f"    not shown: {row.lacks}")
    own: list[Result] = []
    for test in row.tests:
        print(f"    {test}")
        own += _of(test, results or [])
    if row.tests and results is not None:
        print(f"    {_counts(own)}, {sum(result.seconds for result in own):.1f} s")
    print()


if __name__ == "__main__":
    raise SystemExit(main())
