"""`prove`: is the sharded run the same as one rank's? Trains both from the same weights and samples and compares."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mtrain.cli.setup import load
from mtrain.config.resolve import Machine
from mtrain.config.rules import check
from mtrain.config.run import RunConfig
from mtrain.errors import BadEnvironment, BadInput
from mtrain.launching import local, preflight
from mtrain.layout.grid import RankGrid
from mtrain.plan.count import parameters
from mtrain.plan.shrink import alone, differences, shrink
from mtrain.units import count

STEPS = 4
MAX_RANKS = 16
TOLERANCES = {
    "fp32": {"loss": 1e-5, "gradient": 1e-4, "weight": 1e-3},
    "bf16": {"loss": 2e-3, "gradient": 5e-2, "weight": 5e-2},
}
FAULT = 5
"""The exit code of a layout that is not equal: a training fault."""


def run(argv: list[str], *, debug: bool) -> int:
    """Prove the layout that `argv` describes, at a size that fits this machine; returns the exit code."""
    full, small = shrunk(argv, STEPS)
    dtype = small.precision.dtype
    ranks = RankGrid.of(small).world
    against = f"{RankGrid.of(small)} on {ranks} ranks against one rank"
    print(f"{full.model.name}: {against}, {dtype}, {STEPS} steps", flush=True)
    print(f"shrunk to {count(parameters(small.model))} parameters: {'; '.join(differences(full, small))}", flush=True)
    return _compare(small, dtype)


def shrunk(argv: list[str], steps: int) -> tuple[RunConfig, RunConfig]:
    """The run that `argv` describes, and the same layout small enough for this machine.

    Raises:
        BadInput: the configuration, or what is left of it, breaks a rule.
        BadEnvironment: the layout has more ranks than this machine may start.
    """
    full = load(argv).run
    dtype = "bf16" if full.precision.dtype == "bf16" else "fp32"
    small = shrink(full, steps=steps, dtype=dtype, max_ranks=MAX_RANKS)
    problems = [p for p in check(small) if p.severity == "error"]
    if problems:
        raise BadInput(problems)
    ranks = RankGrid.of(small).world
    if ranks > MAX_RANKS:
        raise BadEnvironment(f"the layout needs {ranks} processes; at most {MAX_RANKS} are started on one machine")
    preflight.check(small, argv, Machine.here())
    return full, small


def _compare(small: RunConfig, dtype: str) -> int:
    with tempfile.TemporaryDirectory(prefix="mtrain-prove-") as scratch:
        homes = {"one": Path(scratch) / "one", "many": Path(scratch) / "many"}
        for name, part in (("many", small), ("one", alone(small))):
            homes[name].mkdir()
            local.observe(part, homes[name])
        from mtrain.train.prove import compare

        rows = compare(homes["one"], homes["many"], STEPS, TOLERANCES[dtype])
    print(f"{'':<14} {'largest relative error':<24} {'tolerance':<10} where")
    for row in rows:
        verdict = "bitwise equal" if row.error == 0 else f"{row.error:.1e}"
        mark = "" if row.equal else "  <- differs"
        print(f"{row.what:<14} {verdict:<24} {row.tolerance:<10.0e} {row.where if row.error else ''}{mark}")
    equal = all(row.equal for row in rows)
    print(
        "proven: the layout computes what one rank computes"
        if equal
        else "NOT equal: the layout computes something else"
    )
    return 0 if equal else FAULT
