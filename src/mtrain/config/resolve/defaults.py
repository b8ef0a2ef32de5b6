"""Defaults that depend on the model, the device or the layout, each with the reason that `show`
prints.

Every function reads only the configuration, and replaces no value that is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from mtrain.config.compose.paths import CHECKPOINTS, RESUME_WORDS
from mtrain.config.disk.first_record import kind_of_chats
from mtrain.config.families import limited
from mtrain.config.machine.devices import facts_of
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.resolve import fine_tuning, run_length
from mtrain.config.resolve.batches import stages
from mtrain.config.resolve.fine_tuning import CHATS, nearest
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.errors import Problem
from mtrain.models.t5.config import lengths, padded, spans

Filled = Mapping[str, tuple[Any, str]]
"""Dotted key -> its value, and the reason as printed after `resolved from`."""
Step = Callable[[RunConfig], Filled]

CPU_BATCH = 8
CPU_LENGTH = 256
"""Samples of a step and tokens of a sample that a CPU trains in a second."""
SMALL_TOKENIZER = 4096
"""The largest vocabulary for which text that every machine has is enough."""
LONGEST = 8192
"""The longest default sample in tokens; longer samples belong to a later phase of training."""
FIRST_WITH_BF16 = 80
"""The first NVIDIA generation with bf16 (A100)."""


class Trained(NamedTuple):
    """A model of table 2.1 of the GPT-3 paper."""

    name: str
    parameters: float
    lr: float
    batch_tokens: int


GPT3_TABLE = "GPT-3 table 2.1 (arXiv 2005.14165)"
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
"""Rates and batches by size; batches of 0.5M to 3.2M tokens as whole samples of 2,048."""


def data_kind(run: RunConfig) -> Filled:
    """Return the kind of data: chats or text if they are set, local text for a small vocabulary,
    else synthetic tokens.
    """
    d = run.data
    vocabulary = run.model.vocab_size
    if d.kind is not None:
        return {}
    if run.model.family == "llava":
        named = d.path is not None
        why = "data.path" if named else f"model.family {run.model.family}, and data.path is null"
        return {"data.kind": ("image_text" if named else "mock", why)}
    if (chats := kind_of_chats(d.path)) is not None:
        return {"data.kind": (chats, "the first line of data.path")}
    if d.path is not None or d.limit_mib is not None:
        return {"data.kind": ("text", "data.path" if d.path is not None else "data.limit_mib")}
    small = vocabulary <= 2 * max(d.tokenizer_vocab_size, SMALL_TOKENIZER)
    kind = "text" if small and on_a_cpu(run) else "mock"
    return {
        "data.kind": (
            kind,
            f"{run.model.name}: vocab_size {vocabulary}, and cluster.device {run.cluster.device}",
        )
    }


def tokenizer_of_chats(run: RunConfig) -> Filled:
    """Return the tokenizer of chats: that of the model whose weights the run starts from."""
    d = run.data
    key = "init_from"
    if run.checkpoint.resume is not None and run.checkpoint.resume not in RESUME_WORDS:
        key = "resume"
    source = getattr(run.checkpoint, key)
    if d.kind not in CHATS or d.tokenizer is not None or source is None:
        return {}
    folder = PurePath(source)
    if folder.parent.name == CHECKPOINTS:
        folder = folder.parent.parent
    return {"data.tokenizer": (str(folder / "tokenizer.json"), f"checkpoint.{key} {source}")}


def number_format(run: RunConfig) -> Filled:
    """Return bf16 for a device that has it (NVIDIA: from sm_80); an unknown generation counts as
    new.
    """
    p = run.precision
    c = run.cluster
    if p.dtype is not None:
        return {}
    if p.quantized is not None:
        return {"precision.dtype": ("bf16", f"the {p.quantized} recipe needs bf16")}
    if c.sm is not None:
        has = c.sm >= FIRST_WITH_BF16
        return {
            "precision.dtype": (
                "bf16" if has else "fp32",
                f"cluster {c.name}: {'bf16' if has else 'no bf16'} on sm_{c.sm}",
            )
        }
    if "bf16" in c.peak_tflops:
        return {"precision.dtype": ("bf16", f"cluster {c.name}: bf16 in cluster.peak_tflops")}
    if facts_of(c.device).cuda_kernels:
        return {
            "precision.dtype": ("bf16", f"cluster.device {c.device}, whose cluster.sm is not known")
        }
    return {"precision.dtype": ("fp32", f"cluster.device {c.device}")}


def sample_length(run: RunConfig) -> Filled:
    """Return the model's positions, at most 8,192; on a CPU at most 256."""
    if run.data.seq_length is not None:
        return {}
    most = CPU_LENGTH if on_a_cpu(run) else LONGEST
    positions = run.model.max_position_embeddings
    if (
        run.model.family == "llava" and run.model.llava is not None
    ):  # in addition to the image of each sample
        most += run.model.llava.image_tokens
    why = f"{run.model.name}: max_position_embeddings {positions}"
    if positions > most:
        why += f", at most {most}" + (" on a CPU" if on_a_cpu(run) else "")
    return {"data.seq_length": (min(most, positions), why)}


def span_lengths(run: RunConfig) -> Filled:
    """Return the lengths that an encoder-decoder reads and predicts per sample, in
    multiples of 8.
    """
    t = run.model.t5
    tokens = run.data.length
    if t is None:
        return {}
    noise, parts = spans(t, tokens)
    read, written = lengths(t, tokens)
    filled: dict[str, tuple[Any, str]] = {}
    for key, said, need, kept in (
        ("encoder_length", t.encoder_length, read, f"{tokens - noise} of them"),
        ("decoder_length", t.decoder_length, written, f"the {noise} others"),
    ):
        if said is None:
            why = f"data.seq_length {tokens}: {kept}, a sentinel for each of {parts} spans, an end"
            filled[f"model.t5.{key}"] = (padded(need), why)
    return filled


def sequence_parallel(run: RunConfig) -> Filled:
    """Return whether sequence parallelism is on: with tp; on a CPU only for experts, which need it
    with tp.
    """
    p = run.parallel
    cut = run.parallel.tp * run.parallel.cp
    if p.sequence_parallel is not None:
        return {}
    if p.tp == 1 or run.model.moe is not None:
        on = p.tp > 1
        why = f"tp {p.tp}" + (" and experts" if p.tp > 1 else "")
    elif on_a_cpu(run):
        on = False
        why = "cluster.device cpu"
    elif p.recompute.distribute_saved_activations:
        on = False
        why = "parallel.recompute.distribute_saved_activations true"
    else:
        t = run.model.t5
        sharded = {"data.seq_length": run.data.length}
        if t is not None:
            sharded = {
                "model.t5.encoder_length": t.encoder_length or 0,
                "model.t5.decoder_length": t.decoder_length or 0,
            }
        apart = [f"{key} {length}" for key, length in sharded.items() if length % cut]
        on = not apart
        why = f"tp {p.tp}"
        if apart:
            why = f"{apart[0]}, which tp {p.tp} * cp {p.cp} does not divide"
    return {"parallel.sequence_parallel": (on, why)}


def distributed_optimizer(run: RunConfig) -> Filled:
    """Return whether the optimizer is distributed: if ranks on GPUs hold the same weights."""
    if run.parallel.distributed_optimizer is not None:
        return {}
    on, why = _replicated(run)
    if on and "distributed_optimizer" in OPTIMIZERS[run.optim.name].cannot:
        on = False
        why = f"optim.name {run.optim.name}"
    return {"parallel.distributed_optimizer": (on, why)}


def overlap_grad_reduce(run: RunConfig) -> Filled:
    """Return whether gradient reduction overlaps: if ranks on GPUs hold the same weights and all
    reduce at the same time.
    """
    p = run.parallel
    if p.overlap_grad_reduce is not None:
        return {}
    on, why = _replicated(run)
    if on and p.hybrid_context_parallel:
        on = False
        why = "parallel.hybrid_context_parallel true"
    return {"parallel.overlap_grad_reduce": (on, why)}


def overlap_param_gather(run: RunConfig) -> Filled:
    """Return whether parameter gathers overlap: if there are some, and gradient reduction overlaps
    too.
    """
    p = run.parallel
    if p.overlap_param_gather is not None:
        return {}
    on, why = _replicated(run)
    for key in ("distributed_optimizer", "overlap_grad_reduce"):
        if on and not getattr(p, key):
            on = False
            why = f"parallel.{key} false"
    return {"parallel.overlap_param_gather": (on, why)}


def learning_rate(run: RunConfig) -> Filled:
    """Return the rate of the model's own training or of the GPT-3 of the nearest size; a published
    one for fine-tuning.
    """
    if run.optim.lr is not None:
        return {}
    known = run.model.published
    near = nearest_gpt3(run.model)
    rate = near.lr
    why = f"{GPT3_TABLE}: its {near.name} model"
    if run.trainer.fine_tuning:
        row = fine_tuning.published(run)
        rate = row.lr
        why = f"{row.source}: its {row.name} model" + (", adapters" if run.peft.kind else "")
    elif known is not None and known.peak_lr is not None:
        rate = known.peak_lr
        why = f"{run.model.name}: {known.source}"
    share = OPTIMIZERS[run.optim.name].of_adamw_lr
    if share != 1:
        rate = as_written(share * rate)
        why = f"{why}, times {share:g} for {run.optim.name}"
    return {"optim.lr": (rate, why)}


def schedule(run: RunConfig) -> Filled:
    """Return a warm-up of 5% of the steps and a final rate of 10%.

    Fine-tuning warms up for 3%, and its rate reaches zero after the last step, so that even a run
    of one step learns.
    """
    o = run.optim
    tunes = run.trainer.fine_tuning
    steps = o.decay_iters or run.trainer.steps
    filled: dict[str, tuple[Any, str]] = {}
    if o.warmup_iters is None:
        key = "trainer.train_iters" if o.decay_iters is None else "optim.decay_iters"
        if tunes:
            share = (steps * 3 // 100, f"3%, as {fine_tuning.TULU_3}")
        else:
            share = (steps // 20, "a twentieth")
        filled["optim.warmup_iters"] = (share[0], f"{key} {steps}: {share[1]}")
    if o.min_lr is None and tunes:
        why = (
            f"optim.lr {o.rate:g} of {steps} steps: to nothing behind the last, as"
            f" {fine_tuning.TULU_3}"
        )
        filled["optim.min_lr"] = (as_written(o.rate / steps), why)
    elif o.min_lr is None:
        filled["optim.min_lr"] = (tenth(o.rate), f"optim.lr {o.rate:g}: a tenth")
    return filled


def tenth(rate: float) -> float:
    """Return a tenth of a learning rate in a short decimal form."""
    return as_written(rate / 10)


def as_written(rate: float) -> float:
    """Return a rate without digits that only rounding produced."""
    return float(f"{rate:.6g}")


def sample_tokens(run: RunConfig) -> Filled:
    """Return the tokens to generate: some if there is a tokenizer, a rank holds whole sequences,
    and the model continues text.
    """
    if run.trainer.sample_tokens is not None:
        return {}
    if limited(run.model.family, "trainer.sample_tokens") is not None:
        return {
            "trainer.sample_tokens": (
                0,
                f"model.family {run.model.family}, which continues no text",
            )
        }
    if run.trainer.cuda_graph_impl != "none":
        return {
            "trainer.sample_tokens": (0, f"trainer.cuda_graph_impl {run.trainer.cuda_graph_impl}")
        }
    d = run.data
    cp = run.parallel.cp
    tokenizer = d.kind == "text" or (d.kind == "indexed" and d.tokenizer is not None)
    why = f"parallel.cp {cp}" if tokenizer and cp > 1 else f"data.kind {d.kind}"
    return {"trainer.sample_tokens": (64 if tokenizer and cp == 1 else 0, why)}


def batch(run: RunConfig) -> Filled:
    """Return the batch that fits the rest: with a given micro-batch, a multiple of it."""
    t = run.trainer
    p = run.parallel
    known = run.model.published
    if t.global_batch_size is not None:
        return {}
    if on_a_cpu(run):
        samples = CPU_BATCH
        why = "cluster.device cpu"
    elif t.fine_tuning:
        samples, why = fine_tuning.batch_of(run)
    elif known is not None and known.batch_tokens is not None:
        samples = -(-known.batch_tokens // run.data.length)
        why = f"{run.model.name}: {known.source}"
        why = f"{known.batch_tokens} tokens of {why}"
    else:
        near = nearest_gpt3(run.model)
        samples = -(-near.batch_tokens // run.data.length)
        why = f"{near.batch_tokens} tokens of {GPT3_TABLE}: its {near.name} model"
    step = t.micro * p.dp * (p.pp if p.vpp > 1 else 1)
    whole = -(-samples // step) * step
    return {
        "trainer.global_batch_size": (
            whole,
            why + (f", in multiples of {step}" if whole > samples else ""),
        )
    }


def micro_batch(run: RunConfig) -> Filled:
    """Return the largest micro-batch that splits every step evenly and fills the pipeline; on GPUs
    also one of few tokens, so that it fits in memory.
    """
    t = run.trainer
    p = run.parallel
    dp = run.parallel.dp
    if t.micro_batch_size is not None:
        return {}
    sizes = [n for n in (8, 4, 2, 1) if n == 1 or on_a_cpu(run) or n * run.data.length <= LONGEST]
    shares = [size // dp for _, size in stages(run)]  # of a data-parallel rank in a step
    even = [size for size in sizes if all(share and share % size == 0 for share in shares)]
    if p.vpp > 1:
        even = [size for size in even if all(share // size % p.pp == 0 for share in shares)] or even
    filling = [size for size in even if min(shares) // size >= p.pp]
    size = filling[0] if filling else (even or [1])[-1]
    why = f"{t.batch} samples on dp {dp}, pp {p.pp}"
    return {
        "trainer.micro_batch_size": (
            size,
            why if on_a_cpu(run) else f"{why}, of {run.data.length} tokens",
        )
    }


def synthetic_tokens(raw: RunConfig, run: RunConfig, source: str) -> Iterator[Problem]:
    """Yield a warning if a resolved run trains on synthetic tokens that the user did not choose."""
    if raw.data.kind is None and run.data.kind == "mock":
        named = "data=text data.path=FOLDER or data=indexed data.path=PREFIX"
        if run.model.family == "llava":
            named = "data=image_text data.path=FOLDER"
        fix = f"{named}, or data=mock if synthetic tokens are meant"
        yield Problem("MT322", "data.kind", "mock", "", fix, source, "warning")


def logits_at_once(run: RunConfig) -> Filled:
    """Return a 128th of the device's memory as a power of two: more logits at once mean fewer
    passes over the weights.
    """
    room = run.cluster.device_memory_gib
    k = run.kernels
    if k.loss_logits_mib is not None or k.loss == "megatron" or room is None or on_a_cpu(run):
        return {}
    mib = 1 << max(8, int(room * 8).bit_length() - 1)
    return {
        "kernels.loss_logits_mib": (
            mib,
            f"cluster {run.cluster.name}: device_memory_gib {room:g}, a 128th of it",
        )
    }


def join_timeout(run: RunConfig) -> Filled:
    """Derive the time limit for joining from the number of machines that load the same libraries
    from one disk.
    """
    nodes = run.cluster.nodes
    if run.trainer.join_timeout_s is not None:
        return {}
    return {
        "trainer.join_timeout_s": (
            usual_join_timeout_s(nodes),
            f"cluster {run.cluster.name}: nodes {nodes}",
        )
    }


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


STEPS: tuple[Step, ...] = (
    run_length.is_fine_tuning,
    data_kind,
    tokenizer_of_chats,
    number_format,
    sample_length,
    span_lengths,
    sequence_parallel,
    distributed_optimizer,
    overlap_grad_reduce,
    overlap_param_gather,
    learning_rate,
    sample_tokens,
    batch,
    micro_batch,
    run_length.train_iters,
    run_length.intervals,
    schedule,
    logits_at_once,
    join_timeout,
)
"""The defaults in order: later ones read the values of earlier ones."""
