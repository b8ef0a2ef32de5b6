"""`prove`: is the sharded run the same as one rank's? Trains both from the same weights and samples
and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.cli.setup import load, say_replaced
from mtrain.config.engine.kernels import OURS, summary
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.resolution import Machine
from mtrain.config.rules import check
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, say, say_page
from mtrain.launching import local, preflight
from mtrain.launching.signals import scratch_folder
from mtrain.layout.grid import RankGrid
from mtrain.plan.count import parameters
from mtrain.plan.shrink import (
    alone,
    by_document,
    differences,
    in_eight_bits,
    on_device_of,
    shrink,
    without_chance,
)
from mtrain.units import count

if TYPE_CHECKING:
    from mtrain.train.verify.first_divergence import Difference
    from mtrain.train.verify.prove import Row

STEPS = 4
MAX_RANKS = preflight.MOST_REHEARSED
EIGHT_BITS = "fp8"
"""Linear layers and experts in FP8, by their emulation in plain torch or Triton's interpreter; all
else in fp32.
"""
UNCOMPARED = float("inf")
TOLERANCES = {
    "fp32": {"loss": 1e-5, "gradient norm": 1e-5, "gradient": 1e-4, "weight": 1e-3},
    "bf16": {"loss": 2e-3, "gradient norm": 2e-2, "gradient": 5e-2, "weight": 5e-2},
    # A bias begins at 0 and its first steps are signs of gradients: where those are small, the
    # signs of rounding.
    "bf16 with biases": {"loss": 2e-3, "gradient norm": 2e-2, "gradient": 5e-2, "weight": 1e-1},
    # Half a bit decides which expert a token visits: single gradients of experts are then of other
    # tokens.
    "bf16 with experts": {
        "loss": 5e-3,
        "gradient norm": 5e-2,
        "gradient": UNCOMPARED,
        "weight": UNCOMPARED,
    },
    # Rounding in fp32 tips single elements to the other of two numbers of 8 bits.
    EIGHT_BITS: {"loss": 2e-3, "gradient norm": 1e-3, "gradient": 5e-3, "weight": 5e-2},
}
MODULE = {"fp32": 3e-5, "bf16": 1e-1, EIGHT_BITS: 1e-1}
"""What a token that passes a module may differ by in the first step, relative to the size of a
token.
"""
MOST_MASKS = 5
"""Modules with wrong dropout that are said."""
FAULT = 5
"""The exit code of a layout that is not equal: a training fault."""


def run(argv: list[str]) -> int:
    """Prove the layout that `argv` describes, at a size that fits this machine; returns the exit
    code.

    In fp32, where an error of the layout shows above the rounding; a bf16 run is then proven in
    bf16 too, and FP8 of our layers, emulated in plain torch, with all else in fp32. Kernels by
    Triton are proven themselves where its interpreter is on (TRITON_INTERPRET=1), and portable ones
    in their place where it is not. Dropout and the noise of routers are off, and listed so: other
    layouts draw other numbers. Which ranks drop alike is looked at apart. The layout is resumed
    from a checkpoint after half of the steps, one rank is not. After a failure both run again and
    the first module that computes something else is named.
    """
    loaded = load(argv)
    say_replaced(loaded)
    full = loaded.run
    equal = True
    for dtype in formats(full):
        small = comparable(full, argv, STEPS, dtype)
        words = small.precision.words
        say(
            f"{full.model.name}: {_layout(small)} against {_reference(small)}, {words}, {STEPS}"
            " steps"
        )
        if dtype == "fp32":
            say(
                f"shrunk to {count(parameters(small.model))} parameters:"
                f" {'; '.join(differences(full, small))}"
            )
        say(f"kernels: {summary(small)}")
        rows = compared(small)
        say_page(table(rows))
        if any(row.error for row in rows):
            say(f"not bitwise, because {why_not_bitwise(small)}")
        if equal and not all(row.equal for row in rows):
            equal = False
            say_page(in_words(located(small)))
    if draws(full):
        problems = masks(shrunk(full, argv, 1, "fp32"))
        for module, what in problems[:MOST_MASKS]:
            say_page(f"dropout: {module}: {what}")
        equal = equal and not problems
        if not problems:
            say_page(
                "dropout: ranks drop alike what each of them holds whole, and nothing else alike"
            )
    say_page(
        "proven: the layout computes what one rank computes"
        if equal
        else "NOT equal: the layout computes something else"
    )
    return 0 if equal else FAULT


def formats(full: RunConfig) -> list[str]:
    """Return the number formats that a run is proven in."""
    half = ["bf16"] if full.precision.dtype == "bf16" else []
    ours = full.precision.quantized in OURS and full.kernels.linear != "te"
    return ["fp32", *half, *([EIGHT_BITS] if ours else [])]


def comparable(full: RunConfig, argv: list[str], steps: int, dtype: str) -> RunConfig:
    """`shrunk`, with nothing left that another layout does otherwise; of packed samples, nothing
    that looks beyond a document, where that can be.
    """
    if dtype == EIGHT_BITS:  # a scale is that of a micro-batch: no document has one of its own
        small = without_chance(shrunk(full, argv, steps, "fp32", emulated=True))
        return in_eight_bits(small, full, interpreted=Machine.here().triton_interpreted)
    small = without_chance(shrunk(full, argv, steps, dtype))
    return (by_document(small) or small) if small.data.packed else small


def shrunk(
    full: RunConfig, argv: list[str], steps: int, dtype: str, *, emulated: bool = False
) -> RunConfig:
    """Return the layout of `full`, which `argv` describes, small enough for this machine.

    It runs on the devices of `full` where this machine has enough of them. Otherwise, and where a
    format is `emulated`, it runs on the CPU.

    Raises:
        ConfigError: what is left of the configuration breaks a rule.
        BadEnvironment: the layout has more ranks than this machine may start.
    """
    machine = Machine.here()
    small = shrink(
        full, steps=steps, dtype=dtype, max_ranks=MAX_RANKS, interpreted=machine.triton_interpreted
    )
    if machine.gpus and not facts_of(full.cluster.device).on_host and not emulated:
        fewest = shrink(full, steps=steps, dtype=dtype, max_ranks=min(MAX_RANKS, machine.gpus))
        if _degrees(fewest) == _degrees(small):
            small = on_device_of(full, fewest)
        else:
            ranks = RankGrid.of(small).world
            say(
                f"on the CPU: the layout has {ranks} ranks, and this machine {machine.gpus} of"
                f" {full.cluster.device}"
            )
    problems = [p for p in check(small) if p.severity == "error"]
    if problems:
        raise ConfigError(problems)
    ranks = RankGrid.of(small).world
    if ranks > MAX_RANKS:
        raise BadEnvironment(
            f"the layout needs {ranks} processes; at most {MAX_RANKS} are started on one machine"
        )
    preflight.check(small, argv, machine)
    return small


def _degrees(run: RunConfig) -> tuple[int, int, int]:
    """Return the degrees that a shrunk layout has to keep, so that it is still the layout that is
    proven.
    """
    return run.parallel.model_ranks, run.parallel.ep, RankGrid.of(run).etp


def compared(small: RunConfig) -> list[Row]:
    """Train `small` as laid out, resumed in the middle, and on one rank without that, and compare
    both.
    """
    with _observed(small) as (one, many):
        local.install_reader()
        from mtrain.train.verify.prove import compare

        centered = small.model.layernorm_zero_centered_gamma
        return compare(one, many, small.trainer.steps, _tolerances(small), zero_centered=centered)


def located(small: RunConfig) -> Difference | None:
    """Return the first module, in the order of execution, that computes something else than on one
    rank; None: none is found. Trains both again, with all that passes each module kept.
    """
    with _observed(small, traced=True) as (one, many):
        local.install_reader()
        from mtrain.train.verify.first_divergence import Bounds, first_divergence

        told = _tolerances(small)
        dtype = EIGHT_BITS if small.precision.quantized else small.precision.format
        bounds = Bounds(
            MODULE[dtype], told["loss"], told["gradient"], told["gradient norm"], told["weight"]
        )
        return first_divergence(one, many, small.trainer.steps, bounds)


def draws(full: RunConfig) -> bool:
    """Return whether several ranks of a run have dropout in the model or its adapters."""
    m = full.model
    adapters = full.peft
    rate = (
        m.hidden_dropout or m.attention_dropout or (adapters.kind is not None and adapters.dropout)
    )
    return bool(rate) and RankGrid.of(full).world > 1


def masks(small: RunConfig) -> list[tuple[str, str]]:
    """Return modules whose dropout is wrong over ranks, with what is wrong; see
    `train.dropped.wrong_masks`.
    """
    with scratch_folder("mtrain-prove-") as scratch:
        local.observe_masks(small, scratch)
        local.install_reader()
        from mtrain.train.verify.dropout_compare import wrong_masks

        return wrong_masks(scratch, small)


def in_words(found: Difference | None) -> str:
    """Return the line that says where to look."""
    if found is None:
        return (
            "where: nothing that passes the modules differs by more than rounding, nor do gradients"
            " and weights"
        )
    return (
        f"where: {found.module}, {found.way} of step {found.step}: {found.what} (relative error"
        f" {found.error:.1e})"
    )


@contextmanager
def _observed(small: RunConfig, *, traced: bool = False) -> Iterator[tuple[Path, Path]]:
    """Folders in which one rank and the layout left what they computed."""
    with scratch_folder("mtrain-prove-") as scratch:
        one = scratch / "one"
        many = scratch / "many"
        one.mkdir()
        many.mkdir()
        local.observe(small, many, resumed=True, traced=traced)
        local.observe(alone(small), one, by_document=_one_at_a_time(small), traced=traced)
        yield one, many


def _one_at_a_time(small: RunConfig) -> bool:
    """Return whether one rank runs a packed sample's documents alone; a scale of FP8 or a router
    looks at all of them.
    """
    return small.data.packed and small.precision.quantized is None and by_document(small) == small


def _tolerances(small: RunConfig) -> dict[str, float]:
    dtype = small.precision.format
    if small.precision.quantized is not None:
        return TOLERANCES[EIGHT_BITS]
    if dtype == "bf16" and small.model.moe is not None:
        return TOLERANCES["bf16 with experts"]
    biases = (
        small.model.add_bias_linear
        or small.model.add_qkv_bias
        or small.model.norm_placement == "post_residual"
    )
    if dtype == "bf16" and biases:
        return TOLERANCES["bf16 with biases"]
    return TOLERANCES[dtype]


def table(rows: Sequence[Row]) -> str:
    """Return largest relative errors, where they are, and what they may be."""
    wide = max(len(row.what) for row in rows) + 1
    lines = [f"{'':<{wide}} {'largest relative error':<24} {'tolerance':<10} where"]
    for row in rows:
        report = "bitwise equal" if row.error == 0 else f"{row.error:.1e}"
        bound = "not compared" if row.tolerance == UNCOMPARED else f"{row.tolerance:.0e}"
        mark = "" if row.equal else "  <- differs"
        lines.append(
            f"{row.what:<{wide}} {report:<24} {bound:<10} {row.where if row.error else ''}{mark}"
        )
    return "\n".join(lines)


def why_not_bitwise(run: RunConfig) -> str:
    """What a layout does in another order than one rank."""
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


def _reference(small: RunConfig) -> str:
    if not small.data.packed:
        return "one rank"
    if _one_at_a_time(small):
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
        f"{p.recompute.granularity} recomputation": p.recompute.granularity != "none",
        "packed": small.data.packed,
    }
    words = [word for word, there in more.items() if there]
    device = "" if facts_of(small.cluster.device).on_host else f"{small.cluster.device} "
    return f"{grid} on {grid.world} {device}ranks" + (f" ({', '.join(words)})" if words else "")
