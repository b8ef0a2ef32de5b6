"""Whether the memory that a configuration names holds its model, a sample and a batch: lower bounds, never guesses.

Where the state of a model is more than this machine has, that is a warning: it may be meant for another one, and a
run here is refused (`launching/preflight.py`). A sample or a batch that does not fit by itself is an error, and so
is a model that no machine holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtrain.config.batches import stages
from mtrain.config.devices import facts_of
from mtrain.config.formats import bytes_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.problem import problem_of
from mtrain.config.resolve import Machine
from mtrain.config.run import RunConfig
from mtrain.errors import Problem, Severity
from mtrain.plan.count import parameters, state_bytes
from mtrain.units import GIB, bytes_, count

MOST_PARAMETERS = 10**15
"""The state of so many needs 16 PB, which no machine has; the largest models that were trained have a hundredth."""
MOST_BYTES = 1 << 46
"""No single machine has more memory: 64 TiB."""
RANK_BYTES = 300 << 20
"""Memory of a CPU rank beside the model: what a forked interpreter with torch comes to own."""
TOKEN_BYTES = 28
"""Of a token of a batch: itself, its label and its position in 8 bytes each, its weight in the loss in 4."""


def memory_problems(run: RunConfig, machine: Machine, origins: Mapping[str, str]) -> list[Problem]:
    """What does not fit the devices that a resolved run names, or this machine where it runs on a CPU."""
    if parameters(run.model) > MOST_PARAMETERS:
        rule = (
            f"{count(parameters(run.model))} parameters, and {count(MOST_PARAMETERS)} are the most that are planned: "
            "no machine holds their state"
        )
        sizes = ("model.num_layers", "model.vocab_size", *_of_experts(run, "model.moe.num_experts"))
        return [problem_of(run, origins, "MT149", "model.hidden_size", rule, "model=llama_tiny", related=sizes)]
    if facts_of(run.cluster.device).on_host:
        if run.cluster.nodes > 1 or not machine.memory_bytes:
            return []
        return [*_state_here(run, machine, origins), *_sample_and_batch(run, _here(run, machine), origins)]
    device = _device(run)
    return [*_state_of_a_device(run, origins), *(_sample_and_batch(run, device, origins) if device else ())]


def bytes_here(run: RunConfig) -> int:
    """The least that the processes of a run on this machine's CPU come to own, before any sample."""
    return state_bytes(run) + (run.parallel.ranks or 1) * RANK_BYTES


def activation_bytes(run: RunConfig) -> int:
    """The least that one rank keeps of a micro-batch for its backward.

    The input of each layer of a stage, of one layer alone where whole layers are computed again, and the inside of an
    MLP while it is computed; with megatron-core's loss the logits, in fp32.
    """
    m, p = run.model, run.parallel
    size = bytes_of(run.precision.format)
    tokens = run.trainer.micro * run.data.length // (p.dp if p.hybrid_context_parallel else p.cp)
    parts = p.tp if p.sequence_parallel or p.recompute.distribute_saved_activations else 1
    layers = 1 if p.recompute.granularity == "full" else max(1, m.num_layers // p.pp)
    kept = layers * (tokens // parts) * m.hidden_size * size
    inside = tokens * m.ffn_hidden_size // p.tp * size if m.moe is None else 0
    logits = tokens * m.padded_vocab_size // p.tp * 4 if run.kernels.loss == "megatron" else 0
    return kept + inside + logits


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
    """Bytes of weights, gradients, optimizer state and processes in it; 0 where they alone are too many."""


def _here(run: RunConfig, machine: Machine) -> _Memory:
    state, holds, ranks = bytes_here(run), machine.memory_bytes, run.parallel.ranks or 1
    if state > holds:  # meant for other machines, which are not named
        return _Memory("the largest machine", MOST_BYTES, 1, -(-_largest(run) // ranks), 0)
    return _Memory("this machine", holds, ranks, _largest(run), state)


def _device(run: RunConfig) -> _Memory | None:
    memory, ranks = run.cluster.device_memory_gib, run.parallel.ranks or 1
    if memory is None:
        return None
    state, holds = state_bytes(run) // ranks, int(memory * GIB)
    known = state <= holds and not run.optim.cpu_offload
    samples = -(-_largest(run) // run.parallel.dp)
    return _Memory(f"a device of {run.cluster.name}", holds, 1, samples, state if known else 0)


def _largest(run: RunConfig) -> int:
    return max(stage.size for stage in stages(run))


def _sample_and_batch(run: RunConfig, memory: _Memory, origins: Mapping[str, str]) -> list[Problem]:
    """The error of a micro-batch, or of the tokens of a step, that do not fit."""
    t, seq = run.trainer, run.data.length
    kept, tokens = memory.ranks * activation_bytes(run), memory.samples * seq * TOKEN_BYTES
    need = memory.state + kept + tokens
    if need <= memory.holds:
        return []
    left = max(1, memory.holds - memory.state)
    beside = f" beside {bytes_(memory.state)} for weights, gradients and optimizer state" if memory.state else ""
    if tokens > kept:
        key, what = "trainer.global_batch_size", f"{memory.samples} samples of {seq} tokens"
        fits = t.batch * max(0, left - kept) // tokens
    else:
        key, what = "data.seq_length", f"activations of {t.micro} sample{'s' * (t.micro > 1)} of {seq} tokens"
        fits = seq * left // (kept + tokens)
        if t.micro > 1 and kept // t.micro + tokens <= left:
            key, fits = "trainer.micro_batch_size", t.micro * (left - tokens) // kept
    fits = 1 << (fits.bit_length() - 1) if fits else 0
    fix = f"{key}={fits}" if fits > 1 else "less of both: trainer.global_batch_size and data.seq_length"
    rule = f"{what} need at least {bytes_(need - memory.state)}{beside}; {memory.name} has {bytes_(memory.holds)}"
    # alone it would fit: then the model is what is too large for this machine, and a run here is refused
    here = facts_of(run.cluster.device).on_host
    severity: Severity = "warning" if here and kept + tokens <= memory.holds else "error"
    step = ("data.seq_length", "trainer.global_batch_size", "trainer.micro_batch_size")
    related = [*(k for k in step if k != key), "parallel.cp", "parallel.ranks"]
    return [problem_of(run, origins, "MT147", key, rule, fix, severity=severity, related=related)]


def _of_experts(run: RunConfig, key: str) -> tuple[str, ...]:
    return (key,) if run.model.moe is not None else ()


def _state_here(run: RunConfig, machine: Machine, origins: Mapping[str, str]) -> list[Problem]:
    """A warning where the model alone, in its processes, is more than the memory of this machine."""
    need, ranks = bytes_here(run), run.parallel.ranks or 1
    if need <= machine.memory_bytes:
        return []
    rule = (
        f"weights, gradients and optimizer state in {ranks} process{'es' * (ranks > 1)} need {bytes_(need)}, and "
        f"this machine has {bytes_(machine.memory_bytes)}; the machines that it is meant for have a name, as in "
        "cluster=h100x64"
    )
    related = ("cluster.device", "cluster.nodes", "parallel.ranks")
    return [
        problem_of(run, origins, "MT140", "model.name", rule, "model=llama_tiny", severity="warning", related=related)
    ]


def _state_of_a_device(run: RunConfig, origins: Mapping[str, str]) -> list[Problem]:
    """The same of one device; state in host memory is not counted, so nothing is said where there is some."""
    memory, ranks = run.cluster.device_memory_gib, run.parallel.ranks or 1
    if memory is None or run.optim.cpu_offload or state_bytes(run) <= memory * GIB * ranks:
        return []
    sharded = run.model_copy(update={"parallel": run.parallel.model_copy(update={"distributed_optimizer": True})})
    can = "distributed_optimizer" not in OPTIMIZERS[run.optim.name].cannot and run.parallel.fsdp == "none"
    helps = can and state_bytes(sharded) <= memory * GIB * ranks
    need, here = bytes_(state_bytes(run) / ranks), bytes_(memory * GIB)
    rule = f"weights, gradients and optimizer state need at least {need} a device, and {run.cluster.name} has {here}"
    fix = "parallel.distributed_optimizer=true" if helps else "a cluster of more devices, or a larger tp, pp or ep"
    sharded_by = [f"parallel.{key}" for key in ("ranks", "tp", "pp", "distributed_optimizer")]
    related = ("model.name", *sharded_by, *_of_experts(run, "parallel.ep"))
    key = "cluster.device_memory_gib"
    return [problem_of(run, origins, "MT146", key, rule, fix, severity="warning", related=related)]
