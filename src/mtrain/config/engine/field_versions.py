"""Which releases of megatron-core have a field that not all of them have; the tables set it on
those alone.
"""

from __future__ import annotations

from mtrain.config.engine import release
from mtrain.config.engine.release import SINCE_0_19, UNTIL_0_16, Versions
from mtrain.config.engine.unmapped_later import LATER

_RENAMED = {
    "TransformerConfig.cuda_graph_scope": UNTIL_0_16,  # 0.19 takes it still, with a warning
    "TransformerConfig.cuda_graph_modules": SINCE_0_19,
    "OptimizerConfig.muon_use_nesterov": UNTIL_0_16,
    "OptimizerConfig.muon_nesterov": SINCE_0_19,
    "DistributedDataParallelConfig.preserve_fp32_weights": UNTIL_0_16,
    "DistributedDataParallelConfig.megatron_fsdp_main_params_dtype": SINCE_0_19,
    "DistributedDataParallelConfig.megatron_fsdp_main_grads_dtype": SINCE_0_19,
}
_NEW = (
    "OptimizerConfig.grad_norm_skip_threshold",
    "OptimizerConfig.soap_shampoo_beta",
    "OptimizerConfig.soap_precondition_frequency",
    "TransformerConfig.mtp_detach_heads",
    "TransformerConfig.activation_offload_fraction",
    "TransformerConfig.delta_offload_bytes_across_pp_ranks",
)
_GONE = (
    "TransformerConfig.async_tensor_model_parallel_allreduce",
    "TransformerConfig.moe_extended_tp",
    "TransformerConfig.moe_use_legacy_grouped_gemm",
)

FIELD_VERSIONS: dict[str, Versions] = {
    **_RENAMED,
    **dict.fromkeys(_NEW, SINCE_0_19),
    **dict.fromkeys(_GONE, UNTIL_0_16),
    **{f"{owner}.{name}": SINCE_0_19 for owner, _, _, names in LATER for name in names.split()},
}
"""`Owner.field` -> the releases that it is for; every other field is for all of them."""
_BY_NAME = {field.partition(".")[2]: versions for field, versions in FIELD_VERSIONS.items()}


def is_there(name: str) -> bool:
    """Return whether the release that this process loads has the field, by its name alone."""
    return name not in _BY_NAME or (release.release() or release.SUPPORTED[0]) in _BY_NAME[name]
