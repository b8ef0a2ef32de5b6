"""`prove`: is the sharded run the same as one rank's?"""

from __future__ import annotations

from mtrain import api
from mtrain.api import load
from mtrain.config.engine.kernels import summary
from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.run import RunConfig
from mtrain.errors import say, say_page
from mtrain.launching.prove import Comparison, in_words, one_at_a_time, table
from mtrain.layout.grid import RankGrid
from mtrain.loading.configuration import say_replaced
from mtrain.plan.count import parameters
from mtrain.plan.shrink import differences
from mtrain.units import count

# The exit code of a layout that differs: a training fault.
FAULT = 5
# Modules with wrong dropout that are printed.
MOST_MASKS = 5


def run(words: list[str]) -> int:
    """Prove the layout that `words` describe, and print every comparison; return the exit code."""
    loaded = load(words)
    say_replaced(loaded)
    proof = api.prove(loaded, before=lambda small: _announce(loaded.run, small), after=_report)
    for module, problem in proof.dropout[:MOST_MASKS]:
        say_page(f"dropout: {module}: {problem}")
    if proof.drew and not proof.dropout:
        say_page("dropout: ranks drop alike what each of them holds whole, and nothing else alike")
    if proof.equal:
        say_page("proven: the layout computes what one rank computes")
    else:
        say_page("NOT equal: the layout computes something else")
    return 0 if proof.equal else FAULT


def _announce(full: RunConfig, small: RunConfig) -> None:
    """Print the layout, its size and its kernels before it is trained."""
    words = small.precision.words
    layouts = f"{_layout(small)} against {reference(small)}"
    say(f"{full.model.name}: {layouts}, {words}, {small.trainer.steps} steps")
    if small.precision.format == "fp32" and small.precision.quantized is None:
        size = count(parameters(small.model))
        say(f"shrunk to {size} parameters: {'; '.join(differences(full, small))}")
    say(f"kernels: {summary(small)}")


def _report(comparison: Comparison) -> None:
    """Print the largest errors of a comparison, and the module that differs."""
    say_page(table(comparison.rows))
    if any(row.error for row in comparison.rows):
        say(f"not bitwise, because {why_not_bitwise(comparison.run)}")
    if comparison.is_located:
        say_page(in_words(comparison.difference))


def why_not_bitwise(run: RunConfig) -> str:
    """Name the operations that a layout orders otherwise than one rank."""
    p = run.parallel
    grid = RankGrid.of(run)
    reasons = {
        "tp adds up parts of each product over ranks": p.tp > 1,
        "cp adds up parts of the sequence": p.cp > 1,
        "dp adds up gradients of micro-batches in another order": grid.dp > 1,
        "ep and etp add up tokens of an expert in another order": (
            run.model.moe is not None and p.ep * grid.etp > 1
        ),
        "pp adds up the norm by stages, and gradients of weights that two stages share": p.pp > 1,
        "the optimizer works on host memory with another order of operations": (
            run.optim.cpu_offload > 0
        ),
        "half a bit of bf16 decides which expert a token visits": (
            run.precision.dtype == "bf16" and run.model.moe is not None
        ),
    }
    return (
        "; ".join(reason for reason, applies in reasons.items() if applies)
        or "of an unknown reason"
    )


def reference(small: RunConfig) -> str:
    """Name what a layout is compared with."""
    if not small.data.packed:
        return "one rank"
    if one_at_a_time(small):
        return "one rank with one document at a time"
    who = "the router" if small.precision.quantized is None else "a scale of FP8"
    return f"one rank that packs too, since {who} looks at all tokens of a micro-batch"


def _layout(small: RunConfig) -> str:
    grid = RankGrid.of(small)
    p = small.parallel
    more = {
        f"vpp{p.vpp}": p.vpp > 1,
        f"etp{grid.etp}": small.model.moe is not None and grid.etp != grid.tp,
        "sequence parallel": p.sequence_parallel,
        f"{p.cp_comm_type} context": p.cp > 1,
        "distributed optimizer": p.distributed_optimizer,
        f"fsdp {p.fsdp}": p.fsdp != "none",
        f"{p.hsdp_replicas} replicas": p.hsdp_replicas > 1,
        f"{p.recompute.granularity} recomputation": p.recompute.granularity not in (None, "none"),
        "packed": small.data.packed,
    }
    words = [word for word, there in more.items() if there]
    device = "" if facts_of(small.cluster.device).on_host else f"{small.cluster.device} "
    return f"{grid} on {grid.world} {device}ranks" + (f" ({', '.join(words)})" if words else "")
