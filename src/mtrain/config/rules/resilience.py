"""Rules on how a run survives a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtrain.config.rules.finding import DP, Finding
from mtrain.config.rules.rule import rule
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Code

RESTARTS = "resilience.restarts"
IN_PROCESS = "resilience.in_process"
REPLICA_CHECK = "resilience.replica_check_interval"


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


@rule(
    Code("MT370", example=f"{IN_PROCESS}=true {RESTARTS}=2 trainer.cuda_graph_impl=local"),
    reads=f"{IN_PROCESS} trainer.cuda_graph_impl",
)
def graphs_in_process(run: RunConfig) -> Iterator[Finding]:
    """Cannot restart within the processes because captured graphs keep the memory and the
    communicators that they were recorded with.
    """
    graphs = run.trainer.cuda_graph_impl
    if run.resilience.in_process and graphs != "none":
        detail = f"trainer.cuda_graph_impl={graphs}"
        off: dict[str, Any] = {"trainer.cuda_graph_impl": "none"}
        yield Finding("MT370", IN_PROCESS, detail, [{IN_PROCESS: False}, off])


@rule(
    Code("MT371", example=f"{IN_PROCESS}=true {RESTARTS}=2 parallel=dp2 cluster.nodes=2"),
    reads=f"{IN_PROCESS} cluster.nodes parallel.ranks",
)
def machines_in_process(run: RunConfig) -> Iterator[Finding]:
    """Cannot restart within the processes because ranks of several machines would have to agree."""
    machines = min(run.cluster.nodes, run.parallel.ranks)
    if run.resilience.in_process and machines > 1:
        yield Finding("MT371", IN_PROCESS, f"{machines} machines", [{IN_PROCESS: False}])


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
