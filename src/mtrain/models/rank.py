"""The view of one rank of a layout: its tokens, widths and kernels in a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mtrain.config.engine.formats import bytes_of
from mtrain.config.engine.kernels import (
    ON_CPU,
    OPERATIONS,
    operands_apart,
    routes_by_lists,
    stands_for,
)
from mtrain.config.machine.devices import facts_of
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig, RecomputeModule
from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import Factors

BLOCK = 128
"""Tokens that share a scale in an operand transposed, as in `mtrain.mcore.layers.operands`."""


@dataclass(frozen=True)
class Equipped:
    """A machine that runs everything of its device, as `auto` assumes of an unknown one."""

    gpus: int = 1
    transformer_engine: bool = True
    triton: bool = True
    triton_interpreted: bool = False


@dataclass(frozen=True)
class Rank:
    """Sizes on one rank; the same on all of them."""

    run: RunConfig
    words: Mapping[str, str]
    """The implementation of each operation, chosen with everything installed if left open."""
    host: bool
    """True if the rank computes on a CPU."""
    samples: int
    """Samples of a micro-batch, one where they are packed."""
    length: int
    """Tokens of a sample that are here: all of it, or a part under context parallelism."""
    frozen: bool = False
    """Weights have no gradient: linear layers keep none of their inputs."""
    adapted: bool = False
    """Layers that the run names have low-rank adapters."""

    @classmethod
    def of(cls, run: RunConfig, words: Mapping[str, str] | None = None) -> Rank:
        """Return a rank of a resolved run; `words` are those of an equivalent run."""
        p = run.parallel
        micro = run.trainer.micro
        words = words or _words(run)
        samples, length = (
            (1, micro * run.data.length) if run.data.packed else (micro, run.data.length)
        )
        if (
            p.hybrid_context_parallel
        ):  # documents come one by one, the longest of them over all data-parallel ranks
            length = p.max_seqlen_per_dp_cp_rank or -(-run.data.length // p.dp)
        else:
            length //= p.cp
        adapted = run.peft.kind is not None
        on_host = facts_of(run.cluster.device).on_host
        return cls(run, words, on_host, samples, length, frozen=adapted, adapted=adapted)

    def at(self, index: int) -> Rank:
        """Return the view of layer `index` from 0; the first and last may be in `dtype`."""
        p = self.run.precision
        if not p.leaves(index, self.model.num_layers):
            return self
        return replace(self, run=self.run.model_copy(update={"precision": p.unquantized(p.format)}))

    @property
    def model(self) -> ModelConfig:
        """Return the model."""
        return self.run.model

    @property
    def layout(self) -> ParallelConfig:
        """Return the layout."""
        return self.run.parallel

    @property
    def factors(self) -> Factors:
        """Return the formats in which linear layers multiply."""
        return "frozen" if self.frozen else "weights"

    @cached_property
    def element(self) -> int:
        """Return the bytes of an element of an activation."""
        return bytes_of(self.run.precision.format)

    @property
    def wide(self) -> bool:
        """Return whether an element has 32 bits."""
        return self.element >= bytes_of("fp32")

    @property
    def whole(self) -> int:
        """Return the tokens of a sequence over all context-parallel ranks."""
        return self.length * (self.layout.cp if not self.layout.hybrid_context_parallel else 1)

    @property
    def positions(self) -> int:
        """Return the tokens that a table of angles covers: of a sequence, or a packed document."""
        return self.run.data.seen_tokens if self.run.data.packed else self.whole

    @property
    def documents(self) -> float:
        """Return the mean number of documents in a sequence; 1 without packing."""
        return max(1.0, self.whole / self.run.data.seen_tokens) if self.run.data.packed else 1.0

    @cached_property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch that attention and MLP compute on here."""
        return self.samples * self.length

    @cached_property
    def split_tokens(self) -> int:
        """Return the tokens of norms and the residual stream here: a part under SP."""
        return self.tokens // self.layout.tp if self.layout.sequence_parallel else self.tokens

    @property
    def heads(self) -> int:
        """Return the number of query heads on a rank."""
        return max(1, self.model.num_attention_heads // self.layout.tp)

    @property
    def groups(self) -> int:
        """Return key and value heads on a rank."""
        # With more ranks than groups, several ranks hold the same group.
        return max(1, self.model.query_groups // self.layout.tp)

    @property
    def gathers_inputs(self) -> bool:
        """Return whether a linear layer keeps its input as it was gathered under sequence
        parallelism.

        megatron-core's gathers it once more in the backward; the product that adds up fp32
        gradients on a CPU does not (`mtrain.mcore.layers.linear`).
        """
        return (
            bool(self.layout.sequence_parallel)
            and self.words["linear"] == ON_CPU
            and self.wide
            and self.layout.fsdp == "none"
        )

    @property
    def gathers_into_buffer(self) -> bool:
        """Return whether inputs are gathered, in the forward and once more in the backward, into
        one buffer for all layers.

        That is megatron-core's own linear layer under sequence parallelism.
        """
        own = self.words["linear"] != "te" and self.run.precision.quantized is None
        return (
            bool(self.layout.sequence_parallel)
            and own
            and not self.gathers_inputs
            and not self.frozen
        )

    @cached_property
    def _chosen(self) -> RunConfig:
        """Return the run with `auto` replaced by its implementations."""
        return self.run.model_copy(
            update={"kernels": self.run.kernels.model_copy(update=dict(self.words))}
        )

    @cached_property
    def by_lists(self) -> bool:
        """Return whether tokens go to experts by lists of them."""
        return routes_by_lists(self._chosen)

    @property
    def multiplies_low(self) -> bool:
        """Return whether linear layers multiply in fewer bits; first and last ones may not."""
        return self.run.precision.quantized is not None

    @cached_property
    def quantizes(self) -> bool:
        """Return whether norms quantise for linear layers."""
        return operands_apart(self._chosen) is None

    @property
    def cuts_blocks(self) -> bool:
        """Return whether blocks span ranks under SP, so that quantised values are useless."""
        whole = self.layout.sequence_parallel and self.run.precision.quantized == "blockwise"
        return bool(whole and self.split_tokens % BLOCK)

    @property
    def sends_quantized(self) -> bool:
        """Return whether inputs of linear layers are gathered in low precision."""
        return self.run.precision.quantized is not None and self.words["linear"] == "te"

    def plain(self, op: str) -> bool:
        """Return whether an operation is done in plain torch, by its definition or for a CPU."""
        return self.words[op] in ("reference", ON_CPU)

    def recomputes(self, module: RecomputeModule) -> bool:
        """Return whether a module of every layer is computed again in the backward."""
        again = self.layout.recompute
        # megatron-core recomputes core attention where no modules are named.
        return again.granularity == "selective" and module in (again.modules or ("core_attn",))


def _words(run: RunConfig) -> dict[str, str]:
    """Return the implementation of each operation, each choice after the earlier ones."""
    words: dict[str, str] = {}
    for op in OPERATIONS:
        word = getattr(run.kernels, op.name)
        if word in (None, "auto"):
            chosen = run.model_copy(update={"kernels": run.kernels.model_copy(update=words)})
            word = stands_for(op, chosen, Equipped())
        words[op.name] = word or "reference"
    return words
