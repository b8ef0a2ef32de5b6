"""The smaller groups: optim, trainer, and by import data, kernels, checkpoint and log."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, create_model

from mtrain.config.engine.formats import MainFormat, MomentFormat
from mtrain.config.optimizers import OPTIMIZERS, read_by
from mtrain.config.schedules import SCHEDULES
from mtrain.config.schema.base import (
    MOST_RANKS,
    Beta,
    Effect,
    Flag,
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    SquareWeight,
)
from mtrain.config.schema.checkpoint import CheckpointConfig as CheckpointConfig
from mtrain.config.schema.checkpoint import LogConfig as LogConfig
from mtrain.config.schema.data import DataConfig as DataConfig
from mtrain.config.schema.kernels import KernelsConfig as KernelsConfig

Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
StopSignal = Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"]
GraphModule = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]


class _OptimKeys(Section):
    """`optim`: the optimizer and its learning-rate schedule."""

    name: Annotated[str, Key(effect=Effect.ARCHITECTURE, aka="optimizer")] = "adamw"
    """Update rule."""
    lr: Annotated[
        PositiveFloat | None,
        Key(
            feeds="optimizer.lr scheduler.max_lr",
            flag=Flag("--lr", absent=None, always=True),
            aka="learning_rate",
        ),
    ] = None
    """Largest learning rate; null: that of model.published, else that of the GPT-3 of the nearest
    size. Fine-tuning (trainer.fine_tuning) has rates of its own, by size and adapter:
    docs/defaults.md.
    """
    min_lr: Annotated[NonNegativeFloat | None, Key(flag=Flag("--min-lr", absent=0.0))] = None
    """Learning rate at the end of the decay; null: a tenth of `lr`; for fine-tuning `lr` over the
    number of steps.
    """
    schedule: Annotated[str, Key(aka="lr_decay_style lr_scheduler_type")] = "cosine"
    """Shape of the decay after the warmup."""
    warmup_iters: Annotated[
        NonNegativeInt | None, Key(aka="lr_warmup_iters lr_warmup_steps warmup_steps", unit="steps")
    ] = None
    """Steps of linear warmup from zero; null: a twentieth of the steps up to the end of the decay,
    3% for fine-tuning.
    """
    decay_iters: Annotated[PositiveInt | None, Key(aka="lr_decay_iters", unit="steps")] = None
    """Step at which the decay ends; null: trainer.train_iters."""
    wsd_decay_iters: Annotated[
        PositiveInt | None,
        Key(feeds="scheduler.wsd_decay_steps", aka="lr_wsd_decay_iters", unit="steps"),
    ] = None
    """wsd: steps of the final decay."""
    wsd_decay_style: Annotated[
        Literal["linear", "cosine", "exponential", "minus_sqrt"],
        Key(
            feeds="scheduler.lr_wsd_decay_style",
            when="optim.schedule=wsd",
            flag=Flag("--lr-wsd-decay-style", absent="exponential"),
        ),
    ] = "linear"
    """wsd: shape of the final decay."""
    schedule_counts: Literal["updates", "past_updates", "steps"] = "updates"
    """What the schedule counts.

    updates: those that were made, without those that fp16 skipped, and this one; past_updates:
    those made before this one, as in Megatron-LM, where the first rate of a warmup is 0; steps:
    all, those whose update was skipped too.
    """
    weight_decay: Annotated[
        NonNegativeFloat,
        Key(
            feeds="optimizer.weight_decay scheduler.start_wd scheduler.end_wd",
            flag=Flag("--weight-decay", absent=0.01),
            aka="start_weight_decay end_weight_decay",
        ),
    ] = 0.1
    """Decoupled weight decay; not applied to biases and norms."""
    beta1: Annotated[
        Beta,
        Key(
            feeds="optimizer.adam_beta1",
            when=read_by("beta1"),
            flag=Flag("--adam-beta1", absent=0.9),
        ),
    ] = 0.9
    """adamw, muon, soap: decay of the first moment; lion: its share in an update, the gradient
    having the rest.
    """
    beta2: Annotated[
        Beta,
        Key(
            feeds="optimizer.adam_beta2",
            when=read_by("beta2"),
            flag=Flag("--adam-beta2", absent=0.999),
        ),
    ] = 0.95
    """adamw, muon, soap: decay of the second moment; lion: of the first."""
    eps: Annotated[
        PositiveFloat,
        Key(
            feeds="optimizer.adam_eps",
            when=read_by("eps"),
            flag=Flag("--adam-eps", absent=1e-08),
            aka="adam_epsilon",
        ),
    ] = 1e-8
    """adamw, muon, soap: added to the root of the second moment."""
    exp_avg_dtype: Annotated[
        MomentFormat, Key(feeds="optimizer.exp_avg_dtype", when=read_by("exp_avg_dtype"))
    ] = "fp32"
    """adamw: how the first moment is kept.

    fp8: eight bits (e4m3), with a scale for 128 of them; so coarse that small changes are lost and
    a loss falls more slowly.
    """
    exp_avg_sq_dtype: Annotated[
        MomentFormat, Key(feeds="optimizer.exp_avg_sq_dtype", when=read_by("exp_avg_sq_dtype"))
    ] = "fp32"
    """adamw: how the second moment is kept.

    fp8: eight bits of its root, with a scale for 128 of them.
    """
    main_params_dtype: Annotated[
        MainFormat,
        Key(
            feeds="optimizer.main_params_dtype",
            when=read_by("main_params_dtype"),
            effect=Effect.ARCHITECTURE,
        ),
    ] = "fp32"
    """adamw, bf16 weights: the format that updates add up in. bf16: weights have no main
    weights beside them and are rounded up or down by chance, right on average; layouts then draw
    other numbers.
    """
    store_param_remainders: Annotated[
        bool,
        Key(
            feeds="optimizer.store_param_remainders",
            when=read_by("store_param_remainders"),
            effect=Effect.PARALLELISM,
        ),
    ] = False
    """adamw, bf16 weights: of each fp32 main weight only the 16 bits are kept that the weight has
    not. Numbers stay the same, in two bytes a parameter less.
    """
    momentum: Annotated[
        Beta,
        Key(
            feeds="optimizer.sgd_momentum",
            when=read_by("momentum"),
            flag=Flag("--sgd-momentum", absent=0.9),
        ),
    ] = 0.9
    """sgd: momentum."""
    clip_grad: Annotated[PositiveFloat | None, Key(aka="max_grad_norm grad_clip")] = 1.0
    """Largest global gradient norm; null: no clipping."""
    skip_above_grad_norm: Annotated[PositiveFloat | None, Key(aka="grad_norm_skip_threshold")] = (
        None
    )
    """An update is skipped where the global gradient norm, before clipping, is larger; null: none
    is. With megatron-core 0.19.
    """
    cpu_offload: Annotated[
        float,
        Field(ge=0, le=1),
        Key(feeds="optimizer.optimizer_offload_fraction", effect=Effect.PARALLELISM),
    ] = 0.0
    """Share of the parameters whose optimizer state lives in host memory and is updated there."""

    @property
    def rate(self) -> float:
        """Return largest learning rate, once it is resolved."""
        return self.lr or 1e-3

    @property
    def holds_main_weights(self) -> bool:
        """Return whether Adam itself keeps what a bf16 weight has not, and megatron-core's
        optimizer no main weights.
        """
        return self.store_param_remainders or self.main_params_dtype != "fp32"

    @property
    def in_low_precision(self) -> bool:
        """Return whether any state of Adam is kept in fewer than 32 bits: ours alone does that."""
        return (
            self.holds_main_weights
            or self.exp_avg_dtype != "fp32"
            or self.exp_avg_sq_dtype != "fp32"
        )


def _optim_config() -> type[_OptimKeys]:
    """Return `_OptimKeys` with the names of all optimizers and curves, and the sections of the
    optimizers that have one.
    """
    fields: dict[str, Any] = {
        "name": (Literal[tuple(OPTIMIZERS)], _OptimKeys.model_fields["name"]),
        "schedule": (Literal[tuple(SCHEDULES)], _OptimKeys.model_fields["schedule"]),
    }
    for name, optimizer in OPTIMIZERS.items():
        if optimizer.section is not None:
            field: Any = Field(default_factory=optimizer.section, description=optimizer.section_doc)
            field.metadata.append(Key(when=f"optim.name={name}"))
            fields[name] = (optimizer.section, field)
    made = create_model(
        "OptimConfig",
        __base__=_OptimKeys,
        __doc__=_OptimKeys.__doc__,
        __module__=__name__,
        **fields,
    )
    return cast(type[_OptimKeys], made)


if TYPE_CHECKING:
    OptimConfig = _OptimKeys
else:
    OptimConfig = _optim_config()


class TrainerConfig(Section):
    """`trainer`: how long, how large a batch, how often to look."""

    objective: str = "next_token"
    """Loss that the run minimises. next_token: cross entropy of tokens, the next one or those that
    the model's family masks or writes. Installed packages publish others under the entry point
    group `mtrain.objectives`.
    """
    fine_tuning: Annotated[bool | None, Key(effect=Effect.RUNTIME)] = None
    """Whether rate, batch, length and schedule, where nothing says them, are those of fine-tuning
    and not of a training from scratch. It changes nothing else. null: true for chats (data.kind
    sft, preference) and for adapters (peft.kind).
    """
    train_iters: Annotated[
        PositiveInt | None, Key(aka="max_steps train_steps exit_interval", unit="steps")
    ] = None
    """Optimizer steps.

    null: on a CPU 80; on GPUs as many as read 20 tokens for each parameter that a token visits
    (Chinchilla, arXiv 2203.15556). Fine-tuning: two epochs of the chats of data.path, else 500.
    """
    global_batch_size: Annotated[PositiveInt | None, Key(unit="samples")] = None
    """Samples per optimizer step, over all ranks; with a ramp, of the steps after it.

    null: as many tokens as model.published says, else as the GPT-3 of the nearest size took; for
    fine-tuning 128 samples, 16 for adapters, or as many packed windows as hold such a batch; 8
    samples on a CPU; rounded up so that every data-parallel rank has whole micro-batches.
    """
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = Field(
        default=None, strict=False
    )
    """[first, increment, samples]: steps begin with `first` samples and grow by `increment`, evenly
    over so many samples, up to global_batch_size. What counts steps, such as the schedule of the
    learning rate, counts on.
    """
    batch_size_schedule: (
        tuple[Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)], ...] | None
    ) = Field(default=None, strict=False)
    """[[size, tokens], ...]: steps take `size` samples until `tokens` tokens are read, then that of
    the next pair; global_batch_size after the last.
    """
    micro_batch_size: Annotated[
        PositiveInt | None,
        Key(effect=Effect.PARALLELISM, aka="per_device_train_batch_size", unit="samples"),
    ] = None
    """Samples per forward and backward on one rank; null: the largest of 8, 4, 2, 1 that splits the
    batch evenly, leaves a micro-batch for every pipeline stage and, on GPUs, has at most 8192
    tokens.
    """
    eval_interval: Annotated[
        NonNegativeInt | None,
        Key(
            effect=Effect.RUNTIME,
            flag=Flag("--eval-interval", absent=1000),
            aka="eval_steps",
            unit="steps",
        ),
    ] = None
    """Steps between evaluations during the run; 0: only at the end, and by eval_minutes.

    null: on a CPU 40; elsewhere 0.
    """
    eval_minutes: Annotated[PositiveFloat | None, Key(effect=Effect.RUNTIME, unit="minutes")] = None
    """Minutes from one evaluation to the next, by the clock of rank 0.

    null: not by time; where eval_interval is null too and the run is on GPUs, 30.
    """
    eval_iters: Annotated[
        NonNegativeInt,
        Key(effect=Effect.RUNTIME, flag=Flag("--eval-iters", absent=100), unit="global batches"),
    ] = 4
    """Global batches of the validation split per evaluation, in which each sample counts once: a
    split that has fewer ends it; 0: never evaluate.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63), Key(flag=Flag("--seed", absent=1234))] = 1234
    """Seed of weights and sample order, which do not depend on the layout, and of dropout: stages,
    data- and context-parallel ranks draw other masks, tensor-parallel ranks the same ones of what
    each of them holds whole.
    """
    loss_average: Literal["token", "sample", "sequence"] = "token"
    """What weighs the same in the loss and the gradient of a step, over the whole global batch in
    any layout. token: each prediction that counts; sample: each sample, of which the mean over its
    predictions is taken, a document where documents are packed; sequence: each row of
    data.seq_length tokens, packed or not. An evaluation is an average over tokens.
    """
    z_loss_coeff: Annotated[
        SquareWeight | None,
        Key(
            effect=Effect.NUMERICS, aka="z_loss_multiplier auxiliary_loss_multiplier logits_z_loss"
        ),
    ] = None
    """Weight of the z-loss of the output layer (PaLM, arXiv 2204.02311: 1e-4): the square of each
    token's log-sum-exp, which is added to its loss. The loss that is logged has it not: it is
    z_loss beside it. Layers of multi-token prediction have none; null: none.
    """
    deterministic: Annotated[
        bool,
        Key(feeds="deterministic_mode", effect=Effect.PARALLELISM, flag="--deterministic-mode"),
    ] = False
    """Only algorithms that give the same bits every time, where a GPU has faster ones; an operation
    without any is an error. On a CPU every run is so.
    """
    cuda_graph_impl: Annotated[
        Literal["none", "local", "transformer_engine", "full_iteration"],
        Key(effect=Effect.PARALLELISM),
    ] = "none"
    """What is captured into CUDA graphs after some steps, and launched as one from then on: parts
    of layers, by megatron-core (local) or TransformerEngine, or the forward and backward of a whole
    step (full_iteration). On GPUs alone; composed, validated and handed to megatron-core, but
    captured on no GPU yet.
    """
    cuda_graph_modules: Annotated[
        tuple[GraphModule, ...] | None,
        Key(when="trainer.cuda_graph_impl=local|transformer_engine", effect=Effect.PARALLELISM),
    ] = Field(default=None, strict=False)
    """local, transformer_engine: what of a layer is captured; null: whole layers.

    moe is a layer's experts, padded to their capacity; moe_router and moe_preprocess are what comes
    before tokens are exchanged.
    """
    cuda_graph_warmup_steps: Annotated[
        PositiveInt | None,
        Key(
            feeds="cuda_graph_warmup_steps",
            when="trainer.cuda_graph_impl=local|transformer_engine|full_iteration",
            null=3,
            effect=Effect.RUNTIME,
            flag=Flag("--cuda-graph-warmup-steps", absent=3),
            unit="steps",
        ),
    ] = None
    """Steps before anything is captured, and with local forwards of a layer before its capture;
    null: 3.
    """
    sample_tokens: Annotated[
        Annotated[int, Field(ge=0, le=1 << 20)] | None, Key(effect=Effect.RUNTIME, unit="tokens")
    ] = None
    """Tokens of generated text at the end of the run; null: 64 where there is a tokenizer and no
    context parallelism, else 0.
    """
    sample_prompt: Annotated[str, Key(effect=Effect.RUNTIME)] = "def "
    """Where the generated text starts."""
    profile_step: Annotated[PositiveInt | None, Key(effect=Effect.RUNTIME)] = None
    """Write a torch.profiler trace of this step to the run folder; null: none."""
    profile_ranks: Annotated[
        tuple[Rank, ...], Key(when="trainer.profile_step", effect=Effect.RUNTIME)
    ] = Field(default=(0,), strict=False)
    """Ranks that write a trace, each as `trace_rank0.json.gz`; a trace is large, and all ranks
    share the folder.
    """
    sync_debug: Annotated[Literal["none", "warn", "error"], Key(effect=Effect.RUNTIME)] = "none"
    """The mode of `torch.cuda.set_sync_debug_mode` in a step, from the fourth step of a process on:
    `warn` or `error` where the host waits for the GPU. A step should not wait; log.interval says
    when results are read.
    """
    stop_signals: Annotated[tuple[StopSignal, ...], Key(effect=Effect.RUNTIME)] = Field(
        default=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP"), strict=False
    )
    """Signals that make a run save and end with exit code 75, at any time; SLURM's `--signal` can
    send SIGUSR1. Other signals keep their usual effect.
    """
    join_timeout_s: Annotated[Seconds | None, Key(effect=Effect.RUNTIME, unit="seconds")] = None
    """Seconds that a ready rank waits for ranks that have not reported; then the run ends and names
    them. A rank that has reported and still imports gets twelve times as long. null: 60, and 60
    more for each doubling of the number of machines, because all of them load the same libraries
    from one network disk.
    """
    soft_timeout_s: Annotated[Seconds, Key(effect=Effect.RUNTIME, unit="seconds")] = 120.0
    """Seconds without progress of any rank after which each writes its stacks and the one that is
    behind is named. The first step may compile for minutes; to be named does no harm.
    """
    timeout_s: Annotated[
        Seconds, Key(effect=Effect.RUNTIME, aka="distributed_timeout_minutes", unit="seconds")
    ] = 600.0
    """Seconds without progress of any rank after which the run is ended."""

    @property
    def steps(self) -> int:
        """Return optimizer steps, once they are resolved."""
        return self.train_iters or 1

    @property
    def batch(self) -> int:
        """Return samples per optimizer step, once it is resolved."""
        return self.global_batch_size or 1

    @property
    def micro(self) -> int:
        """Return samples per forward and backward, once it is resolved."""
        return self.micro_batch_size or 1
