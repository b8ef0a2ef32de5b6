"""The time of a step: micro-batches through the stages of the pipeline, and work done once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mtrain.config.engine.formats import bytes_of
from mtrain.config.machine.devices import facts_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.run import RunConfig
from mtrain.layout.grid import RankGrid, held_stages
from mtrain.models.rank import Rank
from mtrain.models.registry import family_of
from mtrain.plan.count import flops_of_token
from mtrain.plan.critic import critic_of
from mtrain.plan.rank import stage_kind
from mtrain.plan.states import Matrix, matrices_of, stage_weights
from mtrain.plan.teacher import teacher_of
from mtrain.plan.time.device import MICRO, Device, device_of, missing
from mtrain.plan.time.efficiencies import Efficiencies, reached_by
from mtrain.plan.time.host import Span, queued, there_and_back, waiting
from mtrain.plan.time.kernels import Group, Kernels, Links
from mtrain.plan.time.update import done_once, gradient_bytes, matrix_seconds
from mtrain.plan.time.work import BACKWARD_MOVES, Linear, Work, total

PARTS = (
    "gemm",
    "attention",
    "memory",
    "host",
    "tp",
    "cp",
    "ep",
    "pp",
    "bubble",
    "reference",
    "critic",
    "dp",
    "optimizer",
    "offload",
)
# Two kernels cast an operand to low precision: one for its values, one for its scales.
CASTS = 2
# Exponent of the norm that adds the time of the host to that of the device. At 1 the two would
# add up; at infinity the slower one would hide the other.
SHARP = 2.0


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step."""

    seconds: float
    """nan where the device's facts do not suffice."""
    parts: Mapping[str, float]
    """Seconds by part, of the slowest stage; they add up to `seconds`.

    Communication: the part that no computation hides.
    """
    tokens_per_second_per_device: float
    mfu: float
    """Share of the peak of the format in which linear layers multiply, with causal attention and
    the gradients of trained weights.
    """
    mfu_all_keys: float
    """The same with attention to every key."""
    missing: tuple[str, ...] = ()
    """Facts of the device that have to be known first."""

    @property
    def known(self) -> bool:
        """Return whether the time is known."""
        return not self.missing


@dataclass(frozen=True)
class StepWork:
    """Everything of a step that no efficiency decides."""

    run: RunConfig
    stages: tuple[Work, ...]
    weights: tuple[tuple[float, float], ...]
    """Elements that are trained of each stage on a rank: of experts that other ranks do not have,
    and the others.
    """
    sent: int
    """Bytes from a stage to the next."""
    grid: RankGrid
    matrices: tuple[Mapping[Matrix, int], ...] = ()
    """Matrices of each stage that the update needs whole."""


def step_time(run: RunConfig, reached: Efficiencies | None = None) -> StepTime:
    """Return the time of a step of a resolved run.

    Raises:
        ValueError: the family does not say what a stage computes, or stages do not fit the model.
    """
    if lacks := unknown(run):
        return StepTime(math.nan, {}, math.nan, math.nan, math.nan, lacks)
    return priced(step_work(run), device_of(run.cluster), reached or reached_by(run.cluster))


def unknown(run: RunConfig) -> tuple[str, ...]:
    """Return the unset keys of the cluster without which the time of a step is unknown."""
    p = run.precision
    cluster = run.cluster
    formats: list[str] = [p.format, p.multiplies_in]
    matrices = OPTIMIZERS[run.optim.name].whole_matrices
    formats += [matrices(run).format] if matrices else []
    found = missing(cluster, tuple(dict.fromkeys(formats)), run.parallel.ranks)
    away = run.optim.cpu_offload > 0 and not facts_of(cluster.device).on_host
    return (*found, "cluster.host_link_gbps") if away and cluster.host_link_gbps is None else found


def step_work(run: RunConfig) -> StepWork:
    """Return the work of the ranks of each stage.

    Raises:
        ValueError: the family does not say what a stage computes, or stages do not fit the model.
    """
    family = family_of(run.model)
    rank = Rank.of(run)
    if family.stage is None:
        raise ValueError(f"the family {family.name} does not say what its layers compute")
    chunks: dict[tuple[object, ...], tuple[Work, tuple[int, int]]] = {}
    known: dict[tuple[object, ...], tuple[Work, tuple[float, float], Counter[Matrix]]] = {}
    stages = []
    weights = []
    matrices = []
    for held in held_stages(run):
        keys = tuple(stage_kind(run, stage) for stage in held)
        if keys not in known:
            done = Work()
            experts = 0
            others = 0
            for key, stage in zip(keys, held, strict=True):
                if key not in chunks:
                    chunks[key] = total(family.stage(rank, stage)), _trained(run, stage)
                done.add(chunks[key][0], 1)
                experts = experts + chunks[key][1][0]
                others = others + chunks[key][1][1]
            known[keys] = done, (experts, others), matrices_of(run, held)
        stages.append(known[keys][0])
        weights.append(known[keys][1])
        matrices.append(known[keys][2])
    sent = rank.split_tokens * run.model.hidden_size * rank.element
    return StepWork(run, tuple(stages), tuple(weights), sent, RankGrid.of(run), tuple(matrices))


def _trained(run: RunConfig, stage: Stage) -> tuple[int, int]:
    """Return the elements of the weights of a stage on a rank that are trained: of experts, and the
    others.
    """
    trained = [weight for weight in stage_weights(run, stage) if not weight.frozen]
    experts = sum(weight.numel for weight in trained if weight.expert)
    return experts, sum(weight.numel for weight in trained) - experts


def weights_of(done: Work, *, grouped: bool) -> float:
    """Return the elements of the weights that are trained: of experts, or the others."""
    every = ((one, number) for one, number in done.backward.items() if one.grouped == grouped)
    return sum(_elements(one) * number for one, number in every if one.factors == "weights")


def frozen_of(done: Work) -> float:
    """Return the elements of the weights that are not trained."""
    return sum(
        _elements(one) * number for one, number in done.backward.items() if one.factors == "frozen"
    )


def _elements(one: Linear) -> int:
    return one.product.n * one.product.k * one.product.batch


def priced(work: StepWork, device: Device, reached: Efficiencies) -> StepTime:
    """Return the time of some work."""
    run = work.run
    p = work.run.parallel
    alike = {id(stage): stage for stage in work.stages}
    found = {key: micro_batch(work, stage, device, reached) for key, stage in alike.items()}
    stages = [found[id(stage)] for stage in work.stages]
    times = [sum(parts.values()) for parts in stages]
    number = run.micro_batches
    slowest = max(range(len(times)), key=times.__getitem__)
    parts = dict.fromkeys(PARTS, 0.0) | {
        name: number * value for name, value in stages[slowest].items()
    }
    parts["bubble"] = (sum(times) - times[slowest]) / p.vpp
    ends = done_once(
        run, work.grid, work.weights[slowest], device, reached, sum(parts.values()), times[slowest]
    )
    if work.matrices:
        ends["optimizer"] += matrix_seconds(run, work.grid, work.matrices[slowest], device, reached)
    parts |= {name: value / reached.speed for name, value in ends.items()}
    # No gradient is sent meanwhile, so the time hides nothing.
    parts["reference"] = further_forwards(run) * _forward(work, times, number, device, reached)
    teacher = teacher_of(run)
    if teacher is not None:
        other = step_work(teacher)
        each = [sum(micro_batch(other, stage, device, reached).values()) for stage in other.stages]
        parts["reference"] += _forward(other, each, number, device, reached)
    critic = critic_of(run)
    if critic is not None:
        other = step_work(critic)
        each = [sum(micro_batch(other, stage, device, reached).values()) for stage in other.stages]
        values = _forward(other, each, number, device, reached)
        parts["critic"] = values + priced(other, device, reached).seconds
    parts["host"] += _begun(work, work.stages[slowest], device, reached)
    seconds = sum(parts.values())
    tokens = run.trainer.batch * run.data.length / p.ranks / seconds
    peak = device.peaks[run.precision.multiplies_in]
    causal, every = (flops_of_token(run, causal=c) * tokens / peak for c in (True, False))
    return StepTime(seconds, parts, tokens, causal, every)


def further_forwards(run: RunConfig) -> int:
    """Return how often a step reads its samples in forwards without a backward."""
    o = run.objective
    compared = int(o.loss_refers and o.reference != "precomputed")
    # A divergence in the reward is that of the policy from its reference.
    rewarded = 2 * int(o.judges and o.kl_in_reward > 0)
    # The policy and its reference both read answers to other prompts.
    return compared * (1 + o.mismatches) + o.mismatches + rewarded


def _forward(
    work: StepWork, times: list[float], number: int, device: Device, reached: Efficiencies
) -> float:
    """Return the seconds of the forwards of a step's micro-batches, from the seconds that each
    stage takes forward and backward.
    """
    pairs = zip(times, work.stages, strict=True)
    forward = [time * forward_share(work, stage, device, reached) for time, stage in pairs]
    slowest = max(forward)
    return number * slowest + (sum(forward) - slowest) / work.run.parallel.vpp


def micro_batch(
    work: StepWork, stage: Work, device: Device, reached: Efficiencies
) -> dict[str, float]:
    """Return the seconds of one micro-batch on a stage, by part, among others like it."""
    kernels = _kernels(work, device, reached)
    parts = _computed(work, stage, kernels)
    computes = sum(parts.values())
    return parts | {"host": exposed(computes, host_seconds(work, stage, kernels), kernels)}


def sides(
    work: StepWork, stage: Work, device: Device, reached: Efficiencies
) -> tuple[float, float]:
    """Return the seconds of the device and of the host in one micro-batch on a stage, of which the
    longer count; a host that hides nothing counts as the device.
    """
    kernels = _kernels(work, device, reached)
    computes = sum(_computed(work, stage, kernels).values())
    host = host_seconds(work, stage, kernels)
    return (computes + host, 0.0) if device.on_host else (computes, host)


def forward_share(work: StepWork, stage: Work, device: Device, reached: Efficiencies) -> float:
    """Return the share of the forward in the seconds of a micro-batch on a stage."""
    return _forward_share(stage, _kernels(work, device, reached))


def exposed(computes: float, host: float, kernels: Kernels) -> float:
    """Return the seconds of the host behind which the device does not compute."""
    # A host starts an operation when the one before it is done, so launches hide nothing.
    if kernels.device.on_host:
        return host
    if kernels.reached.host is not None:
        return max(0.0, host - computes)
    return float((computes**SHARP + host**SHARP) ** (1 / SHARP) - computes)


def host_seconds(work: StepWork, stage: Work, kernels: Kernels) -> float:
    """Return the seconds of the host for one micro-batch; if it waits for the device in each
    layer, also those in which it waits.
    """
    reached = kernels.reached
    if reached.host is None:
        return _launched(stage, kernels)
    if kernels.recipe in reached.host.waits:
        return waiting(_spans(work, stage, kernels))
    return sum(reached.host.seconds(stage, kernels.recipe))


def _launched(stage: Work, kernels: Kernels) -> float:
    reached = kernels.reached
    routed = stage.mixtures - stage.fixed * (1 - reached.fixed)
    casts = CASTS * (kernels.recipe != kernels.format)
    calls = sum(
        share * (one.products + casts * one.casts)
        for share, one in ((1, stage.calls), (reached.fixed, stage.padded))
    )
    every = (
        calls * reached.call_us + stage.operations * reached.launch_us + routed * reached.routing_us
    )
    return every * reached.graphed * MICRO


def between_steps(device: Device, reached: Efficiencies) -> float:
    """Return the seconds of a step in which the host launches nothing, whatever the layout."""
    if reached.host is None or device.on_host:
        return 0.0
    return reached.host.step_us * MICRO / reached.host.speed


def _begun(work: StepWork, stage: Work, device: Device, reached: Efficiencies) -> float:
    """Return the seconds of a step in which the queue of launches is empty: at its beginning, and
    between steps.
    """
    idle = between_steps(device, reached)
    if reached.host is None or device.on_host:
        return idle
    kernels = _kernels(work, device, reached)
    if kernels.recipe in reached.host.waits:
        return idle
    spans = _spans(work, stage, kernels)
    steady = max(sum(span.host for span in spans), sum(span.device for span in spans))
    return idle + queued(spans) - steady


def _spans(work: StepWork, stage: Work, kernels: Kernels) -> list[Span]:
    """Return the parts of a micro-batch in the order of their launches."""
    assert kernels.reached.host is not None
    forward = list[Span]()
    backward = list[Span]()
    for part, number in stage.order or [(stage, 1)]:
        computes = sum(_computed(work, part, kernels).values())
        share = _forward_share(part, kernels)
        first, second = kernels.reached.host.seconds(part, kernels.recipe)
        forward.append(Span(number * first, number * computes * share))
        backward.append(Span(number * second, number * computes * (1 - share)))
    return there_and_back(forward, backward)


def _forward_share(part: Work, kernels: Kernels) -> float:
    """Return the share of the forward in the products of a part; of the bytes where there are
    none.
    """
    # The backward has each product once, so its numbers are those of a forward without
    # recomputation.
    first = sum(n * kernels.linear(one) for one, n in part.backward.items())
    first += sum(n * kernels.attention(one) for one, n in part.attends_back.items())
    every = sum(n * kernels.linear(one) for one, n in part.forward.items())
    every += sum(n * kernels.linear_back(one) for one, n in part.backward.items())
    every += sum(n * kernels.attention(one) for one, n in part.attends.items())
    every += sum(n * kernels.attention_back(one) for one, n in part.attends_back.items())
    return first / every if every else 1 / (1 + BACKWARD_MOVES)


def _kernels(work: StepWork, device: Device, reached: Efficiencies) -> Kernels:
    p = work.run.precision
    recipe = p.quantized or p.format
    low = p.fp8_dot_product_attention
    element = bytes_of(p.format)
    gradient = gradient_bytes(work.run)
    return Kernels(device, reached, p.format, p.multiplies_in, recipe, element, gradient, low)


def _adds_apart(work: StepWork) -> bool:
    """Return whether weight gradients are added to their buffers in a pass of their own: our
    products in eight bits cannot add.
    """
    ours = work.run.precision.quantized is not None and work.run.kernels.linear != "te"
    return ours or not work.run.kernels.gradient_accumulation_fusion


def _computed(work: StepWork, stage: Work, kernels: Kernels) -> dict[str, float]:
    """Return the seconds of the device for one micro-batch, by part."""
    reached = kernels.reached
    moved = stage.moved
    if reached.host is not None and _adds_apart(work):
        weights = weights_of(stage, grouped=False) + weights_of(stage, grouped=True)
        moved += weights * reached.host.gradient_bytes
    parts = {
        "gemm": sum(n * kernels.linear(one) for one, n in stage.forward.items())
        + sum(n * kernels.linear_back(one) for one, n in stage.backward.items()),
        "attention": sum(n * kernels.attention(one) for one, n in stage.attends.items())
        + sum(n * kernels.attention_back(one) for one, n in stage.attends_back.items()),
        "memory": kernels.moved(moved),
    }
    parts = parts | _exchanged(work, stage, kernels)
    speed = reached.speed * (1.0 if work.run.model.moe is None else reached.mixtures)
    return {name: value / speed for name, value in parts.items()}


def _exchanged(work: StepWork, stage: Work, kernels: Kernels) -> dict[str, float]:
    grid = work.grid
    moe = work.run.model.moe
    reached = kernels.reached
    links = Links(kernels.device, reached)
    found = dict.fromkeys(("tp", "cp", "ep", "pp"), 0.0)
    behind = 0.0
    once = moe is not None and moe.token_dispatcher_type == "flex"
    for (exchange, product), number in stage.exchanges.items():
        name = "ep" if exchange.axis == "etp" else exchange.axis
        each = links.seconds(_group(grid, exchange.axis), exchange, once=once)
        found[name] += number * each
        if name == "tp" and product is not None and reached.overlapped["tp"]:
            behind += number * min(each, kernels.linear(product))
    hidden = {name: time * reached.overlapped[name] for name, time in found.items()}
    # in parts, during the product that reads or gives the tensor
    hidden["tp"] = behind * reached.overlapped["tp"]
    found = {name: time - hidden[name] for name, time in found.items()}
    found["ep"] += stage.mixtures * reached.pass_us * MICRO
    if grid.pp > 1:
        each = links.sent(work.sent, grid.world // grid.pp) * 2 * work.run.parallel.vpp
        # without virtual stages a stage computes nothing while it sends and waits
        found["pp"] = each * (1 - reached.overlapped["pp"] * (work.run.parallel.vpp > 1))
    return found


def _group(grid: RankGrid, axis: str) -> Group:
    strides = {"tp": 1, "cp": grid.tp, "etp": 1, "ep": grid.etp}
    return Group(grid.sizes[axis], strides[axis])
