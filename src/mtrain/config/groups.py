"""The smaller groups: data, optim, trainer, kernels, checkpoint, log."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mtrain.config.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

Beta = Annotated[float, Field(ge=0, lt=1)]
KernelChoice = Literal["auto", "reference", "te"]


class DataConfig(Section):
    """`data`: what is read, and how it becomes samples."""

    kind: Literal["text", "indexed", "mock"] = "text"
    """text: files, tokenized once with a BPE trained on them; indexed: Megatron .bin/.idx; mock: made-up tokens."""
    path: str | None = None
    """text: a file or folder, null: the Python standard library of this machine; indexed: prefix of .bin and .idx."""
    blend: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(default=None, strict=False)
    """indexed, in place of path: prefixes of several corpora that are read side by side; null: path alone."""
    blend_weights: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = Field(
        default=None, strict=False
    )
    """blend: shares of the samples that each corpus gives, in any unit; null: by their tokens."""
    tokenizer: str | None = None
    """indexed: path of a tokenizer.json; null: no text can be generated."""
    tokenizer_vocab_size: Annotated[int, Field(ge=300, le=1_000_000)] = 4096
    """text: size of the BPE vocabulary to train."""
    suffixes: tuple[str, ...] = Field(default=(".py", ".txt", ".rst", ".md"), strict=False)
    """text: file name endings that are read from a folder."""
    limit_mib: PositiveFloat | None = None
    """text: read at most this much text; null: all."""
    seq_length: Annotated[int, Field(ge=2)] = 256
    """Tokens per sample. The one place where the sequence length is written."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = Field(
        default=(0.96, 0.03, 0.01), strict=False
    )
    """Shares of train, validation and test; they are normalised to one."""
    eod_mask_loss: bool = False
    """No loss on the prediction that follows an end-of-document token."""
    packed: bool = False
    """A sample's documents do not see each other and each starts at position 0 (packed sequences, THD)."""
    packed_multiple: PositiveInt | None = None
    """packed: documents are padded to a multiple of this many tokens; what no longer fits in the sample is left out.
    null: 2 * cp under context parallelism, else 1."""
    cache_dir: str = "~/.cache/mtrain"
    """Where tokenized text is kept."""


class OptimConfig(Section):
    """`optim`: the optimizer and its learning-rate schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: PositiveFloat = 1e-3
    """Largest learning rate."""
    min_lr: NonNegativeFloat | None = None
    """Learning rate at the end of the decay; null: a tenth of `lr`."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "cosine"
    """Shape of the decay after the warmup."""
    warmup_iters: NonNegativeInt | None = None
    """Steps of linear warmup from zero; null: a twentieth of the steps up to the end of the decay."""
    decay_iters: PositiveInt | None = None
    """Step at which the decay ends; null: trainer.train_iters."""
    wsd_decay_iters: PositiveInt | None = None
    """wsd: steps of the final decay."""
    wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """wsd: shape of the final decay."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; not applied to biases and norms."""
    beta1: Beta = 0.9
    """adamw: decay of the first moment."""
    beta2: Beta = 0.95
    """adamw: decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """adamw: added to the root of the second moment."""
    momentum: Beta = 0.9
    """sgd: momentum."""
    clip_grad: PositiveFloat | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    cpu_offload: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the parameters whose optimizer state lives in host memory and is updated there."""


class TrainerConfig(Section):
    """`trainer`: how long, how large a batch, how often to look."""

    train_iters: PositiveInt = 100
    """Optimizer steps."""
    global_batch_size: PositiveInt = 16
    """Samples per optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Samples per forward and backward on one rank; null: the largest of 8, 4, 2, 1 that cuts the batch evenly and
    leaves a micro-batch for every pipeline stage."""
    eval_interval: PositiveInt | None = None
    """Steps between evaluations during the run; null: only at the end."""
    eval_iters: NonNegativeInt = 4
    """Global batches of the validation split per evaluation; 0: never evaluate."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """Seed of weights, sample order and dropout; independent of the layout."""
    deterministic: bool = False
    """Only algorithms that give the same bits every time, where a GPU has faster ones; an operation without any is an
    error. On a CPU every run is so."""
    sample_tokens: NonNegativeInt | None = None
    """Tokens of generated text at the end of the run; null: 64 where there is a tokenizer and no context parallelism,
    else 0."""
    sample_prompt: str = "def "
    """Where the generated text starts."""
    profile_step: PositiveInt | None = None
    """Write a torch.profiler trace of this step to the run folder; null: none."""
    join_timeout_s: PositiveFloat = 5.0
    """Seconds that a rank which is ready to start waits for those that nobody has heard of; then they are named. One
    that was heard of and still imports has twelve times as long. A thousand machines start further apart: 60."""
    soft_timeout_s: PositiveFloat = 120.0
    """Seconds without progress of any rank after which each writes its stacks and the one that is behind is named.
    The first step may compile for minutes; to be named does no harm."""
    timeout_s: PositiveFloat = 600.0
    """Seconds without progress of any rank after which the run is ended."""

    @property
    def micro(self) -> int:
        """Samples per forward and backward, once it is resolved."""
        return self.micro_batch_size or 1


class KernelsConfig(Section):
    """`kernels`: which implementation each operation uses. A named one that cannot run is an error."""

    norm: KernelChoice = "auto"
    """RMSNorm and LayerNorm."""
    attention: KernelChoice = "auto"
    """Core attention."""
    linear: KernelChoice = "auto"
    """Row- and column-parallel linear layers."""
    experts: KernelChoice = "auto"
    """Expert MLPs; auto: one grouped call where there is one, else expert by expert."""
    gradient_accumulation_fusion: bool = False
    """Weight gradients are added up inside the GEMM that makes them; needs linear=te on a GPU."""


class CheckpointConfig(Section):
    """`checkpoint`: when state is saved, and where a run goes on from."""

    save_interval: PositiveInt | None = None
    """Steps between checkpoints; null: only at the end."""
    save_final: bool = True
    """Save after the last step."""
    keep: PositiveInt | None = 2
    """How many of the newest checkpoints stay; null: all."""
    resume: str | None = None
    """null: a new run; `latest`: the newest run of this configuration; else a run folder or a checkpoint folder."""
    accept_changes: bool = False
    """Go on although keys that change the numbers differ from those of the checkpoint."""


class LogConfig(Section):
    """`log`: where a run is written and what is shown."""

    runs_dir: str = "runs"
    """Folder of run folders."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=200)] | None = None
    """Name of the run folder; null: made from the date, the model and the layout."""
    interval: PositiveInt = 10
    """Steps between progress lines; the metrics file has every step."""
    progress: Literal["auto", "live", "plain", "none"] = "auto"
    """live: a line that is redrawn; plain: a line per interval; auto: live on a terminal."""
