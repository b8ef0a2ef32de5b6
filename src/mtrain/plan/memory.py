"""Memory rules: whether the configured devices hold the model, a sample and a batch.

A sample or a batch that does not fit by itself is an error, and so is a model that no machine
holds; both are lower bounds: the saved tensors of one micro-batch, on top of the state. Where the
plan of a step exceeds the memory of a device, or the state of a model that of this machine, the
problem is a warning: a plan contains estimates, and the model may be meant for another machine. A
run here is refused (`launching/preflight.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtrain.config.families import limited
from mtrain.config.machine.devices import facts_of
from mtrain.config.messages.problem import problem_of
from mtrain.config.resolve.batches import stages
from mtrain.config.resolve.resolution import Machine
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Problem, Severity
from mtrain.layout.grid import held_stages
from mtrain.models.graph import kept
from mtrain.models.rank import Rank
from mtrain.models.registry import family_of
from mtrain.plan.count import TOKEN_BYTES, parameters, state_bytes
from mtrain.plan.fits import cheapest, over
from mtrain.units import GIB, bytes_, count, number_of

# The state of so many parameters needs 16 PB, which no machine has; the largest trained models
# have a hundredth.
MOST_PARAMETERS = 10**15
# No single machine has more memory than 64 TiB.
MOST_BYTES = 1 << 46
# Memory of a CPU rank on top of the model: a forked interpreter with torch.
RANK_BYTES = 300 << 20


def memory_problems(run: RunConfig, machine: Machine, origins: Mapping[str, str]) -> list[Problem]:
    """Return the memory problems of a resolved run on its devices, or on this CPU machine."""
    if parameters(run.model) > MOST_PARAMETERS:
        rule = (
            f"{count(parameters(run.model))} parameters, and {count(MOST_PARAMETERS)} are the most"
            " that are planned: no machine holds their state"
        )
        sizes = ("model.num_layers", "model.vocab_size", *_of_experts(run, "model.moe.num_experts"))
        return [
            problem_of(
                run, origins, "MT149", "model.hidden_size", rule, "model=llama_tiny", related=sizes
            )
        ]
    if facts_of(run.cluster.device).on_host:
        if run.cluster.nodes > 1 or not machine.memory_bytes:
            return []
        return [
            *_state_here(run, machine, origins),
            *_sample_and_batch(run, _here(run, machine), origins),
        ]
    device = _device(run)
    return [
        *_state_of_a_device(run, origins),
        *(_sample_and_batch(run, device, origins) if device else ()),
    ]


def bytes_here(run: RunConfig) -> int:
    """Return a lower bound of a CPU run's memory on this machine, before any sample."""
    return state_bytes(run) + run.parallel.ranks * RANK_BYTES


def activation_bytes(run: RunConfig) -> int:
    """Return the bytes that a rank saves of one micro-batch, as the mean over stages."""
    return sum(_kept(run)) // run.parallel.pp


def _kept(run: RunConfig) -> list[int]:
    """Return the bytes that autograd saves of one micro-batch by stage; empty if unknown."""
    family = family_of(run.model)
    if family.stage is None:
        return [0]
    try:
        stages = held_stages(run)
    except ValueError:
        # A rule reports why.
        return [0]
    rank = Rank.of(run)
    return [sum(kept(family.stage(rank, stage)) for stage in held) for held in stages]


@dataclass(frozen=True)
class _Memory:
    """Some memory, and how much of a run has to fit into it."""

    name: str
    holds: int
    """Bytes."""
    ranks: int
    """Ranks whose activations are in it."""
    samples: int
    """Samples of a step that are in it at once."""
    state: int
    """Bytes of weights, gradients, optimizer state and processes; 0 if these are too many."""

    def activations(self, run: RunConfig) -> int:
        """Return the saved bytes of one micro-batch on its ranks; on one, of the largest stage."""
        every = _kept(run)
        return max(every) if self.ranks == 1 else self.ranks * sum(every) // len(every)


def _here(run: RunConfig, machine: Machine) -> _Memory:
    state = bytes_here(run)
    holds = machine.memory_bytes
    ranks = run.parallel.ranks
    # The run is for other machines, which it does not name.
    if state > holds:
        return _Memory("the largest machine", MOST_BYTES, 1, -(-_largest(run) // ranks), 0)
    return _Memory("this machine", holds, ranks, _largest(run), state)


def _device(run: RunConfig) -> _Memory | None:
    memory = run.cluster.device_memory_gib
    if memory is None:
        return None
    samples = -(-_largest(run) // run.parallel.dp)
    # on top of the state is another question, which `_state_of_a_device` answers with a warning
    return _Memory(f"a device of {run.cluster.name}", int(memory * GIB), 1, samples, 0)


def _largest(run: RunConfig) -> int:
    return max(stage.size for stage in stages(run))


def _sample_and_batch(run: RunConfig, memory: _Memory, origins: Mapping[str, str]) -> list[Problem]:
    """Return the error of a micro-batch, or of the tokens of a step, that do not fit."""
    t = run.trainer
    seq = run.data.length
    held = memory.activations(run)
    tokens = memory.samples * seq * TOKEN_BYTES
    need = memory.state + held + tokens
    if need <= memory.holds:
        return []
    left = max(1, memory.holds - memory.state)
    if memory.state:
        beside = f" beside {bytes_(memory.state)} for weights, gradients and optimizer state"
    else:
        beside = ""
    if tokens > held:
        key = "trainer.global_batch_size"
        what = f"{memory.samples} samples of {seq} tokens"
        fits = _power_of_two(t.batch * max(0, left - held) // tokens)
    else:
        key = "data.seq_length"
        what = f"activations of {number_of(t.micro, 'sample')} of {seq} tokens"
        fits = _longest(run, memory, left)
        if t.micro > 1 and held // t.micro + tokens <= left:
            key = "trainer.micro_batch_size"
            fits = _power_of_two(t.micro * (left - tokens) // held)
    if fits > 1:
        fix = f"{key}={fits}"
    else:
        fix = "less of both: trainer.global_batch_size and data.seq_length"
    kept = limited(run.model.family, "parallel.recompute.granularity") is not None
    if key == "data.seq_length" and not kept and memory.activations(_again(run)) + tokens <= left:
        fix = f"parallel.recompute.granularity=full or {fix}"
    rule = (
        f"{what} need at least {bytes_(need - memory.state)}{beside}; {memory.name} has"
        f" {bytes_(memory.holds)}"
    )
    # without that it would fit: the model is too large for this machine, and a run here is
    # refused
    here = facts_of(run.cluster.device).on_host
    severity: Severity = "warning" if here and held + tokens <= memory.holds else "error"
    step = ("data.seq_length", "trainer.global_batch_size", "trainer.micro_batch_size")
    related = [*(k for k in step if k != key), "parallel.cp", "parallel.ranks"]
    return [problem_of(run, origins, "MT147", key, rule, fix, severity=severity, related=related)]


def _again(run: RunConfig) -> RunConfig:
    """Return the same run with every layer recomputed."""
    p = run.parallel
    again = p.recompute.model_copy(update={"granularity": "full", "modules": None})
    return run.model_copy(update={"parallel": p.model_copy(update={"recompute": again})})


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1) if number else 0


def _longest(run: RunConfig, memory: _Memory, left: int) -> int:
    """Return the longest fitting sample, a power of two; some kernels need its square."""
    length = _power_of_two(run.data.length - 1)
    while length > 1:
        shorter = run.model_copy(
            update={"data": run.data.model_copy(update={"seq_length": length})}
        )
        if memory.activations(shorter) + memory.samples * length * TOKEN_BYTES <= left:
            return length
        length //= 2
    return 0


def _of_experts(run: RunConfig, key: str) -> tuple[str, ...]:
    return (key,) if run.model.moe is not None else ()


def _state_here(run: RunConfig, machine: Machine, origins: Mapping[str, str]) -> list[Problem]:
    """Return a warning if the model's own processes exceed the memory of this machine."""
    need = bytes_here(run)
    ranks = run.parallel.ranks
    if need <= machine.memory_bytes:
        return []
    rule = (
        f"weights, gradients and optimizer state in {number_of(ranks, 'process')} need"
        f" {bytes_(need)}, and this machine has {bytes_(machine.memory_bytes)}"
    )
    related = ("cluster.device", "cluster.nodes", "parallel.ranks")
    return [
        problem_of(
            run,
            origins,
            "MT140",
            "model.name",
            rule,
            "model=llama_tiny, or name the machines to plan for, such as cluster=h100x64",
            severity="warning",
            related=related,
        )
    ]


def _state_of_a_device(run: RunConfig, origins: Mapping[str, str]) -> list[Problem]:
    """Return a warning if the plan of a step does not fit a device."""
    limits = {
        f"{run.cluster.name} has": run.cluster.device_memory_gib,
        "parallel.recompute.budget_gib is": run.parallel.recompute.budget_gib,
    }
    known = {word: limit for word, limit in limits.items() if limit is not None}
    ranks = run.parallel.ranks
    if not known:
        return []
    limit, memory = min(known.items(), key=lambda one: one[1])
    # moments in host memory are not on a device
    state = 0 if run.optim.cpu_offload else state_bytes(run) / ranks
    found = over(run, int(memory * GIB))
    if found is None and state <= memory * GIB:
        return []
    if found is None:
        what = f"weights, gradients and optimizer state need at least {bytes_(state)} a device"
    else:
        what = (
            f"a step needs {bytes_(found.needed)} on a device of pipeline stage {found.stage}:"
            f" {found.largest()}"
        )
    rule = f"{what}; {limit} {bytes_(memory * GIB)}"
    fix = cheapest(run, int(memory * GIB)) or "a cluster of more devices, or a larger tp, pp or ep"
    sharded_by = [f"parallel.{key}" for key in ("ranks", "tp", "pp", "distributed_optimizer")]
    related = (
        "model.name",
        *sharded_by,
        *_of_experts(run, "parallel.ep"),
        "trainer.micro_batch_size",
    )
    key = "cluster.device_memory_gib"
    return [problem_of(run, origins, "MT146", key, rule, fix, severity="warning", related=related)]
