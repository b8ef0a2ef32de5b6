"""Rules on how a run survives a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtrain.config.machine.devices import facts_of
from mtrain.config.rules.finding import DP, Finding
from mtrain.config.rules.rule import rule
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Code

RESTARTS = "resilience.restarts"
IN_PROCESS = "resilience.in_process"
REPLICA_CHECK = "resilience.replica_check_interval"
RERUN = "resilience.rerun"
TRACE = "log.on_anomaly"
STRAGGLERS = "resilience.straggler_interval"


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


@rule(
    Code("MT360", example=f"{RERUN}=on_anomaly cluster=h100x8"),
    reads=f"{RERUN} trainer.deterministic cluster.device",
)
def deterministic_reruns(run: RunConfig) -> Iterator[Finding]:
    """Cannot tell a device at fault by computing a step twice because its algorithms do not give
    the same bits every time.
    """
    if run.resilience.rerun == "off" or run.trainer.deterministic:
        return
    device = run.cluster.device
    if not facts_of(device).on_host:
        fixes: list[dict[str, object]] = [{"trainer.deterministic": True}, {RERUN: "off"}]
        yield Finding("MT360", RERUN, f"trainer.deterministic=false on {device}", fixes)


@rule(
    Code("MT361", example=f"{RERUN}=every_n parallel.fsdp=fsdp2"),
    reads=f"{RERUN} {TRACE} parallel.fsdp parallel.hybrid_context_parallel trainer.cuda_graph_impl"
    " precision.fp8_recipe",
)
def repeatable_steps(run: RunConfig) -> Iterator[Finding]:
    """Cannot compute a step twice."""
    reruns = run.resilience.rerun != "off"
    traces = run.log.on_anomaly != "off"
    key = next((key for key, on in ((RERUN, reruns), (TRACE, traces)) if on), None)
    if key is None:
        return
    off = {RERUN: "off", TRACE: "off"} if reruns and traces else {key: "off"}
    p = run.parallel
    graphs = run.trainer.cuda_graph_impl
    if p.fsdp != "none":
        why = f"parallel.fsdp={p.fsdp} has no gradients of one rank to compare"
        yield Finding("MT361", key, why, [off])
    if p.hybrid_context_parallel:
        why = "parallel.hybrid_context_parallel=true deals documents out over all replicas"
        yield Finding("MT361", key, why, [{"parallel.hybrid_context_parallel": False}, off])
    if graphs != "none":
        why = f"trainer.cuda_graph_impl={graphs} repeats no record of what modules do"
        yield Finding("MT361", key, why, [{"trainer.cuda_graph_impl": "none"}, off])
    if run.precision.fp8_recipe == "delayed":
        why = "precision.fp8_recipe=delayed scales by earlier forwards, which the second one is"
        yield Finding("MT361", key, why, [{"precision.fp8_recipe": "tensorwise"}, off])


@rule(
    Code("MT365", example=f"{STRAGGLERS}=5 parallel=single"),
    reads=f"{STRAGGLERS} parallel.ranks parallel.pp",
)
def ranks_to_time(run: RunConfig) -> Iterator[Finding]:
    """Cannot compare the own time of ranks because no pipeline stage has two of them."""
    p = run.parallel
    if run.resilience.straggler_interval is not None and p.ranks <= p.pp:
        detail = f"ranks {p.ranks}, pp {p.pp}"
        yield Finding("MT365", STRAGGLERS, detail, [{STRAGGLERS: None}])


@rule(
    Code("MT366", example=f"{STRAGGLERS}=5 trainer.cuda_graph_impl=local parallel=tp2"),
    reads=f"{STRAGGLERS} trainer.cuda_graph_impl",
)
def graphs_and_own_time(run: RunConfig) -> Iterator[Finding]:
    """Cannot time the own work of ranks because a CUDA graph hides their collectives."""
    graphs = "trainer.cuda_graph_impl"
    if run.resilience.straggler_interval is not None and run.trainer.cuda_graph_impl != "none":
        yield Finding("MT366", STRAGGLERS, "", [{STRAGGLERS: None}, {graphs: "none"}])
