"""muP rules: the models and optimizers for which scaling by width is known."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

OFF: Change = {"model.mup": None}
OPTIMIZERS_BY_WIDTH = ("adamw", "lion", "sgd")


@rule(
    Code(
        "MT278",
        "muP says how attention logits, weights and rates depend on the width of what it knows.",
        example="model=deepseek_tiny model.mup={}",
    ),
    reads="model.mup model.mla model.linear_attention peft.kind",
)
def mup_layers(run: RunConfig) -> Iterator[Finding]:
    """muP is defined for softmax attention with heads of one width, and for all weights
    of a model.
    """
    m = run.model
    if m.mup is None:
        return
    for key, held, why in (
        (
            "model.mla",
            m.mla,
            "the factor on MLA's logits follows from the widths of its heads' parts",
        ),
        (
            "model.linear_attention",
            m.linear_attention,
            "decays and gates of linear attention have no rule by width",
        ),
        ("peft.kind", run.peft.kind, "adapters are as wide as their rank, not as the model"),
    ):
        if held is not None:
            yield Finding("MT278", "model.mup", f"{key} is set, and {why}", (OFF,), also=(key,))


@rule(
    Code("MT468", example="model.mup={base_hidden_size:128} optim=muon"),
    reads="optim.name model.mup",
)
def mup_optimizer(run: RunConfig) -> Iterator[Finding]:
    """The scaling of rates by width is known for adamw, lion and sgd."""
    if run.model.mup is not None and run.optim.name not in OPTIMIZERS_BY_WIDTH:
        rule = f"no rule of muP says how the rate of {run.optim.name} follows the width"
        yield Finding(
            "MT468", "optim.name", rule, ({"optim.name": "adamw"}, OFF), also=("model.mup",)
        )


RULES = (mup_layers, mup_optimizer)
