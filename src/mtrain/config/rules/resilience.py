"""Rules on how a run survives a failure."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.finding import DP, Finding
from mtrain.config.rules.rule import rule
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Code

RESTARTS = "resilience.restarts"
REPLICA_CHECK = "resilience.replica_check_interval"


@rule(
    "MT437",
    reads=f"{RESTARTS} launch.kind launch.tasks parallel.ranks",
)
def restarts_under_launchers(run: RunConfig) -> Iterator[Finding]:
    """Require that one process starts all ranks of a run that restarts them."""
    kind = run.launch.kind
    ranks = run.parallel.ranks
    if not run.resilience.restarts or kind == "local":
        return
    detail = ""
    if kind == "torchrun":
        detail = kind
    elif run.launch.tasks == "device" and ranks > 1:
        detail = f"{kind} with a task for each of {ranks} ranks"
    if detail:
        yield Finding("MT437", RESTARTS, detail, [{RESTARTS: 0}])


@rule(
    Code("MT469", example=f"{REPLICA_CHECK}=10 parallel=single"),
    reads=f"{REPLICA_CHECK} parallel.fsdp {DP}",
)
def replicas_to_compare(run: RunConfig) -> Iterator[Finding]:
    """Cannot compare replicas because no two ranks hold the same weights."""
    p = run.parallel
    if run.resilience.replica_check_interval is None:
        return
    off = {REPLICA_CHECK: None}
    if p.fsdp != "none":
        yield Finding("MT469", REPLICA_CHECK, f"parallel.fsdp={p.fsdp} shards them", [off])
    elif p.dp * p.cp == 1:
        yield Finding("MT469", REPLICA_CHECK, f"dp {p.dp} * cp {p.cp} = 1", [off])
