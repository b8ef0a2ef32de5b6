"""The kernels that have passed parity on each generation of GPUs, and which `auto` may therefore
take there.

`admitted.json` lists them by generation (sm_90 is 90) and op, with the device, commit and date of
the run. It is derived from committed results: `python -m mtrain_kernels.admitted
benchmarks/results/gpu/*/summary.json` writes it and prints what it admits. An op is admitted where
each of its units of parity passed, or `DECIDED` says why a failure does not count. The latest
results of an op count.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("admitted.json")

DECIDED: dict[str, dict[str, str]] = {
    "84aa4de": {
        "attention llama3_8b": (
            "the tolerance was no bound: torch's own kernel exceeded it, too; see roundings.py"
        ),
        "attention_capped llama3_8b": "the tolerance was no bound; see roundings.py",
        "rms_norm_residual_fp8 llama3_8b": (
            "two sums of a row in two orders: what was quantised was a last bit of "
            "bf16 off what was written, and either was right; mended since, not run again"
        ),
        "edges of functions": (
            "the reciprocal of subnormal numbers, for which nobody asks; see runtime.reciprocal"
        ),
    },
}
"""The units that failed at a commit (the beginning of its hash) and yet count as passed, each with
the reason.
"""


EDGES = {"edges": "quantize"}
"""The op that units without an op of their own count for: conversions of numbers that no random
input has.
"""


@functools.cache
def admitted() -> dict[int, dict[str, dict[str, Any]]]:
    """Return the record: of each generation the ops that ran there, with device, commit
    and date.
    """
    record: dict[str, dict[str, dict[str, Any]]] = json.loads(RECORD.read_text())
    return {int(generation): ops for generation, ops in record.items()}


def missing(generation: int | None, ops: Iterable[str]) -> list[str]:
    """Return those of the ops that no committed result admits for a generation of GPUs; all without
    a generation.
    """
    there = admitted().get(generation, {}) if generation is not None else {}
    return [op for op in ops if op not in there]


def gathered(
    summaries: Iterable[Mapping[str, Any]], registered: Iterable[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the record that results admit, which are `summary.json` of `first_touch` in any order;
    of `registered` ops.

    Raises `ValueError` for a run without a device.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    registered = tuple(registered)
    # Oldest first: a later run of an op replaces what an earlier one admitted.
    for said in sorted(summaries, key=lambda said: said["date"]):
        generation = said["device"].get("sm")
        if said.get("dry") or not generation:
            raise ValueError(
                f"the results of {said['date']} are of no device: what ran in an interpreter admits"
                " nothing"
            )
        at = found.setdefault(str(generation), {})
        for op in said["parity"]:
            told = [
                said["parity"].get(name, {})
                for name in (op, *(e for e, of in EDGES.items() if of == op))
            ]
            failures = [failure["unit"] for part in told for failure in part.get("failures", ())]
            decided = {unit: why for unit in failures if (why := _decided(said["commit"], unit))}
            # A later failure must take back an earlier admission.
            at.pop(op, None)
            # The count decides where a summary lists fewer failures than it counted: none may slip
            # through.
            failed = max(len(failures), sum(part.get("failed", 0) for part in told))
            if len(decided) == failed and op in registered:
                source = {
                    "commit": said["commit"],
                    "date": said["date"],
                    "device": said["device"]["name"],
                }
                at[op] = source | ({"decided": decided} if decided else {})
    return {generation: dict(sorted(ops.items())) for generation, ops in sorted(found.items())}


def _decided(commit: str, unit: str) -> str | None:
    units = (units for start, units in DECIDED.items() if commit.startswith(start))
    return next((by_unit[unit] for by_unit in units if unit in by_unit), None)


def text_of(record: Mapping[str, Any]) -> str:
    """Return the record as it stands in its file."""
    return json.dumps(record, indent=1) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the record anew from the files named."""
    parser = argparse.ArgumentParser(prog="python -m mtrain_kernels.admitted", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="summary.json of runs on a device")
    from mtrain_kernels.registry import ops

    record = gathered(
        (json.loads(path.read_text()) for path in parser.parse_args(arguments).results), ops()
    )
    RECORD.write_text(text_of(record))
    for generation, names in record.items():
        print(f"sm_{generation}: {', '.join(names) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
