"""T5: an encoder-decoder that learns to fill in the spans that were removed from a text."""

from mtrain.models.base import Family
from mtrain.models.t5 import count
from mtrain.models.t5.graph import stage
from mtrain.models.t5.shrink import shrink
from mtrain.models.t5.weights import stage_weights

FAMILY = Family(
    name="t5",
    builder="mtrain.models.t5.build:chunk",
    collator="mtrain.models.t5.data:collator",
    files="mtrain.models.t5.hf:files",
    auto_class="AutoModelForSeq2SeqLM",
    settled="mtrain.models.t5.hf:settled",
    writes=False,
    predicts_all=False,
    parameters=count.parameters,
    active_parameters=count.parameters,
    flops_per_token=count.flops_per_token,
    shrink=shrink,
    weights=stage_weights,
    stage=stage,
)
