"""A layout against one rank: both train from the same weights and samples, and are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain.config.engine.kernels import OURS
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.resolution import Machine
from mtrain.config.rules import check
from mtrain.config.schema.run import RunConfig
from mtrain.errors import BadEnvironment, ConfigError, say
from mtrain.launching import local, preflight
from mtrain.launching.signals import scratch_folder
from mtrain.layout.grid import RankGrid
from mtrain.plan.shrink import (
    alone,
    by_document,
    in_eight_bits,
    on_device_of,
    shrink,
    without_chance,
)

if TYPE_CHECKING:
    from mtrain.train.verify.first_divergence import Difference
    from mtrain.train.verify.prove import Row

STEPS = 4
MAX_RANKS = preflight.MOST_REHEARSED
# Linear layers and experts in FP8, by their emulation in plain torch or Triton's interpreter; all
# else in fp32.
EIGHT_BITS = "fp8"
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
# The largest difference of a module's output in the first step, relative to the size of a token
MODULE = {"fp32": 3e-5, "bf16": 1e-1, EIGHT_BITS: 1e-1}


@dataclass(frozen=True)
class Comparison:
    """One number format of a proof: the layout against one rank."""

    run: RunConfig
    """The shrunk run."""
    rows: tuple[Row, ...]
    """Largest errors of losses, norms, gradients and weights, with their tolerances."""
    is_located: bool = False
    """True if both ran again to find the first module that differs."""
    difference: Difference | None = None
    """First module that differs; None if no module differs by more than rounding."""

    @property
    def equal(self) -> bool:
        """Return whether every error is within its tolerance."""
        return all(row.equal for row in self.rows)


@dataclass(frozen=True)
class Proof:
    """The result of `prove`."""

    comparisons: tuple[Comparison, ...]
    drew: bool
    """True if several ranks of the run have dropout, so that their masks were compared."""
    dropout: tuple[tuple[str, str], ...] = ()
    """Modules with wrong dropout over ranks, each with its problem."""

    @property
    def equal(self) -> bool:
        """Return whether the layout and one rank compute the same."""
        return all(one.equal for one in self.comparisons) and not self.dropout


def prove(
    full: RunConfig,
    argv: Sequence[str],
    *,
    before: Callable[[RunConfig], None] | None = None,
    after: Callable[[Comparison], None] | None = None,
) -> Proof:
    """Compare the layout of `full`, which `argv` describes, with one rank, at a size that fits this
    machine.

    Every run is compared in fp32, where an error of the layout exceeds the rounding; a bf16 run
    also in bf16, and a run whose own layers are in FP8 also with those emulated in plain torch and
    the rest in fp32. Triton kernels run if Triton's interpreter is on (TRITON_INTERPRET=1), and
    portable ones otherwise. Dropout and the noise of routers are off, because another layout draws
    other numbers; the masks of the ranks are compared separately. The layout resumes from a
    checkpoint after half of the steps, the one rank does not. After the first failure both run
    again to find the first module that differs.

    Args:
        full: the resolved run.
        argv: its command line, for messages.
        before: called with the shrunk run of each format before it is trained.
        after: called with each comparison.

    Raises:
        ConfigError: the shrunk configuration breaks a rule.
        BadEnvironment: the layout has more ranks than this machine may start.
    """
    comparisons: list[Comparison] = []
    for dtype in formats(full):
        small = comparable(full, argv, STEPS, dtype)
        if before is not None:
            before(small)
        comparison = Comparison(small, tuple(compared(small)))
        if not comparison.equal and all(one.equal for one in comparisons):
            comparison = replace(comparison, is_located=True, difference=located(small))
        comparisons.append(comparison)
        if after is not None:
            after(comparison)
    if not draws(full):
        return Proof(tuple(comparisons), drew=False)
    problems = masks(shrunk(full, argv, 1, "fp32"))
    return Proof(tuple(comparisons), drew=True, dropout=tuple(problems))


def formats(full: RunConfig) -> list[str]:
    """Return the number formats that a run is proven in."""
    half = ["bf16"] if full.precision.dtype == "bf16" else []
    ours = full.precision.quantized in OURS and full.kernels.linear != "te"
    return ["fp32", *half, *([EIGHT_BITS] if ours else [])]


def comparable(full: RunConfig, argv: Sequence[str], steps: int, dtype: str) -> RunConfig:
    """Return the `shrunk` run without anything that depends on the layout, such as dropout.

    If possible, no operation of packed samples sees more than one document.
    """
    # a scale of FP8 is computed over a micro-batch, so documents cannot be compared one by one
    if dtype == EIGHT_BITS:
        small = without_chance(shrunk(full, argv, steps, "fp32", emulated=True))
        return in_eight_bits(small, full, interpreted=Machine.here().triton_interpreted)
    small = without_chance(shrunk(full, argv, steps, dtype))
    if small.data.packed:
        return by_document(small) or small
    return small


def shrunk(
    full: RunConfig, argv: Sequence[str], steps: int, dtype: str, *, emulated: bool = False
) -> RunConfig:
    """Return the layout of `full`, which `argv` describes, small enough for this machine.

    It runs on the devices of `full` if this machine has enough of them. Otherwise, and if a format
    is `emulated`, it runs on the CPU.

    Raises:
        ConfigError: the shrunk configuration breaks a rule.
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
    """Return the degrees that a smaller layout must keep to prove the same layout."""
    return run.parallel.model_ranks, run.parallel.ep, RankGrid.of(run).etp


def compared(small: RunConfig) -> list[Row]:
    """Compare `small` in its layout, resumed in the middle, with one rank without a stop."""
    with observed(small) as (one, many):
        local.install_reader()
        from mtrain.train.verify.prove import compare

        centered = small.model.layernorm_zero_centered_gamma
        return compare(one, many, small.trainer.steps, tolerances_of(small), zero_centered=centered)


def located(small: RunConfig) -> Difference | None:
    """Return the first module, in the order of execution, that differs from one rank, or None.

    Both train again, with the inputs and outputs of each module recorded.
    """
    with observed(small, traced=True) as (one, many):
        local.install_reader()
        from mtrain.train.verify.first_divergence import Bounds, first_divergence

        limits = tolerances_of(small)
        dtype = EIGHT_BITS if small.precision.quantized else small.precision.format
        bounds = Bounds(
            MODULE[dtype],
            limits["loss"],
            limits["gradient"],
            limits["gradient norm"],
            limits["weight"],
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
    """Return modules whose dropout is wrong over ranks, each with its problem.

    See `train.verify.dropout_compare.wrong_masks`.
    """
    with scratch_folder("mtrain-prove-") as scratch:
        local.observe_masks(small, scratch)
        local.install_reader()
        from mtrain.train.verify.dropout_compare import wrong_masks

        return wrong_masks(scratch, small)


@contextmanager
def observed(small: RunConfig, *, traced: bool = False) -> Iterator[tuple[Path, Path]]:
    """Yield the folders with the results of one rank and of the layout."""
    with scratch_folder("mtrain-prove-") as scratch:
        one = scratch / "one"
        many = scratch / "many"
        one.mkdir()
        many.mkdir()
        local.observe(small, many, resumed=True, traced=traced)
        local.observe(alone(small), one, by_document=one_at_a_time(small), traced=traced)
        yield one, many


def one_at_a_time(small: RunConfig) -> bool:
    """Return whether one rank runs each document of a sample separately.

    It does not if a scale of FP8 or a router sees all of them.
    """
    return small.data.packed and small.precision.quantized is None and by_document(small) == small


def tolerances_of(small: RunConfig) -> dict[str, float]:
    """Return the accepted relative differences of a run in its number format."""
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


def in_words(difference: Difference | None) -> str:
    """Return the line that names the first module that differs."""
    if difference is None:
        return (
            "where: no input, output, gradient or weight of a module differs by more than rounding"
        )
    return (
        f"where: {difference.module}, {difference.way} of step {difference.step}:"
        f" {difference.what} (relative error {difference.error:.1e})"
    )


def table(rows: Sequence[Row]) -> str:
    """Return the largest relative errors, where they occur, and their tolerances."""
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
