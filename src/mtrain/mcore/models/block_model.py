"""A decoder-only transformer as a hybrid model of megatron-core: attention and MLP of a block are a
layer each.

Blocks are numbered as the layers of a GPTModel: windows, positions, losses of routers, formats and
caches, which depend on the number, are the same, and so is the name of every weight in a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any

from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.transformer.transformer_block import TransformerBlock

from mtrain.config.resolve.stages import OF_A_BLOCK
from mtrain.mcore import api
from mtrain.mcore.layers.attention_spec import is_rms
from mtrain.mcore.layers.backend import one_layer_spec
from mtrain.mcore.layers.decoder_layer import DecoderLayerSubmodules
from mtrain.mcore.models.hybrid_model import (
    HybridModel,
    PatternLayer,
    Stack,
    pattern_layers,
    stack_submodules,
)
from mtrain.models.hybrid.config import DELTA, EXPERTS, SOFTMAX


class BlockLayer(PatternLayer):
    """The attention or MLP of a numbered block; `whole` is the configuration of blocks."""

    def __init__(
        self,
        config: Any,
        submodules: Mapping[str, Any],
        layer_number: int,
        *,
        kinds: str,
        whole: Any,
        pp_layer_offset: int | None = None,
        **more: Any,
    ) -> None:
        if pp_layer_offset is not None:
            more["pp_layer_offset"] = pp_layer_offset // OF_A_BLOCK
        super().__init__(whole, submodules, layer_number, kinds=kinds, **more)

    def number(self, layer_number: int) -> int:
        """Return the number of the block."""
        return -(-layer_number // OF_A_BLOCK)


class BlockStack(Stack):
    """The stack of a hybrid model that describes its weights as the block of a GPTModel does."""

    def __init__(
        self, config: Any, *args: Any, pg_collection: Any, vp_stage: int | None, **kwargs: Any
    ) -> None:
        # 0.16.1 compares the number of layers with the letters of the pattern.
        doubled = copy(config)
        doubled.num_layers = OF_A_BLOCK * config.num_layers
        super().__init__(doubled, *args, pg_collection=pg_collection, **kwargs)
        # Only building the stack needs the doubled number of layers.
        self.config = config
        self.pg_collection = pg_collection
        self.vp_stage = vp_stage

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return as of the layers of a GPTModel, whichever of its weights each of ours has."""
        found = TransformerBlock.sharded_state_dict(self, prefix, sharded_offsets or (), metadata)
        apply_prefix_mapping(found, {f"{prefix}final_norm.": f"{prefix}final_layernorm."})
        return found


class BlockModel(HybridModel):
    """`LanguageModel` as a hybrid model, without layers of multi-token prediction.

    `rope_scaling` and `rope_scaling_factor` are those of megatron-core's GPTModel.
    """

    def __init__(
        self,
        config: Any,
        spec: Any,
        *,
        rope_scaling: bool,
        rope_scaling_factor: float,
        **kwargs: Any,
    ) -> None:
        # `complete` reads it, which the constructor calls.
        self.__dict__["_turned"] = rope_scaling_factor if rope_scaling else None
        super().__init__(config, spec, **kwargs)

    def complete(self, *args: Any, **features: Any) -> None:
        """Complete the model as `SummedLosses` does, with GPTModel's rotary positions."""
        rotary = getattr(self, "rotary_pos_emb", None)
        if rotary is not None:
            rotary.rotary_interleaved = self.config.rotary_interleaved
            if self.__dict__["_turned"] is not None:
                rotary.inv_freq = rotary._apply_scaling(
                    rotary.inv_freq, factor=self.__dict__["_turned"]
                )
        super().complete(*args, **features)


def block_spec(
    config: Any, provider: Any, pattern: str, layers: range, *, vp_stage: int | None
) -> Any:
    """Return the specification of `layers` of `pattern`, two for each `backend.layer_spec`."""
    parts = {}
    for kind in set(pattern):
        layer = one_layer_spec(config, provider, moe=kind == EXPERTS, linear=kind == DELTA)
        parts[kind] = _half(layer.submodules, attention=kind in (*SOFTMAX, DELTA))
    kinds = pattern_layers(BlockLayer, parts, pattern, layers, whole=config, vp_stage=vp_stage)
    norm = provider.layer_norm(is_rms(config))
    params = {"layers": layers, "norm": norm, "vp_stage": vp_stage}
    return api.ModuleSpec(module=BlockStack, params=params, submodules=stack_submodules(**kinds))


def _half(whole: Any, *, attention: bool) -> DecoderLayerSubmodules:
    """Return the parts of a layer that are of its attention, or of its MLP."""
    named = {field.name: getattr(whole, field.name) for field in fields(whole)}
    shared = ("sharded_state_dict_keys_map", "norms_the_sum")
    return DecoderLayerSubmodules(
        **{k: v for k, v in named.items() if k in shared or ("mlp" in k) != attention}
    )
