"""`python -m tests.faults [--rows 1,2,5-9 | --third K] [--list]`: the fault matrix, with
the results of its tests and what they measured of the promises R1 to R8.

`--soak MINUTES [--seed N]` instead trains a run that loses a process every minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.matrix import (
    PARTS,
    ROOT,
    Row,
    beyond_rows,
    gone,
    gpu_only,
    in_brief,
    numbers_of,
    rows,
    third,
)
from tests.faults.promises import MEASURES, report

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
SLOWEST = 10
"""Tests whose times are printed."""
RAN = (0, 1)
"""Exit codes of pytest after all tests were run."""


@dataclass(frozen=True)
class Result:
    """The end of one case of a test."""

    test: str
    outcome: str
    seconds: float
    values: list[tuple[str, float]] = field(default_factory=list)
    """Numbers that it measured, with their keys in `MEASURES`."""


def main() -> int:
    """Print the matrix; return 1 if a test failed, was not run or does not exist."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rows", type=numbers_of, help="rows, such as 1,2,5-9; all")
    chosen.add_argument(
        "--third",
        type=int,
        choices=range(1, PARTS + 1),
        help="the rows of a third of the matrix, in a few minutes: without the longest tests",
    )
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="one kill per minute")
    parser.add_argument("--seed", type=int, default=0, help="of the kills of a soak")
    given = parser.parse_args()
    if given.soak:
        return _soak(given.soak, given.seed)
    numbers = third(given.third) if given.third else given.rows
    some = [row for row in rows() if numbers is None or row.row in numbers]
    if given.third:
        some = [in_brief(row) for row in some]
    tests = list(dict.fromkeys(test for row in some for test in row.tests))
    if numbers is None:
        tests += beyond_rows()
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
    for one in sorted(results, key=lambda result: -result.seconds)[:SLOWEST]:
        print(f"{one.seconds:6.1f} s  {one.test}")
    print("Only a GPU can show:", *(f"  {fault}" for fault in gpu_only()), sep="\n")
    states = Counter(row.state for row in some)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"\n{len(some)} faults: {counted}")
    if not given.list:
        print(f"{_counts(results)}, {time.monotonic() - begun:.0f} s in all")
    lines, held = _promises(results)
    if not given.list:
        print("", *lines, sep="\n")
    for test in lost:
        print(f"pytest gave no result of {test}")
    return int(bool(lost) or not held or any(result.outcome == FAILED for result in results))


def _promises(results: Iterable[Result], *, missing: bool = True) -> tuple[list[str], bool]:
    """Return the lines of R1 to R8, from what tests measured, and whether all hold."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        for key, value in result.values:
            values[key].append(value)
    return report(values, missing=missing)


def _soak(minutes: float, seed: int) -> int:
    """Soak, and print the figures; return 1 if a requirement was not met."""
    from tests.faults.soak import Soak

    with tempfile.TemporaryDirectory() as folder:
        soaked = Soak(Path(folder), minutes, seed, print).run()
    for name, value in soaked.figures.items():
        print(f"  {name}: {value:.6g}")
    for problem in soaked.problems:
        print(f"wrong: {problem}")
    pairs = [pair for values in soaked.measured for pair in values.items()]
    lines, _ = _promises([Result("soak", PASSED, minutes * 60, pairs)], missing=False)
    print(*lines, sep="\n")
    print(f"soak of {minutes:g} minutes, seed {seed}: {len(soaked.kills)} kills, ", end="")
    print(f"{len(soaked.problems)} requirements not met")
    return int(bool(soaked.problems))


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
        values = [
            (one.attrib["name"], float(one.attrib["value"]))
            for one in case.iter("property")
            if one.attrib["name"] in MEASURES
        ]
        found.append(Result(test, outcome, float(case.attrib["time"]), values))
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
