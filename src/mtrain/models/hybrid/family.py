"""Hybrids: decoders of Mamba-2 layers, attention, MLPs and experts, in the order of a pattern."""

from mtrain.models.base import Family
from mtrain.models.gpt.adapters import adapted
from mtrain.models.hybrid import count
from mtrain.models.hybrid.count import adapter_parameters
from mtrain.models.hybrid.graph import stage
from mtrain.models.hybrid.shrink import shrink
from mtrain.models.hybrid.weights import apart, buffers, saved_as, stage_weights

FAMILY = Family(
    name="hybrid",
    builder="mtrain.models.hybrid.build:chunk",
    files="mtrain.models.hybrid.hf:files",
    reads_between=False,
    parameters=count.parameters,
    active_parameters=count.active_parameters,
    expert_parameters=count.expert_parameters,
    flops_per_token=count.flops_per_token,
    shrink=shrink,
    fewest_layers=lambda model: max(2, len(set(count.own(model).pattern))),
    weights=stage_weights,
    buffers=buffers,
    saved_as=saved_as,
    apart=apart,
    stage=stage,
    adapted=adapted,
    adapter_parameters=adapter_parameters,
)
