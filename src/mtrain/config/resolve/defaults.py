"""Defaults that depend on the model, the device or the layout, each with the reason that `show`
prints.

Every function reads only the configuration, and replaces no value that is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil, lcm
from pathlib import PurePath
from typing import Any, NamedTuple

from mtrain.config.compose.paths import CHECKPOINTS, RESUME_WORDS
from mtrain.config.disk.files import kind_of_chats
from mtrain.config.families import limited
from mtrain.config.machine.devices import facts_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve import fine_tuning
from mtrain.config.resolve.batches import samples_of, stages, steps_within
from mtrain.config.resolve.fine_tuning import CHATS, nearest, visited_parameters
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig, UnresolvedRun
from mtrain.errors import Problem
from mtrain.models.t5.config import lengths, padded, spans
from mtrain.units import count

# The value of a null key, and the reason as printed after `resolved from`.
Derived = tuple[Any, str]
# Derives one key; None leaves it null. The configuration that it reads holds what is set and what
# earlier steps derived.
Step = Callable[[RunConfig], Derived | None]

# Samples of a step and tokens of a sample that a CPU trains in a second.
CPU_BATCH = 8
CPU_LENGTH = 256
# The largest vocabulary for which text that every machine has is enough.
SMALL_TOKENIZER = 4096
# The longest default sample in tokens; longer samples belong to a later phase of training.
LONGEST = 8192
# The first NVIDIA generation with bf16 (A100).
FIRST_WITH_BF16 = 80
# Steps per minute on two cores with the default model, and with half of it.
CPU_STEPS = 80
CPU_INTERVAL = 40
TOKENS_PER_PARAMETER = 20
CHINCHILLA = "Chinchilla (arXiv 2203.15556)"
# Minutes between checkpoints and evaluations on GPUs: a failure then costs half of that on average.
MINUTES = 30.0


class Trained(NamedTuple):
    """A model of table 2.1 of the GPT-3 paper."""

    name: str
    parameters: float
    lr: float
    batch_tokens: int


GPT3_TABLE = "GPT-3 table 2.1 (arXiv 2005.14165)"
# Rates and batches by size; batches of 0.5M to 3.2M tokens as whole samples of 2,048.
GPT3 = (
    Trained("125M", 125e6, 6e-4, 256 * 2048),
    Trained("350M", 350e6, 3e-4, 256 * 2048),
    Trained("760M", 760e6, 2.5e-4, 256 * 2048),
    Trained("1.3B", 1.3e9, 2e-4, 512 * 2048),
    Trained("2.7B", 2.7e9, 1.6e-4, 512 * 2048),
    Trained("6.7B", 6.7e9, 1.2e-4, 1024 * 2048),
    Trained("13B", 13e9, 1e-4, 1024 * 2048),
    Trained("175B", 175e9, 0.6e-4, 1536 * 2048),
)


def is_fine_tuning(run: RunConfig) -> Derived:
    """Return whether a run fine-tunes: on chats, or with adapters of a frozen model."""
    if run.data.kind in CHATS:
        return True, f"data.kind {run.data.kind}"
    if run.objective.answers:
        return True, f"objective.name {run.objective.name}"
    if run.peft.kind is not None:
        return True, f"peft.kind {run.peft.kind}"
    return False, "neither chats nor adapters"


def head_of_model(run: RunConfig) -> Derived | None:
    """Return the layer behind the last norm that an objective reads; None: the output layer."""
    if run.model.family != "gpt" or not run.objective.reads_values:
        return None
    return "value", f"objective.name {run.objective.name}"


def data_kind(run: RunConfig) -> Derived:
    """Return the kind of data: that of the files, else local text or synthetic tokens."""
    d = run.data
    m = run.model
    if m.family == "llava":
        if d.path is not None:
            return "image_text", "data.path"
        return "mock", f"model.family {m.family}, and data.path is null"
    if run.objective.rolls and d.path is not None:
        return "prompts", f"objective.name {run.objective.name}, and data.path"
    if run.objective.answers and d.path is None:
        return "mock", f"objective.name {run.objective.name}, and data.path is null"
    # Before `text`: a file of chats would train as plain text without an error.
    if (chats := kind_of_chats(d.path)) is not None:
        return chats, "the first line of data.path"
    if d.path is not None or d.limit_mib is not None:
        return "text", "data.path" if d.path is not None else "data.limit_mib"
    small = m.vocab_size <= 2 * max(d.tokenizer_vocab_size, SMALL_TOKENIZER)
    kind = "text" if small and on_a_cpu(run) else "mock"
    return kind, f"{m.name}: vocab_size {m.vocab_size}, and cluster.device {run.cluster.device}"


def tokenizer_of_chats(run: RunConfig) -> Derived | None:
    """Return the tokenizer of chats: that of the model whose weights the run starts from."""
    key = "init_from"
    if run.checkpoint.resume is not None and run.checkpoint.resume not in RESUME_WORDS:
        key = "resume"
    source = getattr(run.checkpoint, key)
    if run.data.kind not in CHATS or source is None:
        return None
    folder = PurePath(source)
    if folder.parent.name == CHECKPOINTS:
        # The tokenizer is in the run folder: runs/NAME/checkpoints/STEP has none.
        folder = folder.parent.parent
    return str(folder / "tokenizer.json"), f"checkpoint.{key} {source}"


def number_format(run: RunConfig) -> Derived:
    """Return bf16 for a device that has it (NVIDIA: sm_80 and newer, or unknown)."""
    c = run.cluster
    if run.precision.quantized is not None:
        return "bf16", f"the {run.precision.quantized} recipe needs bf16"
    if c.sm is not None:
        if c.sm >= FIRST_WITH_BF16:
            return "bf16", f"cluster {c.name}: bf16 on sm_{c.sm}"
        return "fp32", f"cluster {c.name}: no bf16 on sm_{c.sm}"
    if "bf16" in c.peak_tflops:
        return "bf16", f"cluster {c.name}: bf16 in cluster.peak_tflops"
    if facts_of(c.device).cuda_kernels:
        return "bf16", f"cluster.device {c.device}, whose cluster.sm is not known"
    return "fp32", f"cluster.device {c.device}"


def sample_length(run: RunConfig) -> Derived:
    """Return the model's positions, at most 8,192; on a CPU at most 256."""
    most = CPU_LENGTH if on_a_cpu(run) else LONGEST
    positions = run.model.max_position_embeddings
    if run.model.family == "llava" and run.model.llava is not None:
        # The image of a sample comes in addition to its text.
        most += run.model.llava.image_tokens
    why = f"{run.model.name}: max_position_embeddings {positions}"
    if positions > most:
        why += f", at most {most}" + (" on a CPU" if on_a_cpu(run) else "")
    return min(most, positions), why


def span_length(run: RunConfig, part: int) -> Derived | None:
    """Return the tokens of a sample that an encoder (0) reads or a decoder (1) predicts."""
    t = run.model.t5
    if t is None:
        return None
    tokens = run.data.length
    hidden, number = spans(t, tokens)
    which = f"the {hidden} others" if part else f"{tokens - hidden} of them"
    why = f"data.seq_length {tokens}: {which}, a sentinel for each of {number} spans, an end"
    return padded(lengths(t, tokens)[part]), why


def sequence_parallel(run: RunConfig) -> Derived:
    """Return whether sequence parallelism is on: with tp; on a CPU only if experts need it."""
    p = run.parallel
    t = run.model.t5
    if p.tp == 1 or run.model.moe is not None:
        return p.tp > 1, f"tp {p.tp}" + (" and experts" if p.tp > 1 else "")
    if on_a_cpu(run):
        return False, "cluster.device cpu"
    if p.recompute.distribute_saved_activations:
        return False, "parallel.recompute.distribute_saved_activations true"
    if t is None:
        sharded = {"data.seq_length": run.data.length}
    else:
        sharded = {
            "model.t5.encoder_length": t.encoder_length or 0,
            "model.t5.decoder_length": t.decoder_length or 0,
        }
    for key, length in sharded.items():
        # Each rank holds an equal part of the sequence.
        if length % (p.tp * p.cp):
            return False, f"{key} {length}, which tp {p.tp} * cp {p.cp} does not divide"
    return True, f"tp {p.tp}"


def distributed_optimizer(run: RunConfig) -> Derived:
    """Return whether the optimizer is distributed: if ranks on GPUs hold the same weights."""
    on, why = _replicated(run)
    if on and "distributed_optimizer" in OPTIMIZERS[run.optim.name].cannot:
        return False, f"optim.name {run.optim.name}"
    return on, why


def overlap_grad_reduce(run: RunConfig) -> Derived:
    """Return whether gradient reduction overlaps: if ranks on GPUs hold the same weights."""
    on, why = _replicated(run)
    if on and run.parallel.hybrid_context_parallel:
        return False, "parallel.hybrid_context_parallel true"
    return on, why


def overlap_param_gather(run: RunConfig) -> Derived:
    """Return whether parameter gathers overlap: if any, and if gradient reduction does."""
    on, why = _replicated(run)
    if on and not run.parallel.distributed_optimizer:
        return False, "parallel.distributed_optimizer false"
    if on and not run.parallel.overlap_grad_reduce:
        return False, "parallel.overlap_grad_reduce false"
    return on, why


def learning_rate(run: RunConfig) -> Derived:
    """Return the model's own rate, a published one for fine-tuning, or the nearest GPT-3's."""
    known = run.model.published
    if run.trainer.fine_tuning:
        row = fine_tuning.published(run)
        rate = row.lr
        why = f"{row.source}: its {row.name} model" + (", adapters" if run.peft.kind else "")
    elif known is not None and known.peak_lr is not None:
        rate = known.peak_lr
        why = f"{run.model.name}: {known.source}"
    else:
        near = nearest_gpt3(run.model)
        rate = near.lr
        why = f"{GPT3_TABLE}: its {near.name} model"
    # Rates are published for AdamW.
    share = OPTIMIZERS[run.optim.name].of_adamw_lr
    if share != 1:
        return as_written(share * rate), f"{why}, times {share:g} for {run.optim.name}"
    return rate, why


def warmup(run: RunConfig) -> Derived:
    """Return a warm-up of 5% of the steps; fine-tuning warms up for 3%."""
    steps = run.optim.decay_iters or run.trainer.steps
    key = "trainer.train_iters" if run.optim.decay_iters is None else "optim.decay_iters"
    if run.trainer.fine_tuning:
        return steps * 3 // 100, f"{key} {steps}: 3%, as {fine_tuning.TULU_3}"
    return steps // 20, f"{key} {steps}: a twentieth"


def final_rate(run: RunConfig) -> Derived:
    """Return a final rate of 10%.

    The rate of fine-tuning reaches zero after the last step, so that even a run of one step learns.
    """
    rate = run.optim.lr
    if run.trainer.fine_tuning:
        steps = run.optim.decay_iters or run.trainer.steps
        why = f"optim.lr {rate:g} of {steps} steps: zero after the last, as"
        return as_written(rate / steps), f"{why} {fine_tuning.TULU_3}"
    return tenth(rate), f"optim.lr {rate:g}: a tenth"


def tenth(rate: float) -> float:
    """Return a tenth of a learning rate in a short decimal form."""
    return as_written(rate / 10)


def as_written(rate: float) -> float:
    """Return a rate without digits that only rounding produced."""
    return float(f"{rate:.6g}")


def background_saves(run: RunConfig) -> Derived:
    """Return whether checkpoints are written in the background: while a device computes."""
    device = run.cluster.device
    return not facts_of(device).on_host, f"cluster.device {device}"


def sample_tokens(run: RunConfig) -> Derived:
    """Return the tokens to generate, 0 unless a tokenizer and the layout allow it."""
    d = run.data
    if limited(run.model.family, "trainer.sample_tokens") is not None:
        return 0, f"model.family {run.model.family}, which continues no text"
    if run.model.head:
        return 0, f"model.head {run.model.head}"
    if run.trainer.cuda_graph_impl != "none":
        return 0, f"trainer.cuda_graph_impl {run.trainer.cuda_graph_impl}"
    tokenizer = d.kind == "text" or (d.kind == "indexed" and d.tokenizer is not None)
    if tokenizer and run.parallel.cp > 1:
        return 0, f"parallel.cp {run.parallel.cp}"
    return 64 if tokenizer else 0, f"data.kind {d.kind}"


def batch(run: RunConfig) -> Derived:
    """Return the batch that fits the rest: with a given micro-batch, a multiple of it."""
    p = run.parallel
    known = run.model.published
    if on_a_cpu(run):
        samples = CPU_BATCH
        why = "cluster.device cpu"
    elif run.trainer.fine_tuning:
        samples, why = fine_tuning.batch_of(run)
    elif known is not None and known.batch_tokens is not None:
        samples = -(-known.batch_tokens // run.data.length)
        why = f"{known.batch_tokens} tokens of {run.model.name}: {known.source}"
    else:
        near = nearest_gpt3(run.model)
        samples = -(-near.batch_tokens // run.data.length)
        why = f"{near.batch_tokens} tokens of {GPT3_TABLE}: its {near.name} model"
    # A micro-batch that is not set is derived next, from this batch.
    least = run.together
    step = (run.trainer.micro_batch_size or least) * p.dp * (p.pp if p.vpp > 1 else 1)
    step = lcm(step, run.objective.whole)
    whole = -(-samples // step) * step
    return whole, why + (f", in multiples of {step}" if whole > samples else "")


def micro_batch(run: RunConfig) -> Derived:
    """Return the largest micro-batch that splits every step evenly and fills the pipeline; on GPUs
    also one of few tokens, so that it fits in memory.
    """
    p = run.parallel
    # A pair is two samples, which stay together.
    least = run.together
    short = on_a_cpu(run)
    sizes = [n for n in (8, 4, 2) if n == least or short or n * run.data.length <= LONGEST]
    sizes += [1] * (least == 1)
    size = filling(run, sizes)[0]
    why = f"{run.trainer.batch} samples on dp {p.dp}, pp {p.pp}"
    return size, why if on_a_cpu(run) else f"{why}, of {run.data.length} tokens"


def filling(run: RunConfig, sizes: Sequence[int]) -> list[int]:
    """Return those of falling `sizes` of a micro-batch that split every step evenly and fill the
    pipeline; if there are none, the smallest of them that splits evenly, or the last.
    """
    p = run.parallel
    # the samples of a data-parallel rank in each size of step
    shares = [size // p.dp for _, size in stages(run)]
    even = [size for size in sizes if all(share and share % size == 0 for share in shares)]
    if p.vpp > 1:
        even = [size for size in even if all(share // size % p.pp == 0 for share in shares)] or even
    # Fewer micro-batches than stages leave a part of the pipeline idle in every step.
    return [size for size in even if min(shares) // size >= p.pp] or (even or [sizes[-1]])[-1:]


def train_iters(run: RunConfig) -> Derived:
    """Return the steps: epochs of chats, a minute on a CPU, or 20 tokens per active parameter."""
    host = facts_of(run.cluster.device).on_host
    if run.trainer.fine_tuning and (run.data.kind in CHATS or not host):
        return fine_tuning.steps_of(run)
    if host:
        return CPU_STEPS, f"cluster.device {run.cluster.device}"
    size = visited_parameters(run.model)
    samples = ceil(TOKENS_PER_PARAMETER * size / run.data.length)
    plan = stages(run)
    steps = steps_within(plan, samples)
    # One more step reads the rest, if the last whole one leaves any.
    steps += samples_of(plan, steps) < samples
    each = f"{TOKENS_PER_PARAMETER} tokens for each of {count(size)} parameters that a token visits"
    return steps, f"{each}: {CHINCHILLA}"


def minutes_between(run: RunConfig, interval: int | None) -> Derived | None:
    """Return the minutes between evaluations or checkpoints on GPUs, unless steps set them."""
    if interval is not None or facts_of(run.cluster.device).on_host:
        return None
    return MINUTES, f"cluster.device {run.cluster.device}"


def steps_between(run: RunConfig, key: str, minutes: float | None) -> Derived:
    """Return the steps between evaluations or checkpoints: 0 if the minutes at `key` set them."""
    if minutes is not None:
        return 0, f"{key} {minutes:g}"
    return CPU_INTERVAL, f"cluster.device {run.cluster.device}"


def synthetic_tokens(raw: UnresolvedRun, run: RunConfig, source: str) -> Iterator[Problem]:
    """Yield a warning if a resolved run trains on synthetic tokens that the user did not choose."""
    if raw.data.kind is None and run.data.kind == "mock":
        named = "data=text data.path=FOLDER or data=indexed data.path=PREFIX"
        if run.model.family == "llava":
            named = "data=image_text data.path=FOLDER"
        fix = f"{named}, or data=mock if synthetic tokens are meant"
        yield Problem("MT322", "data.kind", "mock", "", fix, source, "warning")


def logits_at_once(run: RunConfig) -> Derived | None:
    """Return a 128th of the device's memory as a power of two, to pass weights rarely."""
    room = run.cluster.device_memory_gib
    if run.kernels.loss == "megatron" or room is None or on_a_cpu(run):
        return None
    why = f"cluster {run.cluster.name}: device_memory_gib {room:g}, a 128th of it"
    return 1 << max(8, int(room * 8).bit_length() - 1), why


def join_timeout(run: RunConfig) -> Derived:
    """Derive the join timeout from the number of machines that load the same libraries."""
    nodes = run.cluster.nodes
    return usual_join_timeout_s(nodes), f"cluster {run.cluster.name}: nodes {nodes}"


def usual_join_timeout_s(nodes: int) -> float:
    """Return one minute, and one more for each doubling of the machines."""
    return 60.0 * (1 + max(0, nodes - 1).bit_length())


def on_a_cpu(run: RunConfig) -> bool:
    """Return whether the resolved device of a run is a CPU."""
    return facts_of(run.cluster.device).on_host


def nearest_gpt3(model: ModelConfig) -> Trained:
    """Return the GPT-3 whose size is nearest, by ratio, to the parameters that a token visits."""
    return nearest(GPT3, model)


def _replicated(run: RunConfig) -> tuple[bool, str]:
    """Return whether ranks on GPUs hold the same weights, and the reason."""
    p = run.parallel
    if on_a_cpu(run):
        return False, "cluster.device cpu"
    if p.fsdp != "none":
        return False, f"parallel.fsdp {p.fsdp}, which does so by itself"
    return p.dp * p.cp > 1, f"dp {p.dp}" + (f" * cp {p.cp}" if p.cp > 1 else "")


def fused_accumulation(run: RunConfig) -> Derived:
    """Return whether products add to gradients: wherever a buffer for them stays, on a GPU."""
    p = run.parallel
    if on_a_cpu(run):
        return False, "cluster.device cpu"
    return p.fsdp == "none", f"parallel.fsdp {p.fsdp}"


# The default of each key, in order: later ones read the values of earlier ones.
def replayed_routes(run: RunConfig) -> Derived | None:
    """Return whether the trainer uses the experts that the sampler chose."""
    if not run.objective.judges or run.model.moe is None:
        return None
    kind = run.model.moe.router_load_balancing_type
    if kind == "sinkhorn":
        return False, f"model.moe.router_load_balancing_type {kind}"
    if run.rollout.environment is not None:
        return False, f"rollout.environment {run.rollout.environment}"
    return run.rollout.engine == "local", f"rollout.engine {run.rollout.engine}"


STEPS: Mapping[str, Step] = {
    "model.head": head_of_model,
    "trainer.fine_tuning": is_fine_tuning,
    "data.kind": data_kind,
    "data.tokenizer": tokenizer_of_chats,
    "precision.dtype": number_format,
    "data.seq_length": sample_length,
    "model.t5.encoder_length": partial(span_length, part=0),
    "model.t5.decoder_length": partial(span_length, part=1),
    "rollout.replay_routes": replayed_routes,
    "parallel.sequence_parallel": sequence_parallel,
    "parallel.distributed_optimizer": distributed_optimizer,
    "parallel.overlap_grad_reduce": overlap_grad_reduce,
    "parallel.overlap_param_gather": overlap_param_gather,
    "optim.lr": learning_rate,
    "trainer.sample_tokens": sample_tokens,
    "trainer.global_batch_size": batch,
    "trainer.micro_batch_size": micro_batch,
    "trainer.train_iters": train_iters,
    "trainer.eval_minutes": lambda r: minutes_between(r, r.trainer.eval_interval),
    "trainer.eval_interval": lambda r: steps_between(
        r, "trainer.eval_minutes", r.trainer.eval_minutes
    ),
    "checkpoint.save_minutes": lambda r: minutes_between(r, r.checkpoint.save_interval),
    "checkpoint.save_interval": lambda r: steps_between(
        r, "checkpoint.save_minutes", r.checkpoint.save_minutes
    ),
    "checkpoint.async_save": background_saves,
    "optim.warmup_iters": warmup,
    "optim.min_lr": final_rate,
    "kernels.loss_logits_mib": logits_at_once,
    "kernels.gradient_accumulation_fusion": fused_accumulation,
    "trainer.join_timeout_s": join_timeout,
}
