"""Lower bounds of a layout's cost: seconds and bytes from the parts of a micro-batch, each counted
once.

A layer costs the same wherever the pipeline is cut and however its state is sharded, so few graphs
are made for many layouts. The numbers leave out little: the full plan is never much faster, and the
best layouts are planned in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrain.config.engine.formats import bytes_of
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.stages import Stage, stages
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid
from mtrain.models.graph import Graph, kept
from mtrain.models.liveness import backwards
from mtrain.models.rank import Rank
from mtrain.models.registry import family_of
from mtrain.plan.count import frozen_copy_bytes
from mtrain.plan.order import most_in_flight
from mtrain.plan.rank import (
    RESERVE,
    communication_bytes,
    context_bytes,
    quantized_bytes,
)
from mtrain.plan.states import main_weight_bytes, stage_weights
from mtrain.plan.time.device import Device, device_of
from mtrain.plan.time.efficiencies import reached_by
from mtrain.plan.time.step import (
    StepWork,
    between_steps,
    forward_share,
    frozen_of,
    further_forwards,
    sides,
    weights_of,
)
from mtrain.plan.time.update import done_once, update_bytes
from mtrain.plan.time.work import work_of
from mtrain.plan.tune.space import Change, changed

ONE_STAGE = {
    "parallel.pp": 1,
    "parallel.vpp": 1,
    "parallel.layers_per_stage": None,
    "parallel.pipeline_layout": None,
    "parallel.account_for_embedding_in_pipeline_split": False,
    "parallel.account_for_loss_in_pipeline_split": False,
}
AGAIN = ("granularity", "modules", "method", "num_layers")
NONE = {
    "parallel.recompute.granularity": "none",
    **dict.fromkeys(f"parallel.recompute.{key}" for key in ("modules", "method", "num_layers")),
}
# Recomputation makes a layer at most half as slow again: it exchanges three times instead of
# twice.
MOST_AGAIN = 1.5
# Columns of a part of a stage and a micro-batch: seconds of the device and of the host, bytes
# that autograd keeps, elements of expert weights, of other weights, of frozen ones. Several
# parts are rows of one array.
Piece = npt.NDArray[np.float64]


def _took(piece: Piece) -> Any:
    """Return the seconds of parts, of the host or the device, whichever takes longer."""
    return np.maximum(piece[..., 0], piece[..., 1])


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a whole model."""

    first: Piece
    layers: Piece
    """Cumulative pieces of the layers: before each one, and of all."""
    behind: Piece
    """Multi-token prediction, output layer and loss."""
    twice: Piece
    """Elements of a table that is on both ends of a pipeline, and once on a rank that has both."""
    working: float
    """Transient bytes on top of saved tensors, while the backward of a layer needs them."""
    largest: float
    """Elements of the weights of a layer."""
    sent: int
    """Bytes that go from stage to stage."""

    @cached_property
    def seconds(self) -> float:
        """Return the seconds of a whole micro-batch."""
        return float(_took(self.first + self.layers[-1] + self.behind))

    @cached_property
    def longest(self) -> float:
        """Return the seconds of the layer that takes the longest."""
        return float(_took(np.diff(self.layers, axis=0)).max())

    @cached_property
    def lightest(self) -> Piece:
        """Return a lower bound of the elements of weights of experts and of others in so many
        layers.
        """
        each = np.sort(np.diff(self.layers, axis=0)[:, [EXPERTS, OTHERS]], axis=0)
        return np.concatenate((np.zeros((1, 2)), each.cumsum(0)))

    @cached_property
    def kept(self) -> float:
        """Return the bytes of a whole micro-batch."""
        return float((self.first + self.layers[-1] + self.behind)[2])

    def held(self, cut: Cut, stops: npt.NDArray[np.int64] | None = None) -> Piece:
        """Return the pieces of each stage, or of its layers up to `stops` and the parts before
        them.
        """
        out = self.layers[cut.stops if stops is None else stops] - self.layers[cut.starts]
        out[0] += self.first
        if stops is None:
            out[-1] += self.behind
        return out


@dataclass(frozen=True, eq=False)
class Cut:
    """Stages of a pipeline, in the order of the model: the first has the embedding, the last the
    loss.
    """

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Flow:
    """Micro-batches through a pipeline."""

    seconds: float
    computes: float
    """Seconds in which the slowest rank has work."""
    micro: float
    """Seconds of one micro-batch."""
    weights: tuple[float, float]
    """Elements of that rank, of experts and of others."""
    least: tuple[float, float]
    """The fewest of any rank."""
    ranks: tuple[tuple[float, float, float], ...]
    """Ranks that may need the most memory: bytes in flight, elements of experts and of others."""


class Costs:
    """The costs of the layouts of one run."""

    def __init__(self, run: RunConfig) -> None:
        self.device: Device = device_of(run.cluster)
        self.reached = reached_by(run.cluster)
        self.host = facts_of(run.cluster.device).on_host
        self.between = between_steps(self.device, self.reached)
        """Seconds of every step that no layout changes, in none of the bounds below."""
        self._pieces: dict[tuple[object, ...], Pieces] = {}
        self._flows: dict[tuple[object, ...], Flow] = {}
        self._flying: dict[tuple[int, ...], npt.NDArray[np.int64]] = {}
        self._cuts: dict[tuple[object, ...], Cut] = {}
        self._sent: dict[tuple[object, ...], int] = {}
        self._states: dict[tuple[object, ...], State] = {}
        self._words: dict[tuple[object, ...], Mapping[str, str]] = {}

    def ideal(self, run: RunConfig) -> float:
        """Return the seconds of a step whose pipeline never waits, without the work at its end."""
        p = run.parallel
        t = run.trainer
        return t.batch * self._without_blocks(run).seconds * p.tp * p.cp / (t.micro * p.ranks)

    def even(self, run: RunConfig, pp: int) -> Flow:
        """Return a lower bound of the flow through any pipeline of `pp` ranks that never waits.

        Each rank has the same amount of work; the slowest has the fewest layers with which it can
        be the slowest, and those of the fewest weights.
        """
        pieces = self._without_blocks(run)
        number = _micro_batches(run, pp)
        most = pieces.seconds / pp
        layers = len(pieces.layers) - 1
        every = (
            pieces.first + pieces.layers[-1] + pieces.behind - (pieces.twice if pp == 1 else 0.0)
        )
        ends = max(_took(pieces.first), _took(pieces.behind)) if pp > 1 else 0.0
        if pp > 1:
            fewest = math.ceil(max(0.0, most - MOST_AGAIN * ends) / (MOST_AGAIN * pieces.longest))
        else:
            fewest = layers
        least = pieces.lightest[min(fewest, layers)]
        ranks = ((0.0, every[EXPERTS] / pp, every[OTHERS] / pp),)
        weights = float(least[0]), float(least[1])
        return Flow(number * most, number * most, most, weights, weights, ranks)

    def _without_blocks(self, run: RunConfig) -> Pieces:
        """Return the pieces of a layout; where some layers are recomputed, as if none were."""
        again = run.parallel.recompute
        blocks = again.granularity == "full" and again.method == "block"
        return self.pieces(changed(run, NONE) if blocks else run)

    def once(self, run: RunConfig, flow: Flow) -> float:
        """Return a lower bound of the seconds at the end of each step, for a flow of
        micro-batches.
        """
        grid = RankGrid.of(run)
        ends = done_once(run, grid, flow.least, self.device, self.reached, flow.computes, math.inf)
        return sum(ends.values()) / self.reached.speed

    def standing(self, run: RunConfig, flow: Flow) -> float:
        """Return a lower bound of the constant bytes of the rank with the most."""
        state = self._state(run)
        return max(state.bytes(experts, others) for _, experts, others in flow.ranks)

    def ends(self, run: RunConfig) -> tuple[float, float]:
        """Return the seconds of the parts before and after the layers, in those of a mean layer."""
        pieces = self.pieces(run)
        layer = float(_took(pieces.layers[-1])) / run.model.num_layers
        return float(_took(pieces.first)) / layer, float(_took(pieces.behind)) / layer

    def taken(self, run: RunConfig, ways: Sequence[Change]) -> list[tuple[float, float]]:
        """Return for each of several ways to recompute: seconds of a micro-batch through all
        layers, and bytes that autograd saves of it. What is recomputed of some layers counts as of
        all.
        """
        shards = _shards_key(run)
        found = []
        for way in ways:
            key = *shards, *(_again_key(*(way[f"parallel.recompute.{name}"] for name in AGAIN)))
            pieces = self._pieces.get(key) or self.pieces(changed(run, way))
            found.append((pieces.seconds, pieces.kept))
        return found

    @staticmethod
    def key(run: RunConfig) -> tuple[object, ...]:
        """Return the key of the pieces of a layout: all that decides them."""
        return _parts_key(run)

    def pieces(self, run: RunConfig) -> Pieces:
        """Return the pieces of a layout, cached by all that decides them."""
        key = _parts_key(run)
        if key not in self._pieces:
            self._pieces[key] = self._made(run)
        return self._pieces[key]

    def _made(self, run: RunConfig) -> Pieces:
        again = run.parallel.recompute
        if again.granularity == "full" and again.method == "block":
            run = changed(
                run, {"parallel.recompute.num_layers": None, "parallel.recompute.method": None}
            )
        one = changed(run, ONE_STAGE)
        m = run.model
        make = family_of(m).stage
        ends = m.mtp_num_layers or 0
        assert make is not None
        # Recomputation does not change which implementation does an operation.
        shards = _shards_key(run)
        r = Rank.of(one, self._words.get(shards))
        self._words[shards] = r.words
        graphs = make(r, Stage(range(m.num_layers), True, ends, True))
        p = run.parallel
        # one copy of all: its groups are as those of more
        ranks = math.lcm(p.tp * p.cp, (p.etp or p.tp) * p.ep)
        work = StepWork(one, (), (), 0, RankGrid.of(changed(one, {"parallel.ranks": ranks})))
        known: dict[int, Piece] = {}
        for graph in graphs:
            if id(graph) not in known:
                known[id(graph)] = self._piece(work, graph)
        made = np.array([known[id(graph)] for graph in graphs])
        # The last norm stands before the predictions.
        cut = len(made) - 1 - ends - bool(ends)
        body = made[1:cut]
        # Layers that are recomputed in groups have one graph for each group.
        if len(body) != m.num_layers:
            body = np.repeat(body.sum(0, keepdims=True) / m.num_layers, m.num_layers, 0)
        # An adapter of several parts multiplies with zeros, too.
        if run.peft.kind is not None:
            body[:, EXPERTS:] = of_layers(one, graphs[1:cut])
        before = np.concatenate((np.zeros((1, made.shape[1])), body.cumsum(0)))
        first = made[0].copy()
        behind = made[cut:].sum(0)
        twice = np.zeros(made.shape[1])
        first[column(run)] += table(run)
        # a layer that is used several times has its weights once, and the output layer of several
        # losses
        if ends:
            behind[EXPERTS:] = elements(one, Stage(range(0), mtp=ends, loss=True))
        twice[column(run)] = table(run) * bool(m.ties_output or ends)
        largest = float(body[:, EXPERTS:].sum(1).max())
        sent = r.split_tokens * m.hidden_size * r.element
        # only the last stage has a loss, whose saved tensors count there
        working = sum(backwards(graphs[:-1]).peak)
        return Pieces(first, before, behind, twice, working, largest, sent)

    def _piece(self, work: StepWork, graph: Graph) -> Piece:
        done = work_of(graph)
        device, host = sides(work, done, self.device, self.reached)
        further = further_forwards(work.run)
        # A critic runs once for values and once in its own step, without an output layer.
        judged = work.run.objective.criticises and not any(
            op.name.endswith("loss") for op in graph.ops
        )
        if further or judged:
            forward = forward_share(work, done, self.device, self.reached)
            again = 1 + further * forward + judged * (1 + forward)
            device *= again
            host *= again
        weights = weights_of(done, grouped=True), weights_of(done, grouped=False)
        return np.array((device, host, kept([graph]), *weights, frozen_of(done)))

    def flow(self, run: RunConfig) -> Flow:
        """Return the flow of a layout whose pipeline and recomputation are chosen."""
        p = run.parallel
        key = *_parts_key(run), *_cut_key(p), p.recompute.method, p.recompute.num_layers
        if key not in self._flows:
            self._flows[key] = self._flow(run)
        return self._flows[key]

    def _flow(self, run: RunConfig) -> Flow:
        p = run.parallel
        held = self._held(run)
        by_rank = held.reshape(p.vpp, p.pp, held.shape[1])
        ranks = self._on_ranks(run, held)
        times = _took(ranks)
        number = _micro_batches(run, p.pp)
        slowest = int(times.argmax())
        most = float(times[slowest])
        working = self.pieces(run).working
        share = 1.0 if self.host else 1 + RESERVE
        full = int((ranks[:, 2] * np.minimum(np.arange(p.pp, 0, -1), number)).argmax())
        heavy = int((ranks[:, EXPERTS] + ranks[:, OTHERS]).argmax())
        # without virtual stages it is freed
        memory = []
        sent = self.pieces(run).sent if p.vpp > 1 else 0
        for rank in {0, full, heavy, p.pp - 1}:
            flying = self._in_flight(run, rank, min(number, 4 * p.pp))
            kept = float(by_rank[:, rank, 2] @ flying) + sent * int(flying[:-1].sum())
            size = (kept + working) * share + ranks[rank, FROZEN] * bytes_of(run.precision.format)
            memory.append((float(size), float(ranks[rank, EXPERTS]), float(ranks[rank, OTHERS])))
        weights = float(ranks[slowest, EXPERTS]), float(ranks[slowest, OTHERS])
        fewest = ranks.min(0)
        least = float(fewest[EXPERTS]), float(fewest[OTHERS])
        waits = float(times.sum()) - most
        return Flow(
            number * most + waits / p.vpp, number * most, most, weights, least, tuple(memory)
        )

    def _on_ranks(self, run: RunConfig, held: Piece) -> Piece:
        """Return the pieces of each pipeline rank, from those of stages."""
        p = run.parallel
        ranks: Piece = held.reshape(p.vpp, p.pp, held.shape[1]).sum(0)
        return ranks - self.pieces(run).twice if p.pp == 1 else ranks

    def _in_flight(self, run: RunConfig, rank: int, number: int) -> npt.NDArray[np.int64]:
        """Return the micro-batches of each chunk that a pipeline rank has in flight, if every chunk
        keeps as much.
        """
        p = run.parallel
        key = p.pp, p.vpp, rank, number
        if key not in self._flying:
            self._flying[key] = np.array(most_in_flight(run, rank, [1] * p.vpp, number)[1])
        return self._flying[key]

    def _held(self, run: RunConfig) -> Piece:
        """Return pieces of each (virtual) stage, in the order of the model."""
        again = run.parallel.recompute
        pieces = self.pieces(run)
        cut = self._cut(run)
        if again.granularity != "full" or again.method != "block":
            return pieces.held(cut)
        none = self.pieces(changed(run, NONE))
        middle = np.minimum(cut.starts + (again.num_layers or 1), cut.stops)
        out = pieces.held(cut, middle) + none.layers[cut.stops] - none.layers[middle]
        out[-1] += none.behind
        return out

    def _cut(self, run: RunConfig) -> Cut:
        key = _cut_key(run.parallel)
        if key not in self._cuts:
            found = [stage.layers for stage in stages(run)]
            starts = np.array([held.start for held in found])
            stops = np.array([held.stop for held in found])
            self._cuts[key] = Cut(starts, stops)
        return self._cuts[key]

    def seconds(self, run: RunConfig) -> float:
        """Return the seconds of a step whose layout is chosen."""
        flow = self.flow(run)
        grid = RankGrid.of(run)
        device = self.device
        ends = done_once(run, grid, flow.weights, device, self.reached, flow.computes, flow.micro)
        return flow.seconds + sum(ends.values()) / self.reached.speed

    def bytes(self, run: RunConfig, flow: Flow | None = None) -> float:
        """Return the bytes at the peak of the rank with the most, for a flow of micro-batches."""
        flow = flow or self.flow(run)
        least = self._beside(run) + frozen_copy_bytes(run) / run.parallel.ranks
        state = self._state(run)
        found = []
        for size, experts, others in flow.ranks:
            held = state.bytes(experts, others)
            if run.objective.criticises:
                # Only the last stage has the output layer that a critic lacks: this is a bound.
                held += state.bytes(experts, max(0.0, others - table(run)))
            found.append(size + held)
        return least + max(found)

    def _state(self, run: RunConfig) -> State:
        """Return the bytes of an element's state, cached by all that decides them."""
        p = run.parallel
        sharded = p.fsdp, p.distributed_optimizer, p.hsdp_replicas, run.optim.cpu_offload
        key = p.tp, p.cp, p.pp, p.ep, p.etp or p.tp, *sharded
        if key not in self._states:
            self._states[key] = state_of(run)
        return self._states[key]

    def _beside(self, run: RunConfig) -> int:
        """Return the bytes on top of the model: buffers of gathered tensors and, on a GPU, kernels
        and NCCL.
        """
        p = run.parallel
        shards = p.tp, p.sequence_parallel, p.ep, p.etp, p.cp, run.trainer.micro
        key = *shards, p.pp > 1, p.dp > 1, p.fsdp
        if key not in self._sent:
            layer = int(self.pieces(changed(run, NONE)).largest)
            rank = Rank.of(run, self._words.get(_shards_key(run)))
            self._sent[key] = communication_bytes(rank, layer) + (
                0 if self.host else context_bytes(rank)
            )
        return self._sent[key]


def _parts_key(run: RunConfig) -> tuple[object, ...]:
    again = run.parallel.recompute
    return *_shards_key(run), *_again_key(
        again.granularity, again.modules, again.method, again.num_layers
    )


def _shards_key(run: RunConfig) -> tuple[object, ...]:
    p = run.parallel
    return p.tp, p.sequence_parallel, p.ep, p.etp or p.tp, p.cp, run.trainer.micro


def _again_key(
    granularity: str | None, modules: Any, method: str | None, layers: int | None
) -> tuple[object, ...]:
    # A block recomputes each layer separately, so its groups do not matter.
    groups = (None, None) if method == "block" else (method, layers)
    return granularity, modules, *groups


def _cut_key(p: ParallelConfig) -> tuple[Any, ...]:
    said = p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split
    return p.pp, p.vpp, p.layers_per_stage, p.pipeline_layout, said


def _micro_batches(run: RunConfig, pp: int) -> int:
    """Return the micro-batches of a step, on a pipeline of so many ranks."""
    p = run.parallel
    dp = p.ranks // (p.tp * p.cp * pp)
    return max(1, run.trainer.batch // (run.trainer.micro * max(1, dp)))


@dataclass(frozen=True)
class State:
    """Bytes of weights, their copies, gradients and optimizer state on a rank."""

    expert: float
    """An element of the weights of experts."""
    other: float
    quantized: float
    """More, an element in a number format of fewer bits; not of embedding and output layer."""
    tables: int
    """Elements of those two."""

    def bytes(self, experts: float, others: float) -> float:
        """Return the bytes of a rank with so many elements of weights."""
        more = self.quantized * (experts + max(0.0, others - self.tables))
        return self.expert * experts + self.other * others + more


def state_of(run: RunConfig) -> State:
    """Return the bytes of an element where the state is sharded as a layout sets it."""
    p = run.parallel
    precision = run.precision
    weights = bytes_of(precision.format) + bytes_of(
        "fp32" if precision.grad_reduce_in_fp32 else precision.format
    )
    # Offloaded moments are in host memory; main weights stay on the device.
    main = main_weight_bytes(run)
    state = main + (update_bytes(run) - main) * (1 - run.optim.cpu_offload)
    took = []
    for copies in _copies(run):
        sharded = copies // p.hsdp_replicas if p.fsdp != "none" else 1
        spread = copies // p.hsdp_replicas if p.distributed_optimizer else sharded
        took.append(weights / max(1, sharded) + state / max(1, spread))
    tables = 2 * run.model.padded_vocab_size // p.tp * run.model.hidden_size
    return State(took[0], took[1], quantized_bytes(run), tables)


def _copies(run: RunConfig) -> tuple[int, int]:
    """Return how many ranks have the same elements of experts, and of others."""
    p = run.parallel
    same = max(1, p.ranks // (p.pp * p.ep * (p.etp or p.tp)))
    return same, p.dp * p.cp


# Columns of elements in a piece of `costs`: experts, others, frozen.
EXPERTS = 3
OTHERS = 4
FROZEN = 5


def table(run: RunConfig) -> int:
    """Return the elements of the embedding on a rank."""
    return run.model.padded_vocab_size // run.parallel.tp * run.model.hidden_size


def elements(run: RunConfig, held: Stage) -> tuple[int, int, int]:
    """Return the elements of the weights of a stage on a rank, as in a piece."""
    weights = stage_weights(run, held)
    frozen = sum(weight.numel for weight in weights if weight.frozen)
    experts = sum(weight.numel for weight in weights if weight.expert and not weight.frozen)
    return experts, sum(weight.numel for weight in weights) - experts - frozen, frozen


def of_layers(run: RunConfig, graphs: Sequence[Graph]) -> list[tuple[float, ...]]:
    """Return the elements of each layer, as in a piece; those of one graph are alike, of groups of
    layers there is the mean.
    """
    number = run.model.num_layers
    if len(graphs) != number:
        return [tuple(all_of / number for all_of in elements(run, Stage(range(number))))] * number
    first = {id(graph): layer for layer, graph in reversed(list(enumerate(graphs)))}
    found = {key: elements(run, Stage(range(layer, layer + 1))) for key, layer in first.items()}
    return [found[id(graph)] for graph in graphs]


def column(run: RunConfig) -> int:
    """Return the column of a piece in which the embedding's elements are counted."""
    table = next(iter(stage_weights(run, Stage(range(0), embedding=True))))
    return FROZEN if table.frozen else OTHERS
