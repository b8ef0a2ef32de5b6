"""The space of layouts: axis after axis, each with the values that it may have given those before
it.

Nothing here decides what is legal: the rules of `config` do, each as soon as all that it reads is
chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from operator import attrgetter
from typing import Any, TypeVar

from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.batches import stages as batch_stages
from mtrain.config.resolve.defaults import STEPS, on_a_cpu
from mtrain.config.resolve.watch import Run
from mtrain.config.rules import all_rules
from mtrain.config.rules.rule import Rule
from mtrain.config.schema.base import Section
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.count import active_parameters

Sizes = tuple[int, ...]


def splits(layers: int, pp: int, vpp: int, ends: tuple[float, float]) -> list[Sizes | None]:
    """Return stage sizes, in the order of the model: equal ones (None) where they are whole, and
    balanced ones.

    `ends` are the work of the first and the last rank outside layers, in layers.
    """
    blocks = pp * vpp
    equal: list[Sizes | None] = [None] if layers % blocks == 0 else []
    if pp == 1:
        return equal
    sizes = balanced(layers, pp, vpp, *ends)
    whole = len(set(sizes)) == 1
    return equal if whole and equal else [*equal, sizes]


def balanced(layers: int, pp: int, vpp: int, first: float, last: float) -> Sizes:
    """Return stage sizes that minimise the slowest rank.

    `first` and `last` are the work of the first and the last rank outside layers, in layers.
    """
    held = [0] * pp
    more = [first, *[0.0] * (pp - 2), last]
    for _ in range(layers):
        # Each layer goes to the rank with the least work; of several, to the last one, which has
        # the fewest micro-batches in flight.
        rank = min(range(pp), key=lambda r: (held[r] + more[r], -r))
        held[rank] += 1
    sizes = [0] * (pp * vpp)
    for rank, number in enumerate(held):
        for chunk in range(vpp):
            share = number // vpp + (chunk < number % vpp if rank else chunk >= vpp - number % vpp)
            sizes[chunk * pp + rank] = share
    return tuple(sizes)


def ends_of(model: ModelConfig) -> tuple[float, float]:
    """Return the cost of embedding and loss in layers, by the weights that a token visits."""
    table = model.padded_vocab_size * model.hidden_size
    tables = 1 if model.tie_word_embeddings or model.head else 2
    layer = max(1.0, (active_parameters(model) - tables * table) / model.num_layers)
    again = model.mtp_num_layers or 0
    loss = 0.0 if model.head else table / layer
    return 0.0, loss * (1 + again) + again


S = TypeVar("S", bound=Section)
# Dotted key -> value.
Change = dict[str, Any]
AGAIN = "parallel.recompute"
# Axis -> its keys, in the order of choice: a rule is checked at the last axis that it reads, as
# soon as its keys are chosen.
AXES: Mapping[str, tuple[str, ...]] = {
    "shards": ("parallel.tp", "parallel.sequence_parallel", "parallel.ep", "parallel.etp"),
    "context": ("parallel.cp", "trainer.sample_tokens"),
    "micro": ("trainer.micro_batch_size",),
    "pipeline": ("parallel.pp", "parallel.vpp", "parallel.layers_per_stage"),
    "state": (
        "parallel.distributed_optimizer",
        "parallel.fsdp",
        "parallel.overlap_grad_reduce",
        "parallel.overlap_param_gather",
        "optim.cpu_offload",
    ),
    "recompute": tuple(
        f"{AGAIN}.{key}" for key in ("granularity", "modules", "method", "num_layers")
    ),
}
KEYS = tuple(key for keys in AXES.values() for key in keys)
# Keys that split layers into stages by hand; where one is set, tune keeps that split.
SPLIT = (
    "parallel.layers_per_stage",
    "parallel.pipeline_layout",
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split",
)
# Tokens of a micro-batch at most.
MOST_TOKENS = 1 << 16
# A batch that is a multiple of this is cut only by powers of two.
HALVED = 16
# Tokens of a sample that a context-parallel rank has at least.
LEAST_LENGTH = 1024


def changed(run: Run, change: Mapping[str, Any]) -> Run:
    """Return `run` with keys set to values of their types; none of them is validated."""
    sections: dict[str, Change] = {}
    for key, value in change.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    updates: Change = {}
    for section, values in sections.items():
        old = getattr(run, section)
        inner = {}
        for name in [name for name in values if "." in name]:
            inner[name.partition(".")[2]] = values.pop(name)
        if inner:
            values["recompute"] = _copy(old.recompute, inner)
        updates[section] = _copy(old, values)
    return _copy(run, updates)


def _copy(section: S, values: Mapping[str, Any]) -> S:
    """Return a copy as `model_copy` makes it, which takes ten times as long."""
    new = object.__new__(type(section))
    object.__setattr__(new, "__dict__", {**section.__dict__, **values})
    object.__setattr__(
        new, "__pydantic_fields_set__", section.__pydantic_fields_set__ | values.keys()
    )
    object.__setattr__(new, "__pydantic_extra__", None)
    object.__setattr__(new, "__pydantic_private__", None)
    return new


@cache
def rules_by_axis() -> dict[str, list[Rule]]:
    """Return the rules by the last axis that they read."""
    found: dict[str, list[Rule]] = {axis: [] for axis in ("", *AXES)}
    for rule in all_rules():
        if not rule.disk:
            read = [axis for axis, keys in AXES.items() if rule.reads_any(*keys)]
            found[read[-1] if read else ""].append(rule)
    return found


@cache
def keys_read(rule: Rule) -> list[tuple[Callable[[RunConfig], Any], str]]:
    """Return the chosen keys that a rule reads, each as its section and its name in it."""
    read = [key.rpartition(".") for key in KEYS if rule.reads_any(key)]
    return [(attrgetter(section), name) for section, _, name in read]


@dataclass(frozen=True)
class Space:
    """The layouts of a run that keep the keys that are set."""

    run: RunConfig
    """Resolved; its batch is that of every layout."""
    said: Mapping[str, Any]
    """Keys that are kept, with their values."""
    ends: Callable[[RunConfig], tuple[float, float]] = lambda run: ends_of(run.model)
    """The work of the first and the last rank of a pipeline outside layers, in layers."""

    def options(self, axis: str, run: RunConfig) -> Iterator[Change]:
        """Yield the values of an axis, with earlier ones as in `run`; the simplest first."""
        makers: dict[str, Callable[[RunConfig], Iterator[Change]]] = {
            "shards": self._shards,
            "context": self._context,
            "micro": self._micro,
            "pipeline": self._pipeline,
            "state": self._state,
            "recompute": self._recompute,
        }
        for change in makers[axis](run):
            if all(self.said.get(key, value) == value for key, value in change.items()):
                yield change

    def broken(self, axis: str, run: RunConfig) -> bool:
        """Return whether a rule that reads an axis, and no later one, refuses `run`."""
        return any(self._refuses(rule, run) for rule in rules_by_axis()[axis])

    def _refuses(self, rule: Rule, run: RunConfig) -> bool:
        """Return whether a rule refuses a run; ask it once for all runs with the same choices and
        values that it reads.
        """
        answers, keys = self._answers[rule]
        values = tuple([getattr(section(run), name) for section, name in keys])
        if values not in answers:
            answers[values] = any(found.severity == "error" for found in rule(run))
        return answers[values]

    @cached_property
    def _answers(
        self,
    ) -> dict[
        Rule, tuple[dict[tuple[Any, ...], bool], list[tuple[Callable[[RunConfig], Any], str]]]
    ]:
        """Return the cached findings of each rule, by the chosen keys that it reads."""
        return {rule: ({}, keys_read(rule)) for rules in rules_by_axis().values() for rule in rules}

    @cached_property
    def wrong(self) -> bool:
        """Return whether a rule that reads no chosen key refuses the run."""
        return any(
            found.severity == "error" for rule in rules_by_axis()[""] for found in rule(self.run)
        )

    def _of(self, key: str, values: list[Any]) -> list[Any]:
        return [self.said[key]] if key in self.said else values

    def _shards(self, run: RunConfig) -> Iterator[Change]:
        ranks = run.parallel.ranks
        moe = run.model.moe
        cluster = run.cluster
        fast = cluster.fast_link_devices or cluster.devices_per_node or ranks
        for tp in self._of("parallel.tp", divisors(ranks, min(ranks, fast))):
            experts = [1] if moe is None else divisors(moe.num_experts, ranks)
            for ep in self._of("parallel.ep", experts):
                for etp in self._of(
                    "parallel.etp", [None] if moe is None or tp == 1 else [1, None]
                ):
                    for sp in self._of("parallel.sequence_parallel", self._sequence(run, tp)):
                        yield dict(zip(AXES["shards"], (tp, sp, ep, etp), strict=True))

    @staticmethod
    def _sequence(run: RunConfig, tp: int) -> list[Any]:
        if tp == 1:
            return [False]
        return [True] if run.model.moe is not None else [True, False]

    def _context(self, run: RunConfig) -> Iterator[Change]:
        p = run.parallel
        most = max(1, run.data.length // LEAST_LENGTH)
        for cp in self._of("parallel.cp", divisors(p.ranks // p.tp, most)):
            change: Change = {"parallel.cp": cp}
            if "trainer.sample_tokens" not in self.said and run.trainer.sample_tokens and cp > 1:
                change["trainer.sample_tokens"] = 0
            yield change

    def _micro(self, run: RunConfig) -> Iterator[Change]:
        common = gcd(*(size for _, size in batch_stages(run)))
        sizes = divisors(common, max(1, MOST_TOKENS // run.data.length))
        least = run.together
        sizes = [n for n in sizes if n % least == 0] or [least]
        halves = [n for n in sizes if n & (n - 1) == 0]
        for micro in self._of(
            "trainer.micro_batch_size", [*reversed(sizes if common % HALVED else halves)]
        ):
            yield {"trainer.micro_batch_size": micro}

    def pipelines(self, run: RunConfig) -> Iterator[tuple[int, list[int]]]:
        """Yield ranks of a pipeline, with the virtual stages that each may have."""
        p = run.parallel
        layers = run.model.num_layers
        for pp in self._of("parallel.pp", divisors(p.ranks // (p.tp * p.cp), layers)):
            yield pp, self._of("parallel.vpp", chunks(layers, pp))

    def _pipeline(self, run: RunConfig) -> Iterator[Change]:
        for pp, chunked in self.pipelines(run):
            for vpp in chunked:
                ways = [None] if self.said.keys() & {*SPLIT} else self._splits(run, pp, vpp)
                for way in ways:
                    keep = {} if self.said.keys() & {*SPLIT} else {"parallel.layers_per_stage": way}
                    yield {"parallel.pp": pp, "parallel.vpp": vpp, **keep}

    def _splits(self, run: RunConfig, pp: int, vpp: int) -> list[tuple[int, ...] | None]:
        first, last = (round(end, 1) for end in self.ends(run))
        key = pp, vpp, first, last
        if key not in self._split:
            self._split[key] = splits(self.run.model.num_layers, pp, vpp, (first, last))
        return self._split[key]

    @cached_property
    def _split(self) -> dict[tuple[float, ...], list[tuple[int, ...] | None]]:
        return {}

    def _state(self, run: RunConfig) -> Iterator[Change]:
        p = run.parallel
        replicated = p.dp * p.cp > 1 or (run.model.moe is not None and p.tp > (p.etp or p.tp))
        kinds: list[Change] = [{"parallel.fsdp": "none", "parallel.distributed_optimizer": False}]
        if replicated or {"parallel.fsdp", "parallel.distributed_optimizer"} & self.said.keys():
            spread: Change = {"parallel.fsdp": "none", "parallel.distributed_optimizer": True}
            kinds.insert(1 if on_a_cpu(run) else 0, spread)
            other = "megatron" if "fsdp2" in OPTIMIZERS[run.optim.name].cannot else "fsdp2"
            for kind in self._of("parallel.fsdp", [other]):
                if kind != "none":
                    kinds.append({"parallel.fsdp": kind, "parallel.distributed_optimizer": False})
        offloads = [0.0] if run.cluster.host_link_gbps is None else [0.0, 1.0]
        for kind in kinds:
            parts = offloads if kind["parallel.fsdp"] == "none" else [0.0]
            for part in self._of("optim.cpu_offload", parts):
                yield {
                    **self._overlap(run, kind, replicated=p.dp * p.cp > 1),
                    "optim.cpu_offload": part,
                }

    def _overlap(self, run: RunConfig, kind: Change, *, replicated: bool) -> Change:
        """Return `kind` with the unset keys of the overlap, as they would be resolved."""
        known = (*kind.values(), replicated)
        if known not in self._overlaps:
            self._overlaps[known] = self._overlapped(run, kind)
        return self._overlaps[known]

    @cached_property
    def _overlaps(self) -> dict[tuple[Any, ...], Change]:
        return {}

    def _overlapped(self, run: RunConfig, kind: Change) -> Change:
        keys = ("parallel.overlap_grad_reduce", "parallel.overlap_param_gather")
        given = {**kind, **{key: self.said.get(key) for key in keys}}
        found = dict(kind)
        run = changed(run, given)
        for key in ("parallel.distributed_optimizer", *keys):
            if key in given and given[key] is None and (derived := STEPS[key](run)) is not None:
                found[key] = derived[0]
                run = changed(run, {key: derived[0]})
        return found

    def _recompute(self, run: RunConfig) -> Iterator[Change]:
        keys = AXES["recompute"]
        if any(key in self.said for key in keys):
            yield {
                key: self.said.get(key, getattr(run.parallel.recompute, key.rpartition(".")[2]))
                for key in keys
            }
            return
        yield dict(zip(keys, ("none", None, None, None), strict=True))
        for modules in _modules(run):
            yield dict(zip(keys, ("selective", modules, None, None), strict=True))
        held = -(-run.model.num_layers // (run.parallel.pp * run.parallel.vpp))
        for number in sorted({held // 4, held // 2, 3 * held // 4} - {0, held}):
            yield dict(zip(keys, ("full", None, "block", number), strict=True))
        yield dict(zip(keys, ("full", None, None, None), strict=True))


def _modules(run: RunConfig) -> list[tuple[str, ...]]:
    """Return the modules that may be recomputed in every layer, the cheapest first."""
    m = run.model
    moe = m.moe is not None
    latent = m.mla is not None
    dense = m.moe is None or m.moe.first_dense_layers > 0
    cheap = ("layernorm", *(["moe_act"] if moe else []), *(["mla_up_proj"] if latent else []))
    found: list[tuple[str, ...]] = [("moe_act",) if moe else ("core_attn",), cheap]
    found += [(*cheap, "mlp")] if dense else []
    return [*found, *([("layernorm", "moe")] if moe else [])]


def chunks(layers: int, pp: int) -> list[int]:
    """Return the numbers of virtual stages of a rank that give each a few layers."""
    if pp == 1:
        return [1]
    sizes = (1, 2, 3, 4, 5, 6, 8, 12, 16)
    return sorted({1} | {-(-layers // (pp * size)) for size in sizes if pp * size <= layers})


def divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to `most`, rising."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return [n for n in sorted({*small, *(number // n for n in small)}) if n <= most]
