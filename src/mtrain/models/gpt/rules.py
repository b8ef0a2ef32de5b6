"""The rule of decoder-only transformers that megatron-core builds as hybrid models."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.families import beyond
from mtrain.config.rules.finding import Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig
from mtrain.models.gpt.config import BUILDER


@rule(
    Code(
        "MT284",
        help="Remove the key, or build a GPTModel: model.builder=gpt.",
        example="model.builder=hybrid model.parallel_residual=true",
    ),
    reads=" ".join(("model.family", "model.builder", *(limit.key for limit in BUILDER))),
)
def hybrid_builder_limits(run: RunConfig) -> Iterator[Finding]:
    """Cannot use this value because megatron-core's hybrid model does not have it."""
    # megatron-core builds a decoder in two ways, and its HybridModel has fewer options.
    if run.model.family == "gpt" and run.model.builder == "hybrid":
        for limit, fixes in beyond(run, BUILDER):
            changes = [{"model.builder": "gpt"}, *fixes]
            yield Finding("MT284", limit.key, limit.why, changes, also=("model.builder",))


RULES = (hybrid_builder_limits,)
