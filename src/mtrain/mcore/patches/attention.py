"""Patches of attention, MLA and norms."""

from __future__ import annotations

import functools
from typing import Any

from mtrain.config.engine.release import SINCE_0_19, UNTIL_0_16
from mtrain.mcore.patches.patch import NO_TE, core, patch


@patch(
    "mla-flag",
    "transformer/multi_latent_attention.py:62",
    "HAVE_TE says True although TELinear is a MagicMock, so isinstance at line 185 raises"
    " TypeError.",
    NO_TE,
    UNTIL_0_16,
    "#3763",
)
def mla_flag() -> None:
    """Set HAVE_TE to false."""
    core("transformer.multi_latent_attention").HAVE_TE = False


@patch(
    "mla-down-projection",
    "transformer/multi_latent_attention.py:437",
    "Down projections must be of classes known by name. The one that works without"
    " TransformerEngine splits its weight; the key position's gradient then misses other"
    " tensor-parallel ranks' heads: silent, 1e-3 relative.",
    "everywhere",
)
def mla_down_projection() -> None:
    """Accept the portable projection, whose weight is whole on every rank."""
    from mtrain.mcore.layers.portable import DuplicatedLinear

    module = core("transformer.multi_latent_attention")
    # megatron-core asks whether a class is `in` a list, which compares with `==`.
    module.Linear = _AnyOf((module.Linear, DuplicatedLinear))


class _AnyOf:
    """A value that equals several classes and their subclasses, for `in` with a list."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self.kinds = kinds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type) and any(
            issubclass(other, kind) for kind in self.kinds if kind is not None
        )


@patch(
    "mla-query-projection",
    "transformer/multi_latent_attention.py:497",
    "Since 0.19 MLA without a rank of queries takes TransformerEngine's projection with a norm"
    " in it, whatever a spec says: silently another model (DeepSeek-V2-Lite has no such norm),"
    " or RuntimeError.",
    "everywhere",
    SINCE_0_19,
)
def mla_query_projection() -> None:
    """Use the query projection that a spec names."""
    cls = core("transformer.mla_qk_norm_config").QKNormConfigResolver
    original = cls._mla_fused_linear_or_default

    @functools.wraps(original)
    def projection(self: Any, module_spec: Any, module_name: str) -> Any:
        if module_name == "linear_q_proj":
            return module_spec
        return original(self, module_spec, module_name)

    cls._mla_fused_linear_or_default = projection


@patch(
    "mla-query-norm",
    "distributed/finalize_model_grads.py:354",
    "Gradients of every q_layernorm are summed over tensor-parallel ranks. Without sequence"
    " parallelism MLA's is whole on each rank: silently tp times too large. Now the mean is"
    " taken, which is right for equal ones.",
    "everywhere",
)
def mla_query_norm() -> None:
    """Average the query norm's gradient over tensor-parallel ranks where a sum would be wrong."""
    cls = core("transformer.multi_latent_attention").MLASelfAttention
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if config.q_lora_rank is not None and not config.sequence_parallel:
            # `finalize_model_grads` looks for this mark before it looks at names.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    cls.__init__ = __init__


@patch(
    "gate-slices",
    "transformer/attention.py:1488",
    "With fewer key/value heads than tensor-parallel ranks the gate of attention stays that of"
    " all query heads of a group: RuntimeError about its shape.",
    "everywhere",
    UNTIL_0_16,
    "#3575",
)
def gate_slices() -> None:
    """Split the gate over ranks like the queries."""
    cls = core("transformer.attention").SelfAttention
    original = cls.get_query_key_value_tensors

    @functools.wraps(original)
    def cut(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        groups = self.config.num_query_groups
        if groups >= self.world_size or len(found) != 4:
            return found
        # So many ranks have the heads of one group, and each keeps its part of the queries.
        share = self.world_size // groups
        size = self.num_attention_heads_per_partition // share
        at = self.pg_collection.tp.rank() % share
        return *found[:3], found[3][:, :, at * size : (at + 1) * size]

    cls.get_query_key_value_tensors = cut


@patch(
    "torch-norm",
    "transformer/torch_norm.py:32",
    "The norm that models take by default refuses sequence parallelism and zero-centered"
    " scales: AssertionError.",
    NO_TE,
)
def torch_norm() -> None:
    """Make the portable norm the default of models."""
    from mtrain.mcore.layers.portable import Norm

    def __new__(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return Norm(config, hidden_size, eps)

    # Other modules have imported the class by name, so the class itself has to change.
    core("transformer.torch_norm").WrappedTorchNorm.__new__ = staticmethod(__new__)
