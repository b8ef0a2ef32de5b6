"""The choice of a layer class for each operation, and the specs that hand it to megatron-core.

Every spec is built with the provider given explicitly; none of megatron-core's spec functions is
rebound.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from mtrain_kernels.fp8_linear.op import Recipe

from mtrain.config.engine import release
from mtrain.config.engine.kernels import BY_TORCH, ON_CPU
from mtrain.errors import BadEnvironment
from mtrain.mcore import api
from mtrain.mcore.layers import dispatch
from mtrain.mcore.layers.attention import CoreAttention
from mtrain.mcore.layers.attention_spec import attention_spec, is_rms
from mtrain.mcore.layers.decoder_layer import DecoderLayer, DecoderLayerSubmodules
from mtrain.mcore.layers.experts import GroupedExperts
from mtrain.mcore.layers.grouped_linear import ColumnGroupedLinear, RowGroupedLinear
from mtrain.mcore.layers.linear import ColumnLinear, RowLinear
from mtrain.mcore.layers.parallel_residual import SIDE_BY_SIDE
from mtrain.mcore.layers.portable import (
    Activation,
    DuplicatedLinear,
    Norm,
    chosen,
    with_bias,
)
from mtrain.mcore.layers.residual import ResidualNorm
from mtrain.mcore.layers.router import SparseRouter
from mtrain.mcore.layers.sparse_attention import SparseAttention

_BUILDS_EXPERTS = release.at_least(0, 19)
"""True if megatron-core requests a builder of experts instead of a class and its layers."""

PLAIN = ("reference", "cpu")
"""Implementations in plain torch."""
BACKENDS = {"torch": "auto"}
"""Words of kernels.attention with another name in the op: `auto` is its fastest fitting backend."""


@dataclass(frozen=True)
class Parts:
    """The parts of a layer that megatron-core lacks: the keys of `model` with these names."""

    norm_placement: str = "pre"
    qk_layernorm_across_heads: bool = False
    attn_logit_softcapping: float | None = None
    rotary_base_local: float | None = None
    add_proj_bias: bool = False
    add_mlp_bias: bool = False
    linear_attention: Any = None
    attn_mask: str = "causal"
    """Name of the mask in megatron-core's AttnMaskType; the family sets it, no key does."""

    @classmethod
    def of(cls, model: Any, *, attn_mask: str = "causal") -> Parts:
        """Return the parts that a `model` section asks for."""
        names = (field.name for field in fields(cls) if field.name != "attn_mask")
        return cls(**{name: getattr(model, name) for name in names}, attn_mask=attn_mask)


class Provider(BackendSpecProvider):
    """megatron-core's layer classes by operation: the portable layer, or TransformerEngine's."""

    sparse = False
    """True if routing uses lists of experts: `config.sparse_experts`."""

    def __init__(
        self,
        kernels: dict[str, Any],
        te: Any,
        parts: Parts = Parts(),
        *,
        norms_add: bool = False,
        packed: str | None = None,
        fp8: Recipe | None = None,
        operands: bool = False,
    ) -> None:
        self.kernels = kernels
        self.norms_add = norms_add
        self.packed = packed
        self.fp8 = fp8
        self.operands = operands
        self.parts = parts
        self._te = te

    @property
    def all_te(self) -> bool:
        """Return whether TransformerEngine implements all layers, and may fuse several."""
        # TransformerEngine's fused layers have none of these parts.
        if self.parts != Parts():
            return False
        layers = [impl for operation, impl in self.kernels.items() if operation != "activation"]
        return {"te"} == {impl for impl in layers if impl} and self.kernels[
            "activation"
        ] != "triton"

    def _uses_te(self, operation: str) -> bool:
        return self.kernels[operation] == "te"

    def linear(self) -> type:
        """Return a linear layer with the whole weight on every tensor-parallel rank."""
        return self._te.linear() if self._uses_te("linear") else self._product(DuplicatedLinear)

    def column_parallel_linear(self) -> type:
        """Return a linear layer split by output features."""
        if self._uses_te("linear"):
            return self._te.column_parallel_linear()
        return self._product(ColumnLinear)

    def row_parallel_linear(self) -> type:
        """Return a linear layer split by input features."""
        return (
            self._te.row_parallel_linear() if self._uses_te("linear") else self._product(RowLinear)
        )

    def _product(self, layer: type) -> type:
        """Return a layer of ours, in FP8 by the reference or the fastest that takes a product."""
        impl = self.kernels["linear"]
        if self.fp8 is None:
            return chosen(layer, impl) if impl in (ON_CPU, BY_TORCH) else layer
        # The word names a product in full precision. In FP8 there are the reference and the fastest
        # kernel that takes a call.
        if impl != "reference":
            impl = "auto"
        return chosen(layer, impl, fp8=self.fp8, takes_operands=self.operands)

    def fuse_layernorm_and_linear(self) -> bool:
        """Return one module for a norm and the next linear layer, if TransformerEngine has both."""
        return self.all_te

    def column_parallel_layer_norm_linear(self) -> type | None:
        """Return that fused module, or None."""
        return self._te.column_parallel_layer_norm_linear() if self.all_te else None

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type:
        """Return a norm; which kind, the model's config says.

        Ours makes the sum before it where `norms_add`.
        """
        if self._uses_te("norm"):
            return self._te.layer_norm(rms_norm, for_qk)  # type: ignore[no-any-return]
        return chosen(ResidualNorm if self.norms_add else Norm, self.kernels["norm"])

    def core_attention(self, *, sparse: bool = False) -> type:
        """Return the class of attention of this rank's heads; `sparse`: to an indexer's keys."""
        impl = self.kernels["attention"]
        if sparse:
            return chosen(SparseAttention, BACKENDS.get(impl, impl))
        if self._uses_te("attention"):
            return self._te.core_attention()  # type: ignore[no-any-return]
        return chosen(
            CoreAttention,
            BACKENDS.get(impl, impl),
            softcap=self.parts.attn_logit_softcapping or 0.0,
        )

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False
    ) -> Any:
        """Return experts in one grouped call, or one after another; the legacy grouped MLP is never
        used.

        A class with its layers; since 0.19 a factory that builds it from them.
        """
        if self._uses_te("experts"):
            # 0.16.1 has a second argument, for the legacy grouped MLP.
            return self._te.grouped_mlp_modules(
                moe_use_grouped_gemm, *(() if _BUILDS_EXPERTS else (False,))
            )
        kind, layers = self._experts(moe_use_grouped_gemm)
        return partial(kind, submodules=layers) if _BUILDS_EXPERTS else (kind, layers)

    def _experts(self, grouped: bool) -> tuple[type, Any]:
        if not grouped:
            layers = MLPSubmodules(
                linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear()
            )
            return SequentialMLP, layers
        more = {} if self.fp8 is None else {"fp8": self.fp8}
        first, second = (
            chosen(c, self.kernels["experts"], **more)
            for c in (ColumnGroupedLinear, RowGroupedLinear)
        )
        activation = self.activation_func()
        # Plain torch splits rows by counts on the host, where TEGroupedMLP has them;
        # `GroupedExperts` leaves them on the device.
        if self.kernels["experts"] in PLAIN and not self.sparse:
            kind = TEGroupedMLP
        else:
            kind = GroupedExperts
        return kind, MLPSubmodules(linear_fc1=first, linear_fc2=second, activation_func=activation)

    def activation_func(self) -> type | None:
        """Return the layer between the two of an MLP, or None for the config's function."""
        return Activation if self.kernels["activation"] == "triton" else None


def provider(
    kernels: Any,
    parts: Parts = Parts(),
    *,
    norms_add: bool = False,
    packed: str | None = None,
    fp8: Recipe | None = None,
    operands: bool = False,
) -> Provider:
    """Return the provider for resolved implementations; operations that the model does not have may
    be None.

    `norms_add`: norms make the sums of the residual stream that they read. `packed`: the
    implementation of the rotary op that norms and turns queries and keys as they are unpacked.
    `fp8`: the format of products in our linear layers and experts; `operands`: norms and
    activations quantise for them.

    Raises `BadEnvironment` where `te` is named but TransformerEngine does not import, `ValueError`
    for a word that is no implementation, or one without the cap of `parts`.
    """
    impls = {operation: getattr(kernels, operation, None) for operation in _WORDS}
    for operation, impl in impls.items():
        if impl not in _WORDS[operation]:
            raise ValueError(
                f"kernels.{operation} = {impl!r} is none of"
                f" {', '.join(filter(None, _WORDS[operation]))}"
            )
    if impls["attention"] == "te" and parts.attn_logit_softcapping:
        raise ValueError("TransformerEngine's attention knows no cap of logits")
    named = [f"kernels.{operation}" for operation, impl in impls.items() if impl == "te"]
    more: dict[str, Any] = {
        "norms_add": norms_add,
        "packed": packed,
        "fp8": fp8,
        "operands": operands,
    }
    return Provider(impls, _transformer_engine(named) if named else None, parts, **more)


_WORDS: dict[str, tuple[str | None, ...]] = {
    "norm": ("reference", "cpu", "triton", "te"),
    "attention": ("reference", "cpu", "torch", "triton", "te"),
    "linear": ("reference", "cpu", "triton", "torch", "te"),
    "activation": ("reference", "triton", None),
    "experts": ("reference", "cpu", "triton", "torch", "te", None),
}


def _transformer_engine(named: list[str]) -> Any:
    try:
        importlib.import_module("transformer_engine.pytorch")
    # A missing CUDA library raises OSError, a wrong version anything.
    except Exception as error:
        raise BadEnvironment(
            f"{', '.join(named)} = te, but TransformerEngine does not import here: {error}"
        ) from error
    return importlib.import_module(
        "megatron.core.extensions.transformer_engine_spec_provider"
    ).TESpecProvider()


def layer_spec(
    config: Any, provider: Provider, *, vp_stage: int | None = None, pp_rank: int | None = None
) -> Any:
    """Return the decoder layers that this pipeline stage builds, dense or MoE as
    `config.moe_layer_freq` says.

    Goes to `GPTModel(transformer_layer_spec=...)`. Covers grouped-query attention and MLA.
    """
    kinds = list(zip(_moe_pattern(config), _linear_pattern(config), strict=True))
    specs = {
        kind: one_layer_spec(config, provider, moe=kind[0], linear=kind[1]) for kind in set(kinds)
    }
    # A layout may give a stage any layers; without one they are consecutive.
    if config.pipeline_model_parallel_layout is not None:
        built = config.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
        built = range(
            first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
        )
    # Every layer ends with a norm then, so no final norm follows the last one.
    if provider.parts.norm_placement == "post_residual":
        last = None
    else:
        last = provider.layer_norm(is_rms(config))
    return api.TransformerBlockSubmodules(
        layer_specs=[specs[kinds[i]] for i in built], layer_norm=last
    )


def mtp_spec(
    config: Any, provider: Provider, *, vp_stage: int | None = None, pp_rank: int | None = None
) -> Any:
    """Return this stage's prediction layers for `GPTModel(mtp_block_spec=...)`, or None."""
    if not config.mtp_num_layers:
        return None
    # megatron-core builds MTP layers of the kind of the last decoder layer.
    last = one_layer_spec(config, provider, moe=_moe_pattern(config)[-1])
    block = api.TransformerBlockSubmodules(
        layer_specs=[last], layer_norm=provider.layer_norm(is_rms(config))
    )
    return api.get_gpt_mtp_block_spec_for_backend(
        config=config, spec=block, backend=provider, vp_stage=vp_stage, pp_rank=pp_rank
    )


def one_layer_spec(config: Any, provider: Provider, *, moe: bool, linear: bool = False) -> Any:
    """Return one transformer layer; `moe` tells whether its MLP is a mixture of experts, `linear`
    whether its attention is a gated delta net.
    """
    spec = _one_after_the_other(config, provider, moe, linear)
    if getattr(config, "parallel_residual", False):
        spec.module = SIDE_BY_SIDE[spec.module]
    return spec


def _one_after_the_other(config: Any, provider: Provider, moe: bool, linear: bool) -> Any:
    experts = config.num_moe_experts if moe else None
    if provider.all_te:
        return api.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            qk_l2_norm=config.qk_l2_norm,
            use_te_activation_func=config.use_te_activation_func,
        )
    norm = provider.layer_norm(is_rms(config))
    place = provider.parts.norm_placement
    before = IdentityOp if place in ("post", "post_residual") else norm
    behind = IdentityOp if place == "pre" else norm
    attention = attention_spec(config, provider, linear=linear)
    mlp = mlp_spec(config, provider, experts)
    if provider.parts.add_mlp_bias:
        layers = layers_of(mlp)
        layers.linear_fc1, layers.linear_fc2 = map(
            with_bias, (provider.column_parallel_linear(), provider.row_parallel_linear())
        )
    layer = DecoderLayerSubmodules(
        input_layernorm=before,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        post_self_attn_layernorm=behind,
        pre_mlp_layernorm=before,
        post_mlp_layernorm=behind,
        norms_the_sum=place == "post_residual",
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
    )
    if not config.multi_latent_attention:
        # Checkpoints use the names of TransformerEngine's fused norm and linear layer, so that
        # either implementation reads them.
        layer.sharded_state_dict_keys_map = {
            "input_layernorm.": (
                f"self_attention.{'in_proj' if linear else 'linear_qkv'}.layer_norm_"
            ),
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
    return api.ModuleSpec(module=DecoderLayer, submodules=layer)


def mlp_spec(config: Any, provider: Provider, experts: int | None) -> Any:
    """Return an MLP, or a mixture of `experts`, routed by lists if the config wants them."""
    # Set before the spec is built: megatron-core asks the provider for experts meanwhile.
    provider.sparse = getattr(config, "sparse_experts", None) is not None
    mlp = api.get_mlp_module_spec_for_backend(
        backend=provider,
        num_experts=experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        use_te_activation_func=config.use_te_activation_func,
    )
    if experts is not None and provider.sparse:
        # A spec names the router. The layer of experts names its dispatcher itself, so that one has
        # to be replaced in megatron-core's module.
        layers_of(mlp).router = SparseRouter
        dispatch.use_in_layers()
    return mlp


def layers_of(mlp: Any) -> Any:
    """Return the two layers of an MLP's specification, or of its factory since 0.19."""
    return mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules


def _moe_pattern(config: Any) -> list[bool]:
    """Return whether each layer is a mixture of experts; raises `ValueError` for a wrong list."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    every = config.moe_layer_freq
    if isinstance(every, int):
        return [i % every == 0 for i in range(config.num_layers)]
    if len(every) != config.num_layers or not set(every) <= {0, 1}:
        raise ValueError(f"moe_layer_freq {every} must be {config.num_layers} times 0 or 1")
    return [bool(moe) for moe in every]


def _linear_pattern(config: Any) -> list[bool]:
    """Return whether each of the model's layers is a gated delta net."""
    if config.experimental_attention_variant == "gated_delta_net":
        every = config.linear_attention_freq
    else:
        every = None
    return [every is not None and (i + 1) % every != 0 for i in range(config.num_layers)]
