"""What an import notes beside the recipe: what Megatron-LM must be told and was not, and layouts
that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtrain.config.compose.dump import spell
from mtrain.config.machine.devices import AUTO
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.config.resolve.watch import read_from, touches
from mtrain.config.schema.run import RunConfig
from mtrain.recipes.megatron.arguments import Draft

_NO_MACHINE = Machine(cpu_cores=1, memory_bytes=0)


def unsaid(d: Draft, run: RunConfig, extra: Sequence[str], left: Sequence[str]) -> list[str]:
    """Notes on what Megatron-LM insists on being told and was not: what it becomes, and why.

    `left` are keys that are still to be filled in; what follows from them, or from the machine, is
    not known yet.
    """
    keys = ("trainer.train_iters", "optim.lr", "data.seq_length", "trainer.global_batch_size")
    made_from: dict[str, frozenset[str]] = {}
    why: dict[str, str] = {}
    unknown = [*left, *(["cluster.device"] if run.cluster.device == AUTO else [])]
    values = resolve(run, _NO_MACHINE, made_from=made_from, why=why).flat()

    def becomes(key: str) -> str:
        if touches(read_from([key], made_from), unknown):
            return "chosen where it runs"
        return spell(values[key]) + (f", {why[key]}" if key in why else "")

    missing = [
        key
        for key in keys
        if key not in [*d, *left] and not any(word.startswith(f"{key}=") for word in extra)
    ]
    return [f"{key} is not said; it is {becomes(key)}" for key in missing]


def too_few(run: RunConfig) -> list[str]:
    """Return a note where the script starts fewer processes than its layout has."""
    p = run.parallel
    per_node = run.cluster.devices_per_node
    ranks = p.ranks or (run.cluster.nodes * per_node if per_node else None)
    etp = p.etp or p.tp
    needed, axes = max(
        (p.model_ranks, f"tp {p.tp} x cp {p.cp} x pp {p.pp}"),
        (p.ep * etp * p.pp, f"ep {p.ep} x etp {etp} x pp {p.pp}"),
        key=lambda pair: pair[0],
    )
    if ranks is None or ranks >= needed:
        return []
    nodes = f": say cluster.nodes={-(-needed // per_node)}" if per_node else ""
    return [
        f"the script starts {ranks} processes, and its layout has at least {axes} = {needed}{nodes}"
    ]
