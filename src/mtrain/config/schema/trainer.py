"""The section `trainer`: how long a run is, its batches and its reproducibility."""

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.schema.base import (
    MOST_RANKS,
    SAME,
    Effect,
    Flag,
    Key,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    SquareWeight,
)

Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
StopSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"]
ProfileContent = Literal["torch", "memory", "stacks", "shapes", "flops", "nsys"]
GraphModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]


class UnresolvedTrainer(Section):
    """`trainer`: how long, how large a batch, how often to look."""

    fine_tuning: Annotated[bool | None, Key(effect=Effect.RUNTIME)] = None
    """Fine-tuning defaults for rate, batch, length and schedule, in place of those for training
    from scratch. It changes nothing else. null: true for chats (data.kind sft, preference), for
    pairs of answers (objective.name) and for adapters (peft.kind).
    """
    train_iters: Annotated[
        PositiveInt | None, Key(aka="max_steps train_steps exit_interval", unit="steps")
    ] = None
    """The number of optimizer steps. null: on a CPU 80; on GPUs enough for 20 tokens per parameter
    that a token visits (Chinchilla, arXiv 2203.15556). Fine-tuning: two epochs of the chats of
    data.path, else 500.
    """
    global_batch_size: Annotated[PositiveInt | None, Key(unit="samples")] = None
    """Samples per optimizer step, over all ranks; with a ramp, of the steps after it. Of pairs of
    answers each answer is a sample. null: as many
    tokens as model.published has, else as the GPT-3 of the nearest size had; for fine-tuning 128
    samples, 16 for adapters, or as many packed windows as hold such a batch; 8 samples on a CPU;
    rounded up so that every data-parallel rank has whole micro-batches.
    """
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = Field(
        default=None, strict=False
    )
    """[first, increment, samples]: steps start with `first` samples and grow by `increment`, evenly
    over so many samples, up to global_batch_size. Schedules that count steps, such as that of the
    learning rate, are not affected.
    """
    batch_size_schedule: (
        tuple[Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)], ...] | None
    ) = Field(default=None, strict=False)
    """[[size, tokens], ...]: steps have `size` samples until `tokens` tokens are read, then that of
    the next pair; global_batch_size after the last.
    """
    micro_batch_size: Annotated[
        PositiveInt | None,
        Key(effect=Effect.PARALLELISM, aka="per_device_train_batch_size", unit="samples"),
    ] = None
    """Samples per forward and backward on one rank; null: the largest power of two that splits the
    batch evenly, leaves a micro-batch for every pipeline stage and fits the memory of the device by
    the plan. In a pipeline, whose bubble it widens, and where that memory is not known, it has at
    most 8192 tokens on GPUs and 8 samples; else at most 65536 tokens.
    """
    eval_interval: Annotated[
        NonNegativeInt | None,
        Key(effect=Effect.RUNTIME, flag=Flag(SAME, absent=1000), aka="eval_steps", unit="steps"),
    ] = None
    """Steps between evaluations during the run; 0: only at the end, and by eval_minutes.

    null: on a CPU 40; elsewhere 0.
    """
    eval_minutes: Annotated[PositiveFloat | None, Key(effect=Effect.RUNTIME, unit="minutes")] = None
    """Minutes between evaluations, by the clock of rank 0. null: not by time; if eval_interval is
    null too and the run is on GPUs, 30.
    """
    eval_iters: Annotated[
        NonNegativeInt,
        Key(effect=Effect.RUNTIME, flag=Flag(SAME, absent=100), unit="global batches"),
    ] = 4
    """The global batches of the validation split per evaluation, in which each sample counts once:
    a smaller split ends it; 0: never evaluate.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63), Key(flag=Flag(SAME, absent=1234))] = 1234
    """The seed of weights and sample order, which do not depend on the layout, and of dropout:
    stages, data- and context-parallel ranks draw different masks, tensor-parallel ranks the same
    ones for tensors that each holds whole.
    """
    loss_average: Literal["token", "sample", "sequence"] = "token"
    """The unit of equal weight in the loss and the gradient of a step, over the whole global batch
    in any layout. token: each counted prediction; sample: the mean over the predictions of each
    sample, or of each document if documents are packed; sequence: the mean of each row of
    data.seq_length tokens, packed or not. An evaluation averages over tokens.
    """
    z_loss_coeff: Annotated[
        SquareWeight | None,
        Key(
            effect=Effect.NUMERICS, aka="z_loss_multiplier auxiliary_loss_multiplier logits_z_loss"
        ),
    ] = None
    """The weight of the z-loss of the output layer (PaLM, arXiv 2204.02311: 1e-4): the square of
    each token's log-sum-exp, added to its loss. The logged loss excludes it: z_loss is logged
    separately. Layers of multi-token prediction have none; null: none.
    """
    deterministic: Annotated[
        bool, Key(feeds="deterministic_mode", effect=Effect.PARALLELISM, flag=SAME)
    ] = False
    """Use only algorithms that give the same bits every time, where a GPU has faster ones; an
    operation without such an algorithm is an error. On a CPU every run is deterministic.
    """
    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"],
        Key(effect=Effect.PARALLELISM),
    ] = "none"
    """Part of a step that is captured into CUDA graphs after some steps and launched as one from
    then on: parts of layers, by megatron-core (local) or TransformerEngine, or the forward and
    backward of a whole step (full_iteration). On GPUs only. An H200 has trained with local; every
    family and format is recorded without a GPU, and captured or refused.
    """
    cuda_graph_modules: Annotated[
        tuple[GraphModule, ...] | None,
        Key(when="trainer.cuda_graph_impl=local|transformer_engine", effect=Effect.PARALLELISM),
    ] = Field(default=None, strict=False)
    """local, transformer_engine: the captured parts of a layer; null: whole layers. moe is a
    layer's experts, padded to their capacity; moe_router and moe_preprocess, of transformer_engine,
    are the work before tokens are exchanged.
    """
    cuda_graph_warmup_steps: Annotated[
        PositiveInt | None,
        Key(
            feeds=SAME,
            when="trainer.cuda_graph_impl=local|transformer_engine|full_iteration",
            null=3,
            effect=Effect.RUNTIME,
            flag=Flag(SAME, absent=3),
            unit="steps",
        ),
    ] = None
    """Steps before a capture; with local, forwards of a layer before its capture; null: 3."""
    sample_tokens: Annotated[
        Annotated[int, Field(ge=0, le=1 << 20)] | None, Key(effect=Effect.RUNTIME, unit="tokens")
    ] = None
    """The tokens of text that the run generates at its end; null: 64 with a tokenizer and without
    context parallelism, else 0.
    """
    sample_prompt: Annotated[str, Key(effect=Effect.RUNTIME)] = "def "
    """The prompt of the generated text."""
    profile_step: Annotated[PositiveInt | None, Key(effect=Effect.RUNTIME)] = None
    """Profile this step into `profiles/` of the run folder; null: none, until `profile` asks."""
    profile_every: Annotated[
        PositiveInt | None,
        Key(when="trainer.profile_step", effect=Effect.RUNTIME, unit="steps"),
    ] = None
    """Steps from profile_step to the next profiled one, and so on; null: only that step."""
    profile_ranks: Annotated[
        tuple[Rank, ...], Key(when="trainer.profile_step", effect=Effect.RUNTIME)
    ] = Field(default=(0,), strict=False)
    """The ranks that write a trace, each as `trace_rank0.json.gz`; a trace is large, and all ranks
    share the folder.
    """
    profile_content: Annotated[
        tuple[ProfileContent, ...], Key(when="trainer.profile_step", effect=Effect.RUNTIME)
    ] = Field(default=("torch",), strict=False)
    """The content of a profile. torch: a trace by torch.profiler, to which memory adds allocations,
    stacks the Python stack of each operation, shapes those of its inputs and flops its FLOPs; nsys:
    NVTX ranges of steps, phases, micro-batches and collectives, for Nsight Systems.
    """
    sync_debug: Annotated[Literal["none", "warn", "error"], Key(effect=Effect.RUNTIME)] = "none"
    """The mode of `torch.cuda.set_sync_debug_mode` in a step, from the fourth step of a process on:
    `warn` or `error` if the host waits for the GPU. A step should not wait; log.interval sets when
    results are read.
    """
    stop_signals: Annotated[tuple[StopSignal, ...], Key(effect=Effect.RUNTIME)] = Field(
        default=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"), strict=False
    )
    """Signals after which a run saves and ends with exit code 75, at any time; SLURM's `--signal`
    can send SIGUSR1. Other signals keep their usual effect.
    """
    join_timeout_s: Annotated[Seconds | None, Key(effect=Effect.RUNTIME, unit="seconds")] = None
    """Seconds that a ready rank waits for ranks that have not reported; then the run ends and names
    them. A rank that has reported and is still importing gets twelve times as long. null: 60, and
    60 more for each doubling of the number of machines, because all of them load the same libraries
    from one network disk.
    """
    soft_timeout_s: Annotated[Seconds, Key(effect=Effect.RUNTIME, unit="seconds")] = 120.0
    """Seconds without progress of any rank after which each rank writes its stacks and the run
    names the straggler. The first step may compile for minutes; the report does no harm.
    """
    timeout_s: Annotated[
        Seconds, Key(effect=Effect.RUNTIME, aka="distributed_timeout_minutes", unit="seconds")
    ] = 600.0
    """Seconds without progress of any rank after which the run ends."""


class TrainerConfig(UnresolvedTrainer):
    """`trainer` of a resolved run: the keys below are never null."""

    fine_tuning: bool
    train_iters: int
    global_batch_size: int
    micro_batch_size: int
    eval_interval: int
    sample_tokens: int
    join_timeout_s: float

    @property
    def steps(self) -> int:
        """Return the optimizer steps."""
        return self.train_iters

    @property
    def batch(self) -> int:
        """Return the samples per optimizer step."""
        return self.global_batch_size

    @property
    def micro(self) -> int:
        """Return the samples per forward and backward."""
        return self.micro_batch_size
