"""The time that `log.statistics` adds to a step that it describes.

The device reads a tensor once for each of four reductions, and the host launches a few kernels for
each tensor. Gradients and weights are described between backward and update, where nothing hides
that; of the hooks in the forwards, which a busy device would hide in part, the whole is counted.
"""

from __future__ import annotations

from math import ceil

from mtrain.config.engine.formats import bytes_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid, held_stages
from mtrain.models.graph import FP32
from mtrain.models.rank import Rank
from mtrain.plan.states import main_weight_bytes, stage_weights
from mtrain.plan.time.device import MICRO, Device, device_of
from mtrain.plan.time.efficiencies import Efficiencies, reached_by
from mtrain.plan.time.kernels import Group, Links
from mtrain.plan.time.update import gradient_bytes, shares_of

READS = 4
"""Reductions of a tensor: sum, norm, largest value, zeros."""
PER_TENSOR = 3
"""Kernels that the host launches for each tensor of a kind: a sum, and two that count zeros; norms
of all tensors have one together.
"""
OUTPUTS = 3
"""Outputs of a layer that are described: its own, and those of attention and MLP."""
QUERIES = 16
"""Queries of a sample whose logits are made again, as `ROWS` of `mtrain.train.statistics`."""
PASSES = 12
"""Passes in fp32 over the logits of these queries, those of routers, and the losses of tokens."""
OPERATIONS = {"activations": 17, "attention": 39, "experts": 46, "losses": 34}
"""Operations of a hook that are no views, counted on a CPU in one forward."""


def described_seconds(run: RunConfig) -> float:
    """Return the seconds that a described step takes beyond another one, on the slowest rank of a
    resolved run whose time of a step is known.
    """
    device = device_of(run.cluster)
    reached = reached_by(run.cluster)
    return max(_seconds(run, stage, device, reached) for stage in range(run.parallel.pp))


def _seconds(run: RunConfig, stage: int, device: Device, reached: Efficiencies) -> float:
    moved, launches = _weights(run, stage)
    forward, more, gathered = _forward(run, stage, device, reached)
    number = run.micro_batches
    rate = device.memory * reached.memory
    host = reached.launch_us * MICRO
    if device.on_host:
        # An operation starts when the one before it is done.
        once = moved / rate + launches * host
        each = forward / rate + more * host
    else:
        once = max(moved / rate, launches * host)
        each = max(forward / rate, more * host)
    return (once + number * (each + gathered)) / reached.speed


def _weights(run: RunConfig, stage: int) -> tuple[float, float]:
    """Return the bytes that the kinds of weights read and write, and kernels that are launched."""
    kinds = run.log.statistics.described
    trained = [
        weight
        for held in held_stages(run)[stage]
        for weight in stage_weights(run, held)
        if not weight.frozen
    ]
    experts = sum(weight.numel for weight in trained if weight.expert)
    others = sum(weight.numel for weight in trained) - experts
    alone = run.parallel.distributed_optimizer or run.parallel.fsdp != "none"
    shares = shares_of(run, RankGrid.of(run), (experts, others))
    elements = sum(share.elements / (share.group.size if alone else 1) for share in shares)
    parts = min((share.group.size for share in shares), default=1) if alone else 1
    tensors = ceil(len(trained) / parts)
    weight = main_weight_bytes(run) or bytes_of(run.precision.format)
    moments = [bytes_of(form) for form in OPTIMIZERS[run.optim.name].states(run).values()]
    # An update is a copy in fp32 from which the new weight is subtracted.
    made = (weight + FP32) + (weight + 2 * FP32)
    of = {
        "weights": (READS * weight, PER_TENSOR),
        "gradients": (READS * gradient_bytes(run), PER_TENSOR),
        "updates": (READS * FP32 + made, PER_TENSOR + 2),
        "moments": (READS * sum(moments), PER_TENSOR * len(moments)),
    }
    chosen = [of[kind] for kind in kinds if kind in of]
    moved = elements * sum(size for size, _ in chosen)
    return moved, tensors * sum(count for _, count in chosen)


def _forward(
    run: RunConfig, stage: int, device: Device, reached: Efficiencies
) -> tuple[float, float, float]:
    """Return of one micro-batch the bytes that hooks read and write, the operations that they
    launch, and the seconds in which context-parallel ranks gather keys.
    """
    m = run.model
    p = run.parallel
    kinds = run.log.statistics.described
    rank = Rank.of(run)
    element = bytes_of(run.precision.format)
    tokens = rank.samples * rank.length
    # Without sequence parallelism one tensor-parallel rank describes all tokens.
    held = tokens // p.tp if p.sequence_parallel else tokens
    layers = sum(len(one.layers) for one in held_stages(run)[stage])
    last = any(one.loss for one in held_stages(run)[stage])
    moved = 0.0
    hooks = dict.fromkeys(OPERATIONS, 0)
    gathered = 0.0
    if "activations" in kinds:
        moved += OUTPUTS * layers * READS * held * m.hidden_size * element
        hooks["activations"] = OUTPUTS * layers
        if last and run.kernels.loss == "megatron":
            moved += READS * tokens * m.padded_vocab_size / p.tp * element
    if "attention" in kinds:
        whole = rank.length * p.cp
        groups = m.num_attention_heads if m.mla else m.query_groups
        keys = rank.samples * whole * max(1, groups // p.tp) * m.head_dim
        logits = rank.samples * QUERIES * whole * m.num_attention_heads / p.tp
        # Keys are converted to fp32 and read by the product.
        moved += layers * (keys * (element + 2 * FP32) + logits * PASSES * FP32)
        hooks["attention"] = layers
        context = Group(p.cp, p.tp)
        links = Links(device, reached)
        gathered += layers * links.collective(context, "gather", keys * element)
    if "experts" in kinds and m.moe is not None:
        moved += layers * held * (PASSES * m.moe.num_experts * FP32 + m.hidden_size * element)
        hooks["experts"] = layers
    if "losses" in kinds and last:
        moved += PASSES * tokens * FP32
        hooks["losses"] = 1
    launched = sum(OPERATIONS[kind] * times for kind, times in hooks.items())
    return moved, launched, gathered
