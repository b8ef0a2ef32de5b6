"""The family: mtrain's decoder-only transformer, and what the tables add to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtrain.config.resolve.stages import Stage
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.models.gpt import graph, shrink
from mtrain.models.gpt.family import FAMILY as GPT
from mtrain.models.gpt.weights import stage_weights
from mtrain.models.graph import INDEX, Graph, Tensor
from mtrain.models.rank import Rank
from mtrain.models.weights import Weight
from ngram_family.config import NgramConfig

SMALL_ROWS = 64


def weights(m: ModelConfig, p: ParallelConfig, held: Stage) -> Iterator[Weight]:
    """Yield the weights of a stage; every tensor-parallel rank has whole tables."""
    yield from stage_weights(m, p, held)
    if held.embedding:
        own = NgramConfig.of(m)
        for number in range(own.longest - 1):
            name = f"ngrams.tables.{number}.weight"
            yield Weight(name, (own.rows, m.hidden_size), "embedding", whole=True)


def stage(r: Rank, held: Stage) -> list[Graph]:
    """Return the graphs of a stage; autograd keeps the hashes that the tables were read with."""
    graphs = graph.stage(r, held)
    if held.embedding:
        lookups = NgramConfig.of(r.model).longest - 1
        graphs[0].add("ngrams", [Tensor(r.tokens * INDEX) for _ in range(lookups)])
        # A rank's part of the tokens is a view, which keeps the others alive.
        others = r.tokens - r.split_tokens
        graphs[0].add("ngrams.scatter", [Tensor(others * r.model.hidden_size * r.element)])
    return graphs


def smaller(m: ModelConfig, p: ParallelConfig, *, layers: int, seq_length: int) -> ModelConfig:
    """Return the model with so many layers, narrow, and with small tables."""
    small = shrink.shrink(m, p, layers=layers, seq_length=seq_length)
    own = NgramConfig.of(m).model_copy(update={"rows": SMALL_ROWS})
    return small.model_copy(update={"ngram": own})


FAMILY = replace(
    GPT,
    name="ngram",
    builder="ngram_family.build:chunk",
    megatron_names=False,
    writes=False,
    weights=weights,
    stage=stage,
    shrink=smaller,
)
