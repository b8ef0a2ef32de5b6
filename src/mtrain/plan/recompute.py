"""The choice of recomputation: the cheapest modules or layers with which a step fits.

megatron-core takes one choice for all pipeline stages, so the stage with the highest peak decides.
Every candidate is planned in full: its peak from the list of saved tensors, its cost from the time
of the operations that are done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import Any

from mtrain.config.compose.dump import override
from mtrain.config.resolve.stages import stages
from mtrain.config.rules import findings
from mtrain.config.rules.sharding import recomputable
from mtrain.config.schema.parallel import RecomputeModule
from mtrain.config.schema.run import RunConfig
from mtrain.plan.rank import worst_stage
from mtrain.plan.time.step import step_time, step_work, unknown
from mtrain.plan.time.work import Work

KEYS = ("granularity", "modules", "method", "num_layers")
Modules = tuple[RecomputeModule, ...]
PARTS_OF_MOE = frozenset({"moe_act", "shared_experts"})
# A set of modules is planned if the bytes that each frees by itself add up this near to the room.
LIKELY = 1.1
# FLOPs that a device computes while it moves a byte, where its rates are not known: those of an
# H100 in bf16.
FLOPS_PER_BYTE = 300


@dataclass(frozen=True)
class Way:
    """A way to recompute, applied to a run."""

    run: RunConfig

    @property
    def change(self) -> dict[str, Any]:
        """Return its keys and their values."""
        again = self.run.parallel.recompute
        return {f"parallel.recompute.{key}": getattr(again, key) for key in KEYS}

    @property
    def words(self) -> str:
        """Return the recomputation in words."""
        again = self.run.parallel.recompute
        if again.granularity == "selective":
            return " ".join(again.modules or ("core_attn",))
        if again.granularity != "full":
            return "nothing"
        if again.method == "block":
            layers = again.num_layers or 1
            return f"{layers} layer{'s' * (layers > 1)} of a stage"
        size = again.num_layers or 1
        return "all layers" if size == 1 else f"all layers, in groups of {size}"

    @property
    def overrides(self) -> str:
        """Return it as overrides of a command line."""
        return " ".join(override(k, v) for k, v in self.change.items() if v is not None)

    @cached_property
    def peak(self) -> int:
        """Return the bytes of the stage with the highest peak."""
        return worst_stage(self.run).peak

    @cached_property
    def cost(self) -> float:
        """Return the seconds of a step; where the rates of the device are not known, a measure of
        the work of the slowest stage that only ways of the same run can be compared by.
        """
        if unknown(self.run):
            return max(map(_amount, step_work(self.run).stages))
        return step_time(self.run).seconds

    @cached_property
    def legal(self) -> bool:
        """Return whether it keeps the rules."""
        return not any(found.severity == "error" for found in findings(self.run))


def _amount(work: Work) -> float:
    products = 2 * sum(one.product.flops * n for one, n in work.backward.items())
    products += sum(one.product.flops * n for one, n in work.forward.items())
    attention = sum(pairs.flops * n for pairs, n in work.attends.items())
    return products + attention + FLOPS_PER_BYTE * work.moved


def way(run: RunConfig, granularity: str, **keys: Any) -> Way:
    """Return a run with another way to recompute."""
    p = run.parallel
    update = {**dict.fromkeys(KEYS), "granularity": granularity, **keys}
    again = p.recompute.model_copy(update=update)
    return Way(run.model_copy(update={"parallel": p.model_copy(update={"recompute": again})}))


def cheapest(run: RunConfig, room: float) -> Way | None:
    """Return the way with which a step takes at most `room` bytes and the least time; None if no
    way suffices.

    Raises:
        ValueError: the family does not say what a stage computes, or stages do not fit the model.
    """
    nothing = way(run, "none")
    if nothing.peak <= room:
        return nothing
    found = [_modules(run, nothing, room), _layers(run, room), _first(_all_layers(run), room)]
    return min((one for one in found if one is not None), key=lambda one: one.cost, default=None)


def frontier(run: RunConfig) -> list[Way]:
    """Return the ways of which each next one needs less memory and more time, from nothing on.

    Of sets of modules, these are the ones that add the module with the cheapest bytes next; of
    layers of a stage, quarters.

    Raises:
        ValueError: the family does not say what a stage computes, or stages do not fit the model.
    """
    nothing = way(run, "none")
    every = [way(run, "selective", modules=some) for some in _rising(run, nothing)]
    layers = most_layers(run)
    quarters = sorted({layers // 4, layers // 2, 3 * layers // 4} - {0, layers})
    every += [way(run, "full", method="block", num_layers=number) for number in quarters]
    every += _all_layers(run)
    # The run's own one stands among them, whatever it is.
    every += [Way(run)]
    kept = [nothing]
    for one in sorted(every, key=lambda one: (one.cost, one.peak)):
        if one.peak < kept[-1].peak and one.legal:
            kept.append(one)
    return kept


def _rising(run: RunConfig, nothing: Way) -> Iterator[Modules]:
    """Yield sets of modules, each with one module more; parts of `moe` make way for it."""
    each = {module: way(run, "selective", modules=(module,)) for module in recomputable(run)}

    def price(module: RecomputeModule) -> float:
        freed = max(1, nothing.peak - each[module].peak)
        return (each[module].cost - nothing.cost) / freed

    order = sorted(each, key=price)
    some: Modules = ()
    for module in order:
        yield (module,)
        left = tuple(one for one in some if module != "moe" or one not in PARTS_OF_MOE)
        if module not in PARTS_OF_MOE or "moe" not in some:
            some = *left, module
            yield some


def module_sets(run: RunConfig) -> list[Modules]:
    """Return the sets of modules that may be recomputed; `moe` contains its parts."""
    there = recomputable(run)
    sets = chain.from_iterable(combinations(there, n) for n in range(1, len(there) + 1))
    return [some for some in sets if "moe" not in some or not PARTS_OF_MOE & set(some)]


def _modules(run: RunConfig, nothing: Way, room: float) -> Way | None:
    """Return the cheapest modules that fit; the costs of several are taken to add up."""
    each = {module: way(run, "selective", modules=(module,)) for module in recomputable(run)}

    def adds(some: Modules) -> float:
        return sum(each[module].cost - nothing.cost for module in some)

    def needs(some: Modules) -> int:
        return nothing.peak - sum(nothing.peak - each[module].peak for module in some)

    likely = [some for some in module_sets(run) if needs(some) <= LIKELY * room]
    sets = sorted(likely, key=adds)
    return _first((way(run, "selective", modules=some) for some in sets), room)


def _first(ways: Iterable[Way], room: float) -> Way | None:
    return next((one for one in ways if one.peak <= room and one.legal), None)


def _layers(run: RunConfig, room: float) -> Way | None:
    """Return the fewest layers of every stage that have to be recomputed whole."""
    low = 1
    high = most_layers(run)
    best: Way | None = None
    while low <= high:
        middle = (low + high) // 2
        tried = way(run, "full", method="block", num_layers=middle)
        if tried.peak <= room:
            best = tried
            high = middle - 1
        else:
            low = middle + 1
    return best if best is not None and best.legal else None


def _all_layers(run: RunConfig) -> Iterator[Way]:
    """Yield all layers, one by one and in groups, the larger of which keep fewer inputs."""
    layers = most_layers(run)
    for size in (1, 2, 4, 8):
        if size == 1 or size <= layers // 2:
            yield way(run, "full", method="uniform", num_layers=size)


def most_layers(run: RunConfig) -> int:
    """Return the layers of the (virtual) stage that has the most."""
    return max((len(stage.layers) for stage in stages(run)), default=0)
