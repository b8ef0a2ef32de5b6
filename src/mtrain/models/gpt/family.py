"""Decoder-only transformers: dense or with experts, standard attention or MLA, with or without MTP
layers.
"""

from mtrain.models.base import Family
from mtrain.models.gpt import count
from mtrain.models.gpt.adapters import adapted, adapter_parameters
from mtrain.models.gpt.graph import stage
from mtrain.models.gpt.shrink import shrink
from mtrain.models.gpt.torch_dist import saved_as
from mtrain.models.gpt.weights import buffers, stage_weights

FAMILY = Family(
    name="gpt",
    builder="mtrain.models.gpt.build:chunk",
    settled="mtrain.models.gpt.hf_files:settled",
    megatron_names=True,
    reads_between=False,
    parameters=count.parameters,
    active_parameters=count.active_parameters,
    expert_parameters=count.expert_parameters,
    flops_per_token=count.flops_per_token,
    shrink=shrink,
    weights=stage_weights,
    buffers=buffers,
    saved_as=saved_as,
    stage=stage,
    adapted=adapted,
    adapter_parameters=adapter_parameters,
)
