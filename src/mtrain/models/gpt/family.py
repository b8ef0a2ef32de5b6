"""Decoder-only transformers: dense or with experts, with softmax, latent or linear attention, with
or without layers of multi-token prediction.
"""

from mtrain.models.base import Family
from mtrain.models.gpt.count import flops_per_token
from mtrain.models.gpt.graph import stage
from mtrain.models.gpt.shrink import shrink
from mtrain.models.gpt.torch_dist import saved_as
from mtrain.models.gpt.weights import adapted, alike, buffers, stage_weights

FAMILY = Family(
    name="gpt",
    builder="mtrain.models.gpt.build:chunk",
    settled="mtrain.models.gpt.hf:settled",
    megatron_names=True,
    reads_between=False,
    flops_per_token=flops_per_token,
    shrink=shrink,
    weights=stage_weights,
    alike=alike,
    buffers=buffers,
    saved_as=saved_as,
    stage=stage,
    adapted=adapted,
)
