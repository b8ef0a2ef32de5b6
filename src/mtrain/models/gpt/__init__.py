"""Decoder-only transformers: dense or with experts, standard attention or MLA, with or without MTP layers."""

from mtrain.models.base import Family
from mtrain.models.gpt import count
from mtrain.models.gpt.adapters import adapter_parameters
from mtrain.models.gpt.shrink import shrink

GPT = Family(
    name="gpt",
    section=None,
    builder="mtrain.models.gpt.build:chunk",
    megatron_names=True,
    reads_between=False,
    parameters=count.parameters,
    active_parameters=count.active_parameters,
    expert_parameters=count.expert_parameters,
    flops_per_token=count.flops_per_token,
    shrink=shrink,
    adapter_parameters=adapter_parameters,
)
