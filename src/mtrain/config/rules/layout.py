"""Layout rules: what each parallel axis must divide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import product

from mtrain.config.machine.devices import AUTO, CPU, SHIPPED, facts_of, names
from mtrain.config.resolve.resolution import smallest_world
from mtrain.config.rules.finding import (
    DP,
    Change,
    Finding,
    divisors,
    each,
    listed,
    multiples,
    nearest,
)
from mtrain.config.rules.pipeline import single
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.base import MOST_RANKS
from mtrain.config.schema.run import RunConfig

_TP = "parallel.tp model.num_attention_heads parallel.ranks parallel.sequence_parallel"
"""Keys that `_tp_fixes` reads."""


def _tp_fixes(run: RunConfig, number: int) -> list[Change]:
    """Return tensor-parallel degrees that divide `number`, nearest first, with their other
    requirements.
    """
    p = run.parallel
    out: list[Change] = []
    # Nobody means degrees beyond twice the given one.
    for tp in nearest(p.tp, [d for d in divisors(number, 2 * p.tp) if d != p.tp]):
        change: dict[str, object] = {"parallel.tp": tp}
        out.append(change)
        # Sequence parallelism that was set cannot stay with one tp rank (MT115).
        if tp == 1 and p.sequence_parallel:
            change = {**change, "parallel.sequence_parallel": None}
            out.append(change)
        # A number of ranks that was set for the old tp may not fit the new one.
        out.append({**change, "parallel.ranks": None})
    return out


@rule(Code("MT119", example="cluster.device=cdua"), reads="cluster.device", disk=True)
def device_name(run: RunConfig) -> Iterator[Finding]:
    """Cannot use this device because neither mtrain nor an installed plug-in provides it."""
    device = run.cluster.device
    if device == AUTO or device in SHIPPED:
        return
    # The names of plug-ins take a scan of installed packages, so look there last.
    known = [AUTO, *names()]
    if device not in known:
        near = get_close_matches(device, known, n=1)
        fixes = each("cluster.device", dict.fromkeys([*near, AUTO, CPU.name]))
        yield Finding("MT119", "cluster.device", f"devices here: {', '.join(known)}", fixes)


@rule(Code("MT101", example="parallel=tp3"), reads=_TP)
def tp_head_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split attention heads over tensor-parallel ranks because tp does not divide them."""
    heads = run.model.num_attention_heads
    tp = run.parallel.tp
    if heads % tp:
        detail = f"{heads} attention heads, tp {tp}; tp that divide: {listed(divisors(heads))}"
        yield Finding("MT101", "parallel.tp", detail, _tp_fixes(run, heads))


@rule(
    Code("MT102", example="parallel=tp3"),
    reads=f"model.num_query_groups {_TP} model.mla",
)
def tp_query_groups(run: RunConfig) -> Iterator[Finding]:
    """Cannot split or replicate key/value heads because tp is neither a divisor nor a multiple of
    the query groups.
    """
    m = run.model
    tp = run.parallel.tp
    groups = m.query_groups
    # With fewer groups than ranks megatron-core copies each group to several ranks, so tp may also
    # be a multiple of the groups. MLA has no groups.
    if m.mla is None and groups % tp and tp % groups:
        # A tp that divides both numbers is legal for the query heads too (MT101).
        fixes = _tp_fixes(run, math.gcd(m.num_attention_heads, groups))
        yield Finding("MT102", "parallel.tp", f"tp {tp}, {groups} query groups", fixes)


@rule(
    Code("MT103", example="parallel=tp2 model.ffn_hidden_size=703"),
    reads=f"model.ffn_hidden_size {_TP} model.moe.first_dense_layers",
)
def tp_mlp_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split dense MLPs over tensor-parallel ranks because tp does not divide their width."""
    m = run.model
    # Layers with experts have a width of their own (MT123).
    if m.moe is None or m.moe.first_dense_layers:
        yield from _width(run, "MT103", "model.ffn_hidden_size", m.ffn_hidden_size)


@rule(
    Code(
        "MT104",
        example="model=mixtral_tiny model.moe.shared_expert_intermediate_size=33 parallel=tp2",
    ),
    reads=f"model.moe.shared_expert_intermediate_size {_TP}",
)
def tp_shared_expert_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split shared experts over tensor-parallel ranks because tp does not divide their
    width.
    """
    m = run.model
    if m.moe is not None and m.moe.shared_expert_intermediate_size:
        width = m.moe.shared_expert_intermediate_size
        yield from _width(run, "MT104", "model.moe.shared_expert_intermediate_size", width)


def _width(run: RunConfig, code: str, key: str, width: int) -> Iterator[Finding]:
    tp = run.parallel.tp
    if width % tp:
        near = multiples(width, tp)
        fixes = _tp_fixes(run, math.gcd(width, run.model.num_attention_heads))
        detail = f"{width} wide, tp {tp}; nearest widths: {listed(near)}"
        yield Finding(code, key, detail, [*fixes, *each(key, near)])


@rule(Code("MT105", example="parallel=tp3"), reads=f"model.vocab_size {_TP}")
def tp_vocabulary_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Cannot split the embedding over tensor-parallel ranks because tp does not divide its rows."""
    # The embedding has the padded vocabulary, so that an odd vocab_size is no problem by itself.
    rows = run.model.padded_vocab_size
    tp = run.parallel.tp
    if rows % tp:
        fixes = _tp_fixes(run, math.gcd(rows, run.model.num_attention_heads))
        detail = f"{rows} rows, vocab_size rounded up to a multiple of 128; tp {tp}"
        yield Finding("MT105", "parallel.tp", detail, fixes)


@rule(
    Code(
        "MT173",
        "Cannot plan for so many ranks because there is a limit.",
        example="cluster=h100x8 cluster.nodes=1000000",
    ),
    Code("MT112", example="parallel=tp2 parallel.ranks=3"),
    reads=(
        f"{DP} model.num_attention_heads model.num_layers parallel.ep parallel.etp"
        " parallel.hsdp_replicas parallel.sequence_parallel parallel.vpp"
    ),
)
def grid_size(run: RunConfig) -> Iterator[Finding]:
    """Cannot place every rank in the grid because tp * pp * cp does not divide their number."""
    p = run.parallel
    ranks = p.ranks
    if ranks > MOST_RANKS:
        # No cluster has so many ranks: a digit too many, probably in cluster.nodes.
        few = {"cluster.nodes": 1, "cluster.devices_per_node": None}
        detail = f"{ranks} ranks, at most {MOST_RANKS}"
        yield Finding("MT173", "parallel.ranks", detail, [single(), few])
    elif ranks % p.model_ranks:
        detail = f"{ranks} ranks, tp {p.tp} * pp {p.pp} * cp {p.cp} = {p.model_ranks}"
        yield Finding("MT112", "parallel.ranks", detail, _grid_fixes(run, p.model_ranks))


def _grid_fixes(run: RunConfig, step: int) -> list[Change]:
    p = run.parallel
    # Experts, replicas and virtual stages have a smallest world of their own.
    near = multiples(p.ranks, math.lcm(step, smallest_world(p)))
    fixes = each("parallel.ranks", [None, *near])
    # The largest degrees come first, because they are nearest to the user's.
    degrees = (
        divisors(run.model.num_attention_heads, p.tp),
        divisors(run.model.num_layers, p.pp),
        {p.cp, 1},
    )
    for tp, pp, cp in product(*(sorted(axis, reverse=True) for axis in degrees)):
        if p.ranks % (tp * pp * cp):
            continue
        change: dict[str, object] = {
            "parallel.tp": tp,
            "parallel.pp": pp,
            "parallel.cp": cp,
            "parallel.vpp": p.vpp if pp > 1 else 1,
        }
        if tp == 1 and p.sequence_parallel:
            change["parallel.sequence_parallel"] = None
        fixes.append(change)
    # Each fix is tried, so that a long list would cost seconds.
    return [*fixes[:12], {**single(), "parallel.ranks": p.ranks}, single()]


@rule(
    Code("MT114", example="cluster.nodes=2 parallel.ranks=3"),
    Code(
        "MT113",
        "Cannot count the devices because this machine has none and the cluster does not state"
        " how many a machine has.",
        help="Name the machines: cluster.devices_per_node=8, or a cluster such as cluster=h100x8.",
        example="cluster.device=cuda",
    ),
    reads=(
        "parallel.ranks cluster.nodes cluster.devices_per_node cluster.device"
        " model.num_attention_heads model.num_layers parallel.ep parallel.etp"
        f" parallel.hsdp_replicas parallel.sequence_parallel parallel.vpp {DP}"
    ),
)
def cluster_size(run: RunConfig) -> Iterator[Finding]:
    """Cannot place the ranks because they must fill every device of the cluster."""
    c = run.cluster
    p = run.parallel
    ranks = p.ranks
    # A machine takes any number of CPU processes, so only the machines must divide them.
    if c.devices_per_node is None and facts_of(c.device).on_host:
        if ranks % c.nodes:
            detail = f"{p.ranks} processes, {c.nodes} machines"
            yield Finding("MT114", "parallel.ranks", detail, [{"cluster.nodes": 1}])
        return
    if c.devices_per_node is None:
        fixes = each("cluster.devices_per_node", [-(-ranks // c.nodes)])
        # mtrain counted the devices here and found none, so the CPU is the first suggestion.
        if facts_of(c.device).counted:
            fixes = [{"cluster.device": CPU.name}, *fixes]
        detail = f"device {c.device}, cluster.devices_per_node is not set"
        yield Finding("MT113", "cluster.device", detail, fixes)
        return
    devices = c.nodes * c.devices_per_node
    if devices != p.ranks:
        own: list[Change] = [{"parallel.ranks": None}]
        if p.ranks % c.devices_per_node == 0:
            own.append({"cluster.nodes": p.ranks // c.devices_per_node})
        own.append({"cluster.nodes": 1, "cluster.devices_per_node": p.ranks})
        yield Finding(
            "MT114",
            "parallel.ranks",
            f"{p.ranks} ranks on {c.nodes} * {c.devices_per_node} = {devices} devices",
            [*own, *_grid_fixes(run, p.model_ranks)],
            also=("cluster.nodes",),
        )


@rule(
    Code(
        "MT115",
        "Cannot shard the sequence because sequence parallelism needs at least two tp ranks.",
        example="parallel=single parallel.sequence_parallel=true",
    ),
    Code("MT116", example="parallel=tp2sp data.seq_length=255"),
    reads="data.seq_length parallel.sequence_parallel parallel.tp parallel.cp model.family",
)
def sequence_parallel(run: RunConfig) -> Iterator[Finding]:
    """Cannot split a sample into equal parts because tp * cp does not divide its length."""
    p = run.parallel
    seq = run.data.length
    off: Change = {"parallel.sequence_parallel": False}
    if not p.sequence_parallel:
        return
    if p.tp == 1:
        yield Finding("MT115", "parallel.sequence_parallel", "tp 1", [off, {"parallel.tp": 2}])
    elif run.model.family != "t5" and seq % (p.tp * p.cp):
        # MT280 looks at the two sequences that T5 makes of a sample.
        # A suggested length must satisfy context parallelism as well (MT117).
        near = multiples(seq, math.lcm(p.tp * p.cp, 2 * p.cp if p.cp > 1 else 1))
        detail = f"{seq} tokens, tp {p.tp} * cp {p.cp} = {p.tp * p.cp}; nearest: {listed(near)}"
        yield Finding("MT116", "data.seq_length", detail, [*each("data.seq_length", near), off])


@rule(
    Code("MT117", example="parallel=cp2 data.seq_length=15"),
    reads="data.seq_length parallel.cp parallel.sequence_parallel parallel.tp",
)
def context_parallel(run: RunConfig) -> Iterator[Finding]:
    """Cannot balance causal attention because a sample does not divide into two chunks for each cp
    rank.
    """
    p = run.parallel
    seq = run.data.length
    if p.cp > 1 and seq % (2 * p.cp):
        # A suggested length must satisfy sequence parallelism as well (MT116).
        near = multiples(seq, math.lcm(2 * p.cp, p.tp * p.cp if p.sequence_parallel else 1))
        none = {"parallel.cp": 1}
        fixes = [*each("data.seq_length", near), none, {**none, "parallel.ranks": None}]
        detail = f"{seq} tokens, 2 * cp {p.cp} = {2 * p.cp} chunks; nearest: {listed(near)}"
        yield Finding("MT117", "data.seq_length", detail, fixes)


@rule(
    Code("MT118", example="parallel.overlap_param_gather=true"),
    reads=(
        "parallel.overlap_param_gather parallel.distributed_optimizer parallel.overlap_grad_reduce"
    ),
)
def gather_overlap(run: RunConfig) -> Iterator[Finding]:
    """Cannot overlap the gather of weights because that takes the distributed optimizer and
    overlapped gradients.
    """
    p = run.parallel
    keys = ("distributed_optimizer", "overlap_grad_reduce")
    # Megatron-LM's arguments refuse the gather without either of them, too.
    need = [f"parallel.{key}" for key in keys if not getattr(p, key)]
    if p.overlap_param_gather and need:
        fixes = [dict.fromkeys(need, True), {"parallel.overlap_param_gather": False}]
        detail = f"needs {' and '.join(need)}"
        yield Finding("MT118", "parallel.overlap_param_gather", detail, fixes)
