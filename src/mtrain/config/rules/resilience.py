"""Rules on how a run survives a failure."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.finding import Finding
from mtrain.config.rules.rule import rule
from mtrain.config.schema.run import RunConfig

RESTARTS = "resilience.restarts"


@rule(
    "MT437",
    reads=f"{RESTARTS} launch.kind launch.tasks cluster.nodes parallel.ranks",
)
def restarts_under_launchers(run: RunConfig) -> Iterator[Finding]:
    """Require that one process starts all ranks of a run that restarts them."""
    kind = run.launch.kind
    ranks = run.parallel.ranks
    machines = min(run.cluster.nodes, ranks)
    if not run.resilience.restarts or kind == "local":
        return
    detail = ""
    if kind == "torchrun":
        detail = kind
    elif machines > 1:
        detail = f"{kind} with {machines} machines"
    elif run.launch.tasks == "device" and ranks > 1:
        detail = f"{kind} with a task for each of {ranks} ranks"
    if detail:
        yield Finding("MT437", RESTARTS, detail, [{RESTARTS: 0}])
