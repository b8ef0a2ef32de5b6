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
        "A key says something that a decoder-only transformer built as a hybrid model does not"
        " have.",
        "Take the key away, or build a GPTModel: model.builder=gpt.",
        example="model.builder=hybrid model.parallel_residual=true",
    ),
    reads=" ".join(("model.family", "model.builder", *(limit.key for limit in BUILDER))),
)
def builder_has_it(run: RunConfig) -> Iterator[Finding]:
    """A decoder-only transformer that is built as a hybrid model keeps to what that has."""
    if run.model.family == "gpt" and run.model.builder == "hybrid":
        for limit, fixes in beyond(run, BUILDER):
            rule = f"model.builder=hybrid: {limit.why}"
            changes = ({"model.builder": "gpt"}, *fixes)
            yield Finding("MT284", limit.key, rule, changes, also=("model.builder",))


RULES = (builder_has_it,)
