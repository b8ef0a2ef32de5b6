"""The section `optim`: the optimizer, its schedule and what clips gradients."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, create_model

from mtrain.config.engine.formats import MainFormat, MomentFormat
from mtrain.config.optimizers import OPTIMIZERS, read_by
from mtrain.config.schedules import SCHEDULES
from mtrain.config.schema.base import (
    SAME,
    Beta,
    Effect,
    Flag,
    Key,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class _OptimKeys(Section):
    """`optim`: the optimizer and its learning-rate schedule."""

    name: Annotated[str, Key(effect=Effect.ARCHITECTURE, aka="optimizer")] = "adamw"
    """The update rule."""
    lr: Annotated[
        PositiveFloat | None,
        Key(
            feeds="optimizer.lr scheduler.max_lr",
            flag=Flag(SAME, absent=None, always=True),
            aka="learning_rate",
        ),
    ] = None
    """The largest learning rate; null: that of model.published, else that of the GPT-3 of the
    nearest size. Fine-tuning (trainer.fine_tuning) has rates of its own, by size and adapter:
    docs/reference/defaults.md.
    """
    min_lr: Annotated[NonNegativeFloat | None, Key(flag=Flag(SAME, absent=0.0))] = None
    """Learning rate at the end of the decay; null: a tenth of `lr`; for fine-tuning `lr` over the
    number of steps.
    """
    schedule: Annotated[str, Key(aka="lr_decay_style lr_scheduler_type")] = "cosine"
    """The shape of the decay after the warmup."""
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
            flag=Flag(SAME, absent="exponential"),
        ),
    ] = "linear"
    """wsd: shape of the final decay."""
    schedule_counts: Literal["updates", "past_updates", "steps"] = "updates"
    """The count of the schedule. updates: the updates made, without those that fp16 skipped,
    including this one; past_updates: those made before, as in Megatron-LM, where the first rate of
    a warmup is 0; steps: all, including skipped ones.
    """
    weight_decay: Annotated[
        NonNegativeFloat,
        Key(
            feeds="optimizer.weight_decay scheduler.start_wd scheduler.end_wd",
            flag=Flag(SAME, absent=0.01),
            aka="start_weight_decay end_weight_decay",
        ),
    ] = 0.1
    """Decoupled weight decay; not applied to biases and norms."""
    beta1: Annotated[
        Beta, Key(feeds="optimizer.adam_beta1", when=read_by("beta1"), flag=Flag(SAME, absent=0.9))
    ] = 0.9
    """adamw, muon, soap: the decay of the first moment; lion: its share in an update, the rest of
    which is the gradient.
    """
    beta2: Annotated[
        Beta,
        Key(feeds="optimizer.adam_beta2", when=read_by("beta2"), flag=Flag(SAME, absent=0.999)),
    ] = 0.95
    """adamw, muon, soap: decay of the second moment; lion: of the first."""
    eps: Annotated[
        PositiveFloat,
        Key(
            feeds="optimizer.adam_eps",
            when=read_by("eps"),
            flag=Flag(SAME, absent=1e-08),
            aka="adam_epsilon",
        ),
    ] = 1e-8
    """adamw, muon, soap: added to the root of the second moment."""
    exp_avg_dtype: Annotated[
        MomentFormat, Key(feeds="optimizer.", when=read_by("exp_avg_dtype"))
    ] = "fp32"
    """adamw: the format of the first moment. fp8: eight bits (e4m3), with a scale per 128 elements;
    so coarse that small changes are lost and the loss falls more slowly.
    """
    exp_avg_sq_dtype: Annotated[
        MomentFormat, Key(feeds="optimizer.", when=read_by("exp_avg_sq_dtype"))
    ] = "fp32"
    """adamw: the format of the second moment. fp8: eight bits of its root, with a scale per 128
    elements.
    """
    main_params_dtype: Annotated[
        MainFormat,
        Key(feeds="optimizer.", when=read_by("main_params_dtype"), effect=Effect.ARCHITECTURE),
    ] = "fp32"
    """adamw, bf16 weights: the format in which updates accumulate. bf16: there are no main weights,
    and weights are rounded stochastically; other layouts then draw other numbers.
    """
    store_param_remainders: Annotated[
        bool,
        Key(feeds="optimizer.", when=read_by("store_param_remainders"), effect=Effect.PARALLELISM),
    ] = False
    """adamw, bf16 weights: of each fp32 main weight, keep only the 16 bits that the weight lacks.
    Numbers stay the same, in two bytes less per parameter.
    """
    momentum: Annotated[
        Beta,
        Key(feeds="optimizer.sgd_momentum", when=read_by("momentum"), flag=Flag(SAME, absent=0.9)),
    ] = 0.9
    """sgd: momentum."""
    clip_grad: Annotated[PositiveFloat | None, Key(aka="max_grad_norm grad_clip")] = 1.0
    """Largest global gradient norm; null: no clipping."""
    skip_above_grad_norm: Annotated[PositiveFloat | None, Key(aka="grad_norm_skip_threshold")] = (
        None
    )
    """Skip an update whose global gradient norm, before clipping, is larger; null: none is skipped.
    Needs megatron-core 0.19.
    """
    cpu_offload: Annotated[
        float,
        Field(ge=0, le=1),
        Key(feeds="optimizer.optimizer_offload_fraction", effect=Effect.PARALLELISM),
    ] = 0.0
    """The share of the parameters whose optimizer state lives in host memory and is
    updated there.
    """

    @property
    def holds_main_weights(self) -> bool:
        """Return whether Adam itself keeps the bits that a bf16 weight lacks, and megatron-core's
        optimizer no main weights.
        """
        return self.store_param_remainders or self.main_params_dtype != "fp32"

    @property
    def in_low_precision(self) -> bool:
        """Return whether any state of Adam has fewer than 32 bits, which only our implementation
        supports.
        """
        return (
            self.holds_main_weights
            or self.exp_avg_dtype != "fp32"
            or self.exp_avg_sq_dtype != "fp32"
        )


def _optim_config() -> type[_OptimKeys]:
    """Return `_OptimKeys` with the names of all optimizers and the sections of those that
    have one.
    """
    # Modules of optimizers and curves add themselves, so their names and sections are not written
    # here.
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
        "UnresolvedOptim",
        __base__=_OptimKeys,
        __doc__=_OptimKeys.__doc__,
        __module__=__name__,
        **fields,
    )
    return cast(type[_OptimKeys], made)


if TYPE_CHECKING:
    UnresolvedOptim = _OptimKeys
else:
    UnresolvedOptim = _optim_config()


class OptimConfig(UnresolvedOptim):
    """`optim` of a resolved run: the keys below are never null."""

    lr: float
    min_lr: float
    warmup_iters: int

    @property
    def rate(self) -> float:
        """Return the largest learning rate."""
        return self.lr
