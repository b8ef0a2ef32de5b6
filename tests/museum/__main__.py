"""`python -m tests.museum [--clean N] [--seed S] [NAME...]`: the table of exhibits, or of clean
layouts.
"""

from __future__ import annotations

import argparse
import time

from tests.museum import clean
from tests.museum.exhibit import Exhibit, show
from tests.museum.exhibits import EXHIBITS
from tests.support.forked import import_engine


def main() -> int:
    """Print the table; returns how many exhibits are missed or unnamed, or clean layouts are
    alarmed about.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.museum")
    parser.add_argument("names", nargs="*", help="exhibits whose names contain one of these; all")
    parser.add_argument(
        "--clean", type=int, help="prove so many layouts drawn at random, without any bug"
    )
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn with")
    asked = parser.parse_args()
    begun = time.monotonic()
    import_engine()
    wrong = clean.prove_drawn(asked.clean, asked.seed) if asked.clean else _exhibits(asked.names)
    print(f"{time.monotonic() - begun:.0f} s in all")
    return min(wrong, 100)


def _exhibits(names: list[str]) -> int:
    chosen = [e for e in EXHIBITS if not names or any(name in e.name for name in names)]
    counts = {"found": 0, "named": 0}
    print(
        "| bug | source | layout | does | found | named module | seconds"
        " |\n|---|---|---|---|---|---|---|"
    )
    for exhibit in chosen:
        counts = _row(exhibit, counts)
    print(f"{len(chosen)} bugs: {counts['found']} found, {counts['named']} named")
    return len(chosen) - counts["named"]


def _row(exhibit: Exhibit, counts: dict[str, int]) -> dict[str, int]:
    seen = show(exhibit)
    module = seen.module if seen.named else f"NOT NAMED: {seen.said}"
    found = "yes" if seen.found else "NO"
    print(
        f"| {exhibit.name} | {exhibit.source} | {exhibit.layout or 'one rank'} | {exhibit.does} |"
        f" {found} | {module if seen.found else '-'} | {seen.seconds:.0f} |",
        flush=True,
    )
    return {"found": counts["found"] + seen.found, "named": counts["named"] + seen.named}


if __name__ == "__main__":
    raise SystemExit(main())
