"""Layout rules: what each parallel axis must divide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from difflib import get_close_matches

from mtrain.config.machine.devices import AUTO, CPU, SHIPPED, facts_of, names
from mtrain.config.resolve.resolution import smallest_world
from mtrain.config.rules.finding import DP, Change, Finding, divisors, listed, multiples, nearest
from mtrain.config.rules.pipeline import single
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.base import MOST_RANKS
from mtrain.config.schema.run import RunConfig


def _tp_fixes(run: RunConfig, number: int) -> tuple[Change, ...]:
    """Return tensor-parallel degrees that divide `number`, nearest first, with their other
    requirements.
    """
    p = run.parallel
    out: list[Change] = []
    for tp in nearest(p.tp, [d for d in divisors(number, 2 * p.tp) if d != p.tp]):
        change: dict[str, object] = {"parallel.tp": tp}
        out.append(change)
        if tp == 1 and p.sequence_parallel:
            change = {**change, "parallel.sequence_parallel": None}
            out.append(change)
        out.append({**change, "parallel.ranks": None})
    return tuple(out)


@rule(
    Code("MT101", example="parallel=tp3"),
    reads="parallel.tp model.num_attention_heads parallel.ranks parallel.sequence_parallel",
)
def tp_head_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Every tp rank holds whole heads."""
    heads = run.model.num_attention_heads
    tp = run.parallel.tp
    if heads % tp:
        rule = (
            f"{heads} attention heads do not divide by tp {tp}; tp that divide:"
            f" {listed(divisors(heads))}"
        )
        yield Finding("MT101", "parallel.tp", rule, _tp_fixes(run, heads))


@rule(
    Code("MT102", example="parallel=tp3"),
    reads=(
        "model.num_query_groups parallel.tp model.mla model.num_attention_heads parallel.ranks "
        "parallel.sequence_parallel"
    ),
)
def tp_query_groups(run: RunConfig) -> Iterator[Finding]:
    """Key/value heads are sharded over tp, or replicated."""
    m = run.model
    tp = run.parallel.tp
    groups = m.query_groups
    if m.mla is None and groups % tp and tp % groups:
        rule = f"tp {tp} is neither a divisor nor a multiple of the {groups} query groups"
        legal = math.gcd(m.num_attention_heads, groups)
        yield Finding("MT102", "parallel.tp", rule, _tp_fixes(run, legal))


@rule(
    Code("MT103", example="parallel=tp2 model.ffn_hidden_size=703"),
    reads=(
        "model.ffn_hidden_size parallel.tp model.moe.first_dense_layers model.num_attention_heads "
        "parallel.ranks parallel.sequence_parallel"
    ),
)
def tp_mlp_divisibility(run: RunConfig) -> Iterator[Finding]:
    """tp divides the width of every dense MLP that it shards."""
    m = run.model
    if m.moe is None or m.moe.first_dense_layers:
        yield from _width(run, "MT103", "model.ffn_hidden_size", m.ffn_hidden_size)


@rule(
    Code(
        "MT104",
        example="model=mixtral_tiny model.moe.shared_expert_intermediate_size=33 parallel=tp2",
    ),
    reads=(
        "model.moe.shared_expert_intermediate_size parallel.tp model.num_attention_heads"
        " parallel.ranks parallel.sequence_parallel"
    ),
)
def tp_shared_expert_divisibility(run: RunConfig) -> Iterator[Finding]:
    """tp divides the width of shared experts, which it shards as it does MLPs."""
    m = run.model
    if m.moe is not None and m.moe.shared_expert_intermediate_size:
        width = m.moe.shared_expert_intermediate_size
        yield from _width(run, "MT104", "model.moe.shared_expert_intermediate_size", width)


@rule(
    Code("MT105", example="parallel=tp3"),
    reads=(
        "model.vocab_size parallel.tp model.num_attention_heads parallel.ranks"
        " parallel.sequence_parallel"
    ),
)
def tp_vocabulary_divisibility(run: RunConfig) -> Iterator[Finding]:
    """Every tp rank holds the same number of rows of the embedding."""
    m = run.model
    tp = run.parallel.tp
    if m.padded_vocab_size % tp:
        rule = (
            f"the padded vocabulary of {m.padded_vocab_size} (a multiple of 128) does not divide by"
            f" tp {tp}"
        )
        fixes = _tp_fixes(run, math.gcd(m.padded_vocab_size, m.num_attention_heads))
        yield Finding("MT105", "parallel.tp", rule, fixes)


def _width(run: RunConfig, code: str, key: str, width: int) -> Iterator[Finding]:
    tp = run.parallel.tp
    if width % tp:
        near = multiples(width, tp)
        rule = f"{width} does not divide by tp {tp}; nearest widths: {listed(near)}"
        yield Finding(
            code,
            key,
            rule,
            (
                *_tp_fixes(run, math.gcd(width, run.model.num_attention_heads)),
                *({key: n} for n in near),
            ),
        )


@rule(
    Code(
        "MT173", "More ranks than mtrain plans for.", example="cluster=h100x8 cluster.nodes=1000000"
    ),
    Code(
        "MT112",
        "All ranks are used: they are a multiple of tp * pp * cp.",
        example="parallel=tp2 parallel.ranks=3",
    ),
    reads=(
        f"{DP} model.num_attention_heads model.num_layers parallel.ep parallel.etp"
        " parallel.hsdp_replicas parallel.sequence_parallel parallel.vpp"
    ),
)
def grid_size(run: RunConfig) -> Iterator[Finding]:
    """The grid uses every rank once."""
    p = run.parallel
    ranks = p.ranks
    few: Change = {"cluster.nodes": 1, "cluster.devices_per_node": None}
    if ranks > MOST_RANKS:
        yield Finding(
            "MT173", "parallel.ranks", f"{ranks} ranks; {MOST_RANKS} are the most", (single(), few)
        )
    elif ranks % p.model_ranks:
        rule = (
            f"{ranks} ranks are no multiple of tp {p.tp} * pp {p.pp} * cp {p.cp} = {p.model_ranks}"
        )
        yield Finding("MT112", "parallel.ranks", rule, _grid_fixes(run, p.model_ranks))


def _grid_fixes(run: RunConfig, step: int) -> tuple[Change, ...]:
    p = run.parallel
    fixes: list[Change] = [{"parallel.ranks": None}]
    fixes += [{"parallel.ranks": n} for n in multiples(p.ranks, math.lcm(step, smallest_world(p)))]
    for tp in (d for d in sorted(divisors(run.model.num_attention_heads, p.tp), reverse=True)):
        for pp in (d for d in sorted(divisors(run.model.num_layers, p.pp), reverse=True)):
            for cp in sorted({p.cp, 1}, reverse=True):
                if p.ranks % (tp * pp * cp) == 0:
                    change: dict[str, object] = {
                        "parallel.tp": tp,
                        "parallel.pp": pp,
                        "parallel.cp": cp,
                    }
                    change["parallel.vpp"] = p.vpp if pp > 1 else 1
                    if tp == 1 and p.sequence_parallel:
                        change["parallel.sequence_parallel"] = None
                    fixes.append(change)
    return (*fixes[:12], {**single(), "parallel.ranks": p.ranks}, single())


@rule(
    Code(
        "MT114",
        "The ranks do not fill the machines of the cluster.",
        example="cluster.nodes=2 parallel.ranks=3",
    ),
    Code(
        "MT113",
        "A device is named that this machine does not have, and nothing says how many a machine"
        " has.",
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
    """The layout uses the whole cluster."""
    c = run.cluster
    p = run.parallel
    if c.devices_per_node is None and facts_of(c.device).on_host:
        if p.ranks % c.nodes:
            rule = f"{p.ranks} processes do not divide evenly over {c.nodes} machines"
            yield Finding("MT114", "parallel.ranks", rule, ({"cluster.nodes": 1},))
        return
    if c.devices_per_node is None:
        rule = f"no {c.device} device is here and cluster.devices_per_node is not set"
        fixes: tuple[Change, ...] = ({"cluster.devices_per_node": -(-p.ranks // c.nodes)},)
        if facts_of(c.device).counted:
            fixes = ({"cluster.device": CPU.name}, *fixes)
        yield Finding("MT113", "cluster.device", rule, fixes)
        return
    devices = c.nodes * c.devices_per_node
    if devices != p.ranks:
        rule = (
            f"{p.ranks} ranks on {c.nodes} * {c.devices_per_node} = {devices} devices; a cluster is"
            " used whole"
        )
        own: list[Change] = [{"parallel.ranks": None}]
        if p.ranks % c.devices_per_node == 0:
            own.append({"cluster.nodes": p.ranks // c.devices_per_node})
        own.append({"cluster.nodes": 1, "cluster.devices_per_node": p.ranks})
        yield Finding(
            "MT114",
            "parallel.ranks",
            rule,
            (*own, *_grid_fixes(run, p.model_ranks)),
            also=("cluster.nodes",),
        )


@rule(
    Code(
        "MT115",
        "Sequence parallelism splits over the tp ranks, and there is one.",
        example="parallel=single parallel.sequence_parallel=true",
    ),
    Code(
        "MT116",
        "Sequence parallelism gives every tp rank as many tokens.",
        example="parallel=tp2sp data.seq_length=255",
    ),
    reads="data.seq_length parallel.sequence_parallel parallel.tp parallel.cp model.family",
)
def sequence_parallel(run: RunConfig) -> Iterator[Finding]:
    """Sequence parallelism shards activations between the tensor-parallel regions over tp."""
    p = run.parallel
    seq = run.data.length
    if not p.sequence_parallel:
        return
    if p.tp == 1:
        yield Finding(
            "MT115",
            "parallel.sequence_parallel",
            "sequence parallel shards over the tp ranks, and tp is 1",
            ({"parallel.sequence_parallel": False}, {"parallel.tp": 2}),
        )
    elif run.model.family != "t5" and seq % (
        p.tp * p.cp
    ):  # MT280 looks at what T5 makes of a sample
        step = math.lcm(p.tp * p.cp, 2 * p.cp if p.cp > 1 else 1)
        near = multiples(seq, step)
        cut = f"tp {p.tp} * cp {p.cp} = {p.tp * p.cp} (sequence parallel)"
        rule = f"a sequence of {seq} does not divide by {cut}; nearest: {listed(near)}"
        fixes: tuple[Change, ...] = tuple({"data.seq_length": n} for n in near)
        yield Finding(
            "MT116", "data.seq_length", rule, (*fixes, {"parallel.sequence_parallel": False})
        )


@rule(
    Code("MT117", example="parallel=cp2 data.seq_length=15"),
    reads="data.seq_length parallel.cp parallel.sequence_parallel parallel.tp",
)
def context_parallel(run: RunConfig) -> Iterator[Finding]:
    """Each cp rank holds two chunks of the sequence, one from each end, for causal balance."""
    p = run.parallel
    seq = run.data.length
    if p.cp > 1 and seq % (2 * p.cp):
        step = math.lcm(2 * p.cp, p.tp * p.cp if p.sequence_parallel else 1)
        near = multiples(seq, step)
        rule = (
            f"a sequence of {seq} does not divide into 2 * cp {p.cp} = {2 * p.cp} chunks; nearest:"
            f" {listed(near)}"
        )
        fixes: tuple[Change, ...] = tuple({"data.seq_length": n} for n in near)
        yield Finding(
            "MT117",
            "data.seq_length",
            rule,
            (*fixes, {"parallel.cp": 1}, {"parallel.cp": 1, "parallel.ranks": None}),
        )


@rule(
    Code("MT118", example="parallel.overlap_param_gather=true"),
    reads=(
        "parallel.overlap_param_gather parallel.distributed_optimizer parallel.overlap_grad_reduce"
    ),
)
def gather_overlap(run: RunConfig) -> Iterator[Finding]:
    """Only the distributed optimizer gathers weights, and the overlapped gather needs overlapped
    gradients.
    """
    p = run.parallel
    if not p.overlap_param_gather:
        return
    need = [k for k in ("distributed_optimizer", "overlap_grad_reduce") if not getattr(p, k)]
    if need:
        rule = (
            f"overlapping the gather of weights needs {' and '.join(f'parallel.{k}' for k in need)}"
        )
        on: Change = {f"parallel.{k}": True for k in need}
        yield Finding(
            "MT118",
            "parallel.overlap_param_gather",
            rule,
            (on, {"parallel.overlap_param_gather": False}),
        )


@rule(Code("MT119", example="cluster.device=cdua"), reads="cluster.device", disk=True)
def device_name(run: RunConfig) -> Iterator[Finding]:
    """mtrain or an installed plug-in provides the device."""
    device = run.cluster.device
    if device == AUTO or device in SHIPPED:
        return
    known = [AUTO, *names()]
    if device not in known:
        near = get_close_matches(device, known, n=1)
        rule = f"there is no such device here; devices: {', '.join(known)} (a plug-in adds one)"
        changes: list[Change] = [
            {"cluster.device": name} for name in dict.fromkeys([*near, AUTO, CPU.name])
        ]
        yield Finding("MT119", "cluster.device", rule, tuple(changes))


RULES = (
    device_name,
    tp_head_divisibility,
    tp_query_groups,
    tp_mlp_divisibility,
    tp_shared_expert_divisibility,
    tp_vocabulary_divisibility,
    grid_size,
    cluster_size,
    sequence_parallel,
    context_parallel,
    gather_overlap,
)
