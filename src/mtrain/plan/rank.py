"""The memory of a rank of each pipeline stage, by part, at its peak in a step.

Weights, gradients, optimizer state and saved tensors are counted tensor by tensor. Other memory of
a device follows from the order of operations or is an assumed constant; `HOW` lists which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mtrain.config.engine.core_fields import frees_sent
from mtrain.config.engine.formats import bytes_of
from mtrain.config.machine.devices import facts_of
from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import held_stages
from mtrain.models.graph import FP32, Graph, Op, kept, shared, size
from mtrain.models.liveness import Moment, Rises, backwards, forwards
from mtrain.models.parts import m_rows
from mtrain.models.rank import Rank
from mtrain.models.registry import family_of
from mtrain.models.weights import Weight
from mtrain.plan.count import TOKEN_BYTES
from mtrain.plan.critic import critic_of
from mtrain.plan.order import most_in_flight
from mtrain.plan.states import States, rank_states, stage_weights
from mtrain.plan.teacher import other_model_of, teacher_of
from mtrain.units import MIB, number_of

# A process on a GPU takes 612 MiB for the context of CUDA and 146 for kernels and their
# workspaces, measured on an H200 with torch 2.11.
CONTEXT_BYTES = 758 * MIB
# A rank on a CPU is a forked interpreter with torch.
HOST_BYTES = 300 * MIB
# Every run has NCCL and a communicator of all ranks. Measured on the same H200, with one rank.
WORLD_BYTES = 558 * MIB
# Each further group of ranks that communicate has a communicator. Measured in the same way.
COMMUNICATOR_BYTES = 389 * MIB
# Assumed fragmentation of torch's allocator, as a share of the memory that a step takes in pieces.
RESERVE = 0.04
# A loss in parts computes so many logits at once, for a multiple of CHUNK tokens. The three
# numbers are those of `mtrain_kernels.linear_cross_entropy`.
HOST_LOGITS = 1 << 22
GPU_LOGITS = 1 << 27
CHUNK = 64
# fp32 numbers per logit while plain torch applies the soft cap: the capped logit and its slope,
# for this part and the one before, and one temporary.
BENT = 5
# `linear_cross_entropy` adds up the gradient of a weight in fp32 when there are more parts.
MOST_PARTS = 3
# The same of a divergence from a teacher, in fp32: those of one model, of which the loss makes so
# many arrays. They are those of `mcore.models.distillation`.
HOST_DIVERGED = 1 << 20
GPU_DIVERGED = 1 << 25
DIVERGED = 10
ID_BYTES = 8
# Products in eight bits keep two copies of a weight, one of them transposed: a byte each.
QUANTIZED_COPIES = 2

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "low_precision",
    "activations",
    "loss",
    "recompute",
    "working",
    "graphs",
    "communication",
    "context",
    "reserve",
)
# Part of the memory -> the origin of its number.
HOW = {
    "weights": (
        "counted: every tensor, with padding of buffers, and those of a reference, teacher, critic"
        " or model of rewards"
    ),
    "gradients": "counted: as the weights",
    "optimizer": "counted: main weights and moments of the part of a rank",
    "low_precision": "reasoned: copies of weights for products in eight bits",
    "activations": (
        "counted: all that autograd keeps of micro-batches in flight; or keys and values of sampled"
        " answers"
    ),
    "loss": (
        "counted: saved tensors of a loss in parts, gradients of its inputs; or all logits; and a"
        " teacher's outputs of a step"
    ),
    "recompute": "counted: recomputed tensors of one layer, or of one group of layers",
    "working": (
        "reasoned: gradients in flight and an operation's working memory, or logits of a part of"
        " the tokens"
    ),
    "graphs": (
        "reasoned: pools of CUDA graphs, which nothing else can use, and copies of their inputs"
        " and results"
    ),
    "communication": "reasoned: buffers of collectives on top of that",
    "context": (
        "measured: 1,316 MiB on a GPU and 389 for each kind of group that talks; assumed: 300 MiB"
        " on a CPU"
    ),
    "reserve": (
        "assumed: 4% of activations, loss, recompute and working that the allocator holds in pieces"
    ),
}


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank of one pipeline stage."""

    run: RunConfig
    stage: int
    held: tuple[Stage, ...]
    states: States
    chunks: tuple[tuple[Graph, ...], ...]
    """Graphs of each chunk for one micro-batch; empty if the family does not define them."""

    @cached_property
    def rank(self) -> Rank:
        """Return the rank's view of the model."""
        return Rank.of(self.run)

    @cached_property
    def kept(self) -> list[int]:
        """Return the bytes that autograd saves of a micro-batch, by chunk."""
        return [kept(chunk) for chunk in self.chunks] or [0] * self.run.parallel.vpp

    @cached_property
    def in_flight(self) -> tuple[int, list[int]]:
        """Return the bytes kept of all micro-batches in flight where they are the most, and how
        many of each chunk these are.
        """
        once = [shared(chunk) for chunk in self.chunks] or [0] * len(self.kept)
        each = [kept - common for kept, common in zip(self.kept, once, strict=True)]
        most, numbers = most_in_flight(self.run, self.stage, each, self.run.micro_batches)
        return (
            most + sum(common for common, number in zip(once, numbers, strict=True) if number),
            numbers,
        )

    @cached_property
    def parts(self) -> dict[str, int]:
        """Return the bytes by part, in the order of `PARTS`, at the peak."""
        s = self.states
        on_host = facts_of(self.run.cluster.device).on_host
        moment = self._peak
        found = {
            "weights": s.weight_bytes,
            "gradients": s.gradient_bytes,
            "optimizer": s.most_optimizer_bytes,
            "low_precision": self._low_precision(),
            **moment,
            "graphs": 0 if on_host else self._graphs(),
            "communication": self._communication(),
            "context": context_bytes(self.rank),
        }
        return found | {"reserve": 0 if on_host else round(RESERVE * sum(moment.values()))}

    @cached_property
    def _peak(self) -> dict[str, int]:
        """Return the moment that has the most."""
        return max(self._moments, key=lambda moment: sum(moment.values()))

    @cached_property
    def _moments(self) -> tuple[dict[str, int], ...]:
        """Return the bytes of each part that varies: at the end of the last forward or within it,
        in the backward after it, in the last forward of a teacher before them, while answers are
        sampled, and in the step of a critic.
        """
        losses = self._losses()
        lessons = self._lessons()
        peak = self._backward.peak
        most = self.in_flight[0] - sum(losses)
        highest = max(map(forwards, self.chunks), default=0)
        # Experts that the sampler chose, of all micro-batches of a step.
        micro = max(1, self.run.trainer.batch // (self.run.trainer.micro * self.run.parallel.dp))
        most += micro * self.rank.tokens * self._route_bytes
        forward = {
            "activations": most,
            "loss": sum(losses) + lessons,
            "recompute": 0,
            "working": max(self._loss_work(), highest),
        }
        backward = {
            "activations": most + min(0, peak.held),
            "loss": sum(losses[1:]) + self._waiting() + lessons,
            "recompute": max(0, peak.held),
            "working": peak.transient,
        }
        critic = () if self.critic is None else self.critic._moments[:2]
        return forward, backward, self._teaching(lessons), self._sampling, *critic

    @cached_property
    def critic(self) -> StageMemory | None:
        """Return the same stage of a critic."""
        other = critic_of(self.run)
        if other is None:
            return None
        return _memory(other, Rank.of(other), self.stage, held_stages(other)[self.stage])

    @property
    def _route_bytes(self) -> int:
        """Return the bytes of the experts of a token that a sampler chose, in int16."""
        moe = self.run.model.moe
        if moe is None or not self.run.rollout.replay_routes:
            return 0
        with_experts = set(self.run.model.expert_layers)
        layers = sum(layer in with_experts for held in self.held for layer in held.layers)
        return 2 * moe.router_topk * layers

    @cached_property
    def _sampling(self) -> dict[str, int]:
        """Return the bytes while answers are sampled: keys and values of the rows that are sampled
        together, the experts of their tokens, and their logits in fp32, whole and as probabilities.
        """
        run = self.run
        r = self.rank
        rows = run.rollout.rows if run.objective.rolls and run.rollout.engine == "local" else 0
        # Sequences are padded to whole parts of sequence parallelism.
        tokens = run.data.length + (run.parallel.tp if run.parallel.sequence_parallel else 1)
        layers = sum(len(held.layers) for held in self.held)
        cache = rows * tokens * layers * 2 * r.groups * run.model.head_dim * r.element
        cache += rows * tokens * self._route_bytes
        logits = 2 * rows * run.model.vocab_size * FP32 if self.held[-1].loss else 0
        return {"activations": cache, "loss": 0, "recompute": 0, "working": logits}

    def _lessons(self) -> int:
        """Return the bytes of a teacher's outputs for the micro-batches of a step, which the last
        stage keeps: inputs of its output layer, or its likeliest tokens.
        """
        teacher = teacher_of(self.run)
        run = self.run
        if not self.held[-1].loss or (teacher is None and run.objective.teacher_file is None):
            return 0
        r = self.rank
        number = run.micro_batches
        k = run.objective.distil_top_k
        if teacher is None:
            assert k is not None
            return number * r.tokens * (k + k + 1) * FP32
        if k is not None:
            return number * r.tokens * (k * ID_BYTES + (k + 1) * FP32)
        return number * r.split_tokens * teacher.model.hidden_size * r.element

    def _teaching(self, lessons: int) -> dict[str, int]:
        """Return the bytes at the peak of the last forward of a teacher or a model of rewards."""
        teacher = other_model_of(self.run)
        stage = None if teacher is None else family_of(teacher.model).stage
        working = 0
        if teacher is not None and stage is not None:
            rank = Rank.of(teacher)
            held = held_stages(teacher)[self.stage]
            working = max(forwards(tuple(stage(rank, one))) for one in held)
        return {"activations": 0, "loss": lessons, "recompute": 0, "working": working}

    def _graphs(self) -> int:
        """Return the bytes that CUDA graphs add to a step.

        The memory of a graph stays with it. A whole step and an evaluation have a pool each, and
        copies of their samples. Layers share a pool; what runs between them cannot use it, so the
        peak of the loss comes on top of that of the layers, and gradients of a layer's weights are
        copied out.
        """
        t = self.run.trainer
        if t.cuda_graph_impl == "none":
            return 0
        highest = max(map(forwards, self.chunks), default=0)
        if t.cuda_graph_impl == "full_iteration":
            samples = t.batch // self.run.parallel.dp * self.run.data.length * TOKEN_BYTES
            if not t.eval_iters:
                return samples
            return 2 * samples + max(self._loss_work(), highest)
        peak = self._backward.peak
        layers = max(highest, max(0, peak.held) + peak.transient)
        apart = self.in_flight[0] + layers + self._loss_work()
        copied = max(self._layer_weights().values(), default=0) * self.rank.element
        return max(0, apart - sum(self._peak.values())) + copied

    def _waiting(self) -> int:
        """Return the bytes of the gradient of a table that a chunk reads at both ends, which is
        accumulated before it is handed on.
        """
        m = self.run.model
        r = self.rank
        both = any(
            held.embedding and ((held.loss and m.ties_output) or held.mtp) for held in self.held
        )
        return m_rows(r) * m.hidden_size * r.element * (both and not r.frozen)

    @cached_property
    def _backward(self) -> Rises:
        """Return the peaks of the chunk with the most expensive backward."""
        none = Rises(0, 0, Moment(0, 0))
        return max(map(backwards, self.chunks), key=lambda rises: sum(rises.peak), default=none)

    @property
    def saved(self) -> int:
        """Return the highest bytes of saved and recomputed tensors."""
        return self.in_flight[0] + max(0, self._backward.most - sum(self._losses()[:1]))

    @property
    def peak(self) -> int:
        """Return the bytes at the peak."""
        return sum(self.parts.values())

    @property
    def where(self) -> str:
        """Return the moment of the peak in a step, in words."""
        if not self.chunks:
            return "not known: the family does not count its saved tensors"
        if self._peak is self._sampling:
            return "while answers are sampled"
        if self.critic is not None and any(self._peak is one for one in self.critic._moments):
            return "in the step of the critic"
        micro = sum(self.in_flight[1])
        forward = self._peak is self._moments[0]
        loss = any(held.loss for held in self.held) and self.parts["working"] == self._loss_work()
        what = "in the backward of a layer" + " that is computed again" * (
            self.parts["recompute"] > 0
        )
        if forward:
            what = "at the loss" if loss else "in the forward of a layer"
        chunks = " of a chunk" if self.run.parallel.vpp > 1 else ""
        return f"{what}, with {number_of(micro, 'micro-batch')}{chunks} in flight"

    def _losses(self) -> list[int]:
        """Return the bytes kept by the losses of each micro-batch in flight that has them."""
        found: list[int] = []
        for number, chunk in zip(self.in_flight[1], self.chunks, strict=False):
            kept = {
                t
                for graph in chunk
                for op in graph.ops
                if op.name.endswith("loss")
                for t in op.keeps
            }
            found += [size(kept)] * (number if kept else 0)
        return found

    def _low_precision(self) -> int:
        return self._own_low_precision() + (
            0 if self.critic is None else self.critic._own_low_precision()
        )

    def _own_low_precision(self) -> int:
        # All experts of a layer are quantised at once.
        sizes: dict[tuple[int, str], int] = {}
        for chunk, held in enumerate(self.held):
            for w in stage_weights(self.run, held):
                if _is_quantized(w) and not self._stays_wide(w, held):
                    key = chunk, w.name.rstrip("0123456789")
                    sizes[key] = sizes.get(key, 0) + w.numel
        if passing(self.run):
            return QUANTIZED_COPIES * max(sizes.values(), default=0)
        return quantized_bytes(self.run) * sum(sizes.values())

    def _stays_wide(self, weight: Weight, held: Stage) -> bool:
        """Return whether a weight is of a layer that does not multiply in fewer bits."""
        stack, _, rest = weight.name.partition(".layers.")
        number = int(rest.partition(".")[0] or 0)
        m = self.run.model
        if m.t5 is None and stack in ("decoder", "encoder"):
            return self.run.precision.leaves(held.layers[number], m.num_layers)
        if stack == "vision.encoder" and m.llava is not None:
            return self.run.precision.leaves(number, m.llava.used_layers)
        return False

    def _loss_work(self) -> int:
        """Return the transient bytes of the loss."""
        return max(
            (_loss_work(self.rank, op) for chunk in self.chunks for op in _losses(chunk)), default=0
        )

    def _communication(self) -> int:
        layer = max(self._layer_weights().values(), default=0)
        return communication_bytes(self.rank, layer) + self._sent()

    def _sent(self) -> int:
        """Return the bytes sent to the next stage by all micro-batches in flight, where they are
        not freed.
        """
        run = self.run
        r = self.rank
        if run.parallel.pp == 1 or frees_sent(run):
            return 0
        numbers = zip(self.in_flight[1], self.held, strict=True)
        number = sum(number for number, held in numbers if not held.loss)
        return number * r.split_tokens * run.model.hidden_size * r.element

    def _layer_weights(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for weight in self.states.weights:
            if ".layers." in weight.name:
                layer = weight.name.split(".layers.")[-1].partition(".")[0]
                found[layer] = found.get(layer, 0) + weight.numel
        return found


def _is_quantized(weight: Weight) -> bool:
    """Return whether products with a weight are in fewer bits, where the run has them."""
    layers = weight.kind in ("attention", "mlp", "experts", "mamba")
    tower = (
        weight.kind == "vision"
        and ".linear_" in weight.name
        and not weight.name.startswith("vision.behind.")
    )
    return len(weight.shape) == 2 and (layers or tower)


def quantized_bytes(run: RunConfig) -> int:
    """Return the bytes of an element's copies in eight bits, where they are kept."""
    return 0 if run.precision.quantized is None or passing(run) else QUANTIZED_COPIES


def passing(run: RunConfig) -> bool:
    """Return whether weights are quantised for one product at a time, by our layers, which free the
    copy after it.
    """
    low = run.precision.quantized is not None and run.parallel.frees_weights
    return low and Rank.of(run).words["linear"] != "te"


def communication_bytes(r: Rank, layer: int) -> int:
    """Return the bytes that FSDP gathers, where a layer has so many elements of weights at most;
    and buffers of sequences.
    """
    run = r.run
    p = r.layout
    m = r.model
    total = r.tokens * m.hidden_size * r.element if r.gathers_into_buffer else 0
    if p.fsdp != "none":
        # this layer, the next, and weights outside of layers; gradients of one, and those packed
        # for the reduction
        root = m.padded_vocab_size // p.tp * m.hidden_size
        reduced = r.element + (FP32 if run.precision.grad_reduce_in_fp32 else r.element)
        total += (2 * layer + root) * r.element + max(layer, root) * reduced
    return total


def context_bytes(r: Rank) -> int:
    """Return the memory of a process outside torch's allocator: kernels, and NCCL for each group of
    ranks that communicate.
    """
    if r.host:
        return HOST_BYTES
    p = r.layout
    groups = sum(degree > 1 for degree in (p.tp, p.pp, p.cp, p.ep, p.dp))
    return CONTEXT_BYTES + WORLD_BYTES + groups * COMMUNICATOR_BYTES


def _losses(chunk: Sequence[Graph]) -> Iterator[Op]:
    return (op for graph in chunk for op in graph.ops if op.name.endswith("loss"))


def _loss_work(r: Rank, op: Op) -> int:
    """Return the transient bytes of a loss, on top of its saved tensors: hidden states by sample
    and gathered, logits of a part of them, and the gradient of the weight while it is accumulated
    in fp32. An output layer with a bias multiplies wider copies.
    """
    m = r.model
    columns = r.model.padded_vocab_size // r.layout.tp
    tokens = max((p.m for p in op.products), default=r.tokens)
    # megatron-core keeps the logits in their own format until it widens them.
    if r.run.objective.distils:
        most = HOST_DIVERGED if r.host else GPU_DIVERGED
        rows = _rows_of_logits(r, tokens, columns, most)
        return rows * columns * DIVERGED * FP32 + tokens * m.hidden_size * r.element
    if r.words["loss"] == "megatron":
        return tokens * (columns + m.hidden_size) * r.element
    rows = _rows_of_logits(r, tokens, columns)
    gathered = 1 + bool(r.layout.sequence_parallel)
    work = rows * (columns * _logit_bytes(r) + m.hidden_size * FP32)
    work += gathered * tokens * m.hidden_size * r.element
    wide = columns * m.hidden_size * FP32
    # A gradient that is kept in half precision is accumulated in fp32 first.
    if tokens > MOST_PARTS * rows and any(each.bytes < wide for each in op.keeps[2:]):
        work += wide
    return work + sum((p.m + p.n) * p.k * r.element for p in op.products if p.k > m.hidden_size)


def logits_at_once(run: RunConfig) -> int | None:
    """Return the number of logits that `kernels.loss_logits_mib` has room for, in the format of the
    model; None: unset.
    """
    room = run.kernels.loss_logits_mib
    return None if room is None else int(room * MIB // bytes_of(run.precision.format))


def _rows_of_logits(r: Rank, tokens: int, columns: int, most: int = 0) -> int:
    """Return the tokens whose logits exist at once, `most` or as many as the run has room for."""
    most = most or logits_at_once(r.run) or (HOST_LOGITS if r.host else GPU_LOGITS)
    rows = max(CHUNK, most // columns // CHUNK * CHUNK)
    return min(rows, -(-tokens // 2) if r.host else tokens)


def _logit_bytes(r: Rank) -> int:
    """Return the bytes of a logit while its loss is computed: a fused kernel writes the gradient in
    place, plain torch widens it.
    """
    fused = r.words["loss"] == "triton" or (r.words["loss"] != "megatron" and r.wide)
    bent = (
        BENT * FP32 * (r.words["loss"] != "triton" and r.model.final_logit_softcapping is not None)
    )
    return (r.element if fused else r.element + 4) + bent


def stage_memories(run: RunConfig) -> list[StageMemory]:
    """Return the memory of each pipeline stage of a resolved run.

    Raises:
        ValueError: the family of the model does not say which weights a stage has, or stages do not
            fit the model.
    """
    rank = Rank.of(run)
    return [_memory(run, rank, number, held) for number, held in enumerate(held_stages(run))]


def _memory(run: RunConfig, rank: Rank, number: int, held: Sequence[Stage]) -> StageMemory:
    stage = family_of(run.model).stage
    chunks = () if stage is None else tuple(tuple(stage(rank, one)) for one in held)
    return StageMemory(run, number, tuple(held), rank_states(run, number), chunks)


def worst_stage(run: RunConfig) -> StageMemory:
    """Return the stage with the highest peak; of stages that hold the same the first, which has the
    most in flight.
    """
    rank = Rank.of(run)
    seen = dict[object, StageMemory]()
    for number, held in enumerate(held_stages(run)):
        key = number == 0, *(stage_kind(run, stage) for stage in held)
        if key not in seen:
            seen[key] = _memory(run, rank, number, held)
    return max(seen.values(), key=lambda stage: stage.peak)


def stage_kind(run: RunConfig, stage: Stage) -> tuple[object, ...]:
    """Return a key that is equal for stages that compute the same."""
    m = run.model
    layers = stage.layers
    dense = (
        0 if m.moe is None else max(0, min(m.moe.first_dense_layers, layers.stop) - layers.start)
    )
    kinds = "" if m.hybrid is None else m.hybrid.pattern[layers.start : layers.stop]
    linear = () if m.linear_attention is None else tuple(map(m.is_linear, layers))
    turn = [layers.start % every for every in (m.window_attn_skip_freq, m.no_rope_freq) if every]
    wide = tuple(run.precision.leaves(layer, m.num_layers) for layer in layers)
    return stage.embedding, stage.loss, stage.mtp, len(layers), dense, kinds, linear, wide, *turn
