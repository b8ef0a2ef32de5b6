"""LLaVA-1.5: a language model that reads images by a CLIP vision transformer and a projector."""

from mtrain.models.base import Family
from mtrain.models.gpt.torch_dist import saved_as
from mtrain.models.gpt.weights import buffers
from mtrain.models.llava import count
from mtrain.models.llava.graph import stage
from mtrain.models.llava.shrink import shrink
from mtrain.models.llava.weights import stage_weights

FAMILY = Family(
    name="llava",
    builder="mtrain.models.llava.build:chunk",
    collator="mtrain.models.llava.data:collator",
    files="mtrain.models.llava.hf:files",
    auto_class="AutoModelForImageTextToText",
    probe="mtrain.models.llava.data:probe",
    writes=False,
    predicts_all=False,
    parameters=count.parameters,
    active_parameters=count.parameters,
    expert_parameters=count.expert_parameters,
    flops_per_token=count.flops_per_token,
    shrink=shrink,
    weights=stage_weights,
    buffers=buffers,
    saved_as=saved_as,
    stage=stage,
    frozen_parameters=count.frozen_parameters,
)
