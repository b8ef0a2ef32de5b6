"""BERT: an encoder that is trained to say which tokens were masked, and whether one sentence
follows another.
"""

from mtrain.config.schema.model import ModelConfig
from mtrain.models.base import Family
from mtrain.models.bert import count
from mtrain.models.bert.graph import stage
from mtrain.models.bert.shrink import shrink
from mtrain.models.bert.weights import stage_weights
from mtrain.models.gpt.torch_dist import names_written


def _saved_as(model: ModelConfig, name: str) -> str:
    """Return the name of a weight in our checkpoints: norms in front have the name of the linear
    layer after them.
    """
    return names_written(name, model)[-1] if name.startswith("encoder.layers.") else name


FAMILY = Family(
    name="bert",
    builder="mtrain.models.bert.build:chunk",
    collator="mtrain.models.bert.data:collator",
    files="mtrain.models.bert.hf:files",
    settled="mtrain.models.bert.hf:settled",
    auto_class="AutoModelForMaskedLM",
    writes=False,
    predicts_all=False,
    tokens_alone=lambda model: not count.own(model).next_sentence,
    parameters=count.parameters,
    active_parameters=count.parameters,
    expert_parameters=lambda model: 0,
    flops_per_token=count.flops_per_token,
    shrink=shrink,
    weights=stage_weights,
    saved_as=_saved_as,
    stage=stage,
)
