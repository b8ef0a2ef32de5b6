"""The interface of a family of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.graph import Graph
from mtrain.models.rank import Rank
from mtrain.models.weights import Weight

BuildChunk = Callable[[RunConfig, Any, int | None], Any]
"""This rank's chunk of a resolved run, from its TransformerConfig and its virtual pipeline stage
(None: one chunk).

A module that is called as megatron-core's GPTModel is, and with the tensors that the family's
collator adds to a micro-batch, by name; it returns the sum of its losses where there are labels.
"""

Weights = Callable[[ModelConfig, ParallelConfig, Stage], Iterable[Weight]]
"""The weights of a (virtual) stage on one rank, in the order in which the builder makes them."""
Alike = Callable[[ModelConfig], Mapping[int, int]]
"""A layer of each kind, by its number from 0, and how many layers have the same weights."""


class Flops(Protocol):
    """Model FLOPs of one token's forward and backward, without recomputation."""

    def __call__(self, model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
        """Return the FLOPs of a token; if `causal`, it attends to half the sequence."""


class Shrink(Protocol):
    """The same model with so many layers, narrow enough for a laptop."""

    def __call__(
        self, model: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int
    ) -> ModelConfig:
        """Shrink a model so that layout `p` splits it and the same code runs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A kind of model: facts and functions.

    A family is one folder. Its parts have these names: `config` (keys and limits), `rules`, `count`
    (FLOPs), `weights`, `graph`, `layers`, `build`, `data`, `shrink`, `hf` and `hf_config`. mtrain
    looks for `config`, `rules` and `hf_config`, and for `family`, which names the others: a part is
    a module, as in `mtrain.models.gpt`, or a section of `family.py`, as the small parts of
    `mtrain.models.bert` are. Only the modules that are named as texts may import torch.

    A third party publishes one under the entry point group `mtrain.models`; see
    `mtrain.config.families` for its keys.
    """

    name: str
    """The value of `model.family`."""
    section: str | None = None
    """A section of `model` that the family requires besides its own."""
    builder: str
    """Its `BuildChunk`, as `package.module:function`."""
    collator: str = "mtrain.models.gpt.data:collator"
    """Its objective: a function of (RunConfig, Splits, "train" or "validation") that returns a
    `mtrain.data.batch.Collator`, as `package.module:function`. By default the next token.
    """
    files: str = "mtrain.models.gpt.hf:files"
    """Its weights in folders of Hugging Face: a function of (`model_type`, the `model` section)
    that gives the tables that a file may follow, the first of which is written; as
    `package.module:function`.
    """
    auto_class: str = "AutoModelForCausalLM"
    """The class of transformers that loads such a folder, to compare logits with."""
    settled: str | None = None
    """Overrides for what a `config.json` leaves open and its weights decide: a function of the
    `model` section that was read, the names of the weights, and the `model` section that they are
    for, if there is one, as `package.module:function`. None: nothing is left open.
    """
    probe: str = ""
    """The inputs of that class and of our chunk next to tokens, as `package.module:function`: from
    the `model` section and ids it returns the ids with what else stands among them, our tensors and
    theirs by name. Empty: none.
    """
    megatron_names: bool = False
    """True if megatron-core names its weights like a GPTModel's, for `convert --megatron`."""
    writes: bool = True
    """True if the model continues a text token by token, as `generate` requires."""

    reads_between: bool = True
    """True if pipeline stages that neither embed tokens nor compute losses read whole samples, not
    only the boundaries of packed documents. Otherwise they read no samples.
    """
    predicts_all: bool = True
    """True if every token of a sample is predicted, except those that `data` masks."""
    tokens_alone: Callable[[ModelConfig], bool] = lambda model: True
    """Predicate: the loss is only the cross entropy of tokens, so it has a perplexity."""

    flops_per_token: Flops
    shrink: Shrink
    fewest_layers: Callable[[ModelConfig], int] = lambda model: 2
    """Layers of a shrunk model, with one of every kind, for equal stages."""
    weights: Weights | None = None
    """None: unknown, and the plan divides `parameters` evenly."""
    alike: Alike | None = None
    """Kinds of layers by their `weights`, so that one of a kind is counted. None: each layer is."""
    # The family's own counts, in place of those that `mtrain.models.count` takes from `weights`.
    parameters: Callable[[ModelConfig], int] | None = None
    active_parameters: Callable[[ModelConfig], int] | None = None
    expert_parameters: Callable[[ModelConfig], int] | None = None
    frozen_parameters: Callable[[ModelConfig], int] | None = None
    buffers: Callable[[ModelConfig], Iterable[Weight]] = lambda model: ()
    """Tensors of the whole model that checkpoints hold next to `weights`."""
    saved_as: Callable[[ModelConfig, str], str] = lambda model, name: name
    """The name in checkpoints of one of `weights` or `buffers` of the whole model."""
    apart: Callable[[ModelConfig, Weight], Iterable[Weight]] = lambda model, weight: (weight,)
    """The tensors as which checkpoints hold one of `weights` of the whole model, in the order of
    its rows: itself, or each part of a fused one. Tables of other names list the parts.
    """
    stage: Callable[[Rank, Stage], list[Graph]] | None = None
    """The graphs of a (virtual) stage on one micro-batch: before its layers, each layer, after
    them. None: unknown, and the plan counts no activations.
    """
    adapted: Callable[[Iterable[Weight], RunConfig], Iterable[Weight]] | None = None
    """`weights` frozen, with those of low-rank adapters among them. None: unknown."""

    def __post_init__(self) -> None:
        """Require a source of counts: a family without one would count 0 parameters."""
        if self.weights is None and None in (self.parameters, self.active_parameters):
            raise TypeError(
                f"family {self.name}: needs weights, or parameters and active_parameters"
            )
