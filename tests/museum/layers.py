"""Bugs of what layers compute where they are sharded: positions, heads, sequences,
experts, stages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.museum.exhibit import Exhibit, replace, wrap
from tests.museum.sums import CORE, DENSE_MLA, MIXTRAL, ranks

GEMMA = "model=gemma_tiny"
OLMO = "model.norm_placement=post model.qk_layernorm=true model.qk_layernorm_across_heads=true"
LAYERS = f"{CORE}tensor_parallel.layers"
CONTEXT = "mtrain.mcore.layers.context"


def squares_left_out() -> None:
    """Take only a rank's own squares in a norm over all heads."""
    replace(
        "mtrain.mcore.layers.portable",
        "reduce_from_tensor_model_parallel_region",
        lambda x, group: x,
    )


def windows_counted_from_stage() -> None:
    """Count the layers with windows from the stage's first layer."""
    stage = ranks().get_pipeline_model_parallel_rank
    wrap(
        "mtrain.mcore.layers.decoder_layer",
        "is_layer_window_attention",
        lambda real, size, skip, number: real(size, skip, number - stage()),
    )


def stage_off_by_one() -> None:
    """Number the layers of the second stage one too high."""
    late = ranks().get_pipeline_model_parallel_rank
    wrap(
        f"{CORE}transformer.transformer_layer",
        "get_transformer_layer_offset",
        lambda real, *args, **more: real(*args, **more) + (late() == 1),
    )


def positions_shifted() -> None:
    """Shift the rotary positions of a rank's part of the sequence by one."""
    wrap(
        f"{CORE}models.common.embeddings.rotary_pos_embedding",
        "get_pos_emb_on_this_cp_rank",
        lambda real, emb, dim, group, *a: real(emb, dim, group, *a).roll(1, dim),
    )


def positions_of_rank() -> None:
    """Take the rotary positions from 0 on every rank of the context."""
    replace(
        f"{CORE}models.common.embeddings.rotary_pos_embedding",
        "get_pos_emb_on_this_cp_rank",
        lambda emb, dim, group, *a: emb.narrow(dim, 0, emb.shape[dim] // group.size()),
    )


def shared_expert_twice() -> None:
    """Add the shared expert twice if there are several ranks."""
    wrap(
        f"{CORE}transformer.moe.shared_experts:SharedExpertMLP",
        "forward",
        lambda real, self, hidden: real(self, hidden) * (1 if dist.get_world_size() == 1 else 2),
    )


def mask_of_own_positions() -> None:
    """Count the keys of another rank from its own first in the causal mask of a ring."""

    def places(real: Any, self: Any, *args: Any) -> torch.Tensor:
        found = real(self, *args)
        return found[self.block].expand_as(found)

    wrap(f"{CONTEXT}:Context", "positions", places)


def keys_not_reordered() -> None:
    """Leave gathered keys in the order of ranks, not of the sequence."""

    def gathered(real: Any, self: Any, key: Any, value: Any, positions: torch.Tensor) -> Any:
        return real(self, key, value, torch.arange(positions.numel()).view_as(positions))

    wrap(f"{CONTEXT}:Context", "gathered", gathered)


def sinks_of_first_heads() -> None:
    """Take the sinks of the first heads on every rank of an exchange."""

    def heads(real: Any, self: Any, count: int) -> slice:
        return slice(0, count // self.inner_size)

    wrap(f"{CONTEXT}:Context", "head_slice", heads)


def bias_added_by_each_rank() -> None:
    """Add the bias after a row-parallel product on every tensor-parallel rank."""

    def forward(real: Any, self: Any, x: Any, *args: Any, **more: Any) -> Any:
        output, bias = real(self, x, *args, **more)
        size = self.tp_group.size()
        return output, None if bias is None else bias * size

    wrap(f"{LAYERS}:RowParallelLinear", "forward", forward)


def rows_not_summed() -> None:
    """Sum a contiguous copy of activations in an all-reduce, and return the unsummed input."""

    def reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
        summed = tensor.clone() if tensor.dim() > 2 else tensor
        if group.size() > 1:
            dist.all_reduce(summed, group=group)
        return tensor

    replace(f"{CORE}tensor_parallel.mappings", "_reduce", reduce)


def other_heads_left_out() -> None:
    """Keep only a rank's own heads in the gradient of MLA's shared key positions."""

    def made(real: Any, self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        self._summed = 0
        self.gives_partial_gradients = False

    wrap("mtrain.mcore.layers.portable:DuplicatedLinear", "__init__", made)


def stale_activation() -> None:
    """Send a stage a buffer that the next micro-batch has half overwritten."""

    def send(real: Any, self: Any, *, tensor_send_next: Any, **more: Any) -> Any:
        if tensor_send_next is not None:
            tensor_send_next = tensor_send_next.detach().clone()
            tensor_send_next[tensor_send_next.shape[0] // 2 :] = 0
        return real(self, tensor_send_next=tensor_send_next, **more)

    wrap(f"{CORE}pipeline_parallel.p2p_communication:P2PCommunicator", "_communicate", send)


def gradient_of_stage_scaled() -> None:
    """Divide the gradient that a stage sends back by the number of stages."""

    def send(real: Any, self: Any, *, tensor_send_prev: Any, **more: Any) -> Any:
        if tensor_send_prev is not None:
            tensor_send_prev = tensor_send_prev / 2
        return real(self, tensor_send_prev=tensor_send_prev, **more)

    wrap(f"{CORE}pipeline_parallel.p2p_communication:P2PCommunicator", "_communicate", send)


def rolled_within_rank() -> None:
    """Roll the labels of multi-token prediction within a rank's part of the sequence."""

    def roll(
        real: Any, tensor: Any, shifts: int = -1, dims: int = -1, cp_group: Any = None, **more: Any
    ) -> Any:
        return real(tensor, shifts=shifts, dims=dims, cp_group=None, **more)

    for module in (
        f"{CORE}transformer.multi_token_prediction",
        "mtrain.mcore.models.language_model",
    ):
        wrap(module, "roll_tensor", roll)


def probabilities_of_first_choice() -> None:
    """Weigh experts on other ranks as if each were equally probable."""

    def dispatch(real: Any, self: Any, hidden: Any, routing_map: Any, probs: torch.Tensor) -> Any:
        if self.ep_size > 1:
            probs = (
                routing_map.to(probs.dtype)
                * probs.sum(-1, keepdim=True)
                / self.config.moe_router_topk
            )
        return real(self, hidden, routing_map, probs)

    wrap(
        f"{CORE}transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
        "dispatch_preprocess",
        dispatch,
    )


def vocabulary_of_rank() -> None:
    """Count the padding of the vocabulary in the softmax of the last rank."""

    def loss(real: Any, *args: Any, vocab_size: Any = None, group: Any = None, **more: Any) -> Any:
        return real(*args, vocab_size=vocab_size if group is None else None, group=group, **more)

    wrap("mtrain.mcore.models.language_model", "linear_cross_entropy", loss)


def adapter_not_added() -> None:
    """Disable adapters of row-parallel layers that are sharded."""

    def spread(real: Any, b: torch.Tensor, one_hot: Any) -> torch.Tensor:
        found = real(b, one_hot)
        return found * 0 if ranks().get_tensor_model_parallel_world_size() > 1 else found

    wrap("mtrain.mcore.layers.low_rank", "spread", spread)


ATTENTION = r"decoder\.layers\.\d\.self_attention(\.core_attention)?"
EXHIBITS = (
    Exhibit(
        "norm over the heads of one rank",
        "OLMo 2 under tp, mtrain's layers.py",
        f"{OLMO} parallel=tp2",
        "other scale of queries",
        squares_left_out,
        r"decoder\.layers\.0\.self_attention\.[qk]_layernorm",
    ),
    Exhibit(
        "rotary bases counted from the stage",
        "Gemma 3 under pp, Megatron-LM 3399",
        f"{GEMMA} parallel=pp2",
        "other positions in later stages",
        windows_counted_from_stage,
        r"decoder\.layers\.\d.*",
    ),
    Exhibit(
        "stage off by one layer",
        "Megatron-LM 3399",
        "parallel=pp2 model.window_size=8 model.window_attn_skip_freq=2",
        "layers trade weights",
        stage_off_by_one,
        r"refused|decoder\.layers\.\d.*",
    ),
    Exhibit(
        "rotary positions shifted under cp",
        "Megatron-LM 5243",
        "parallel=cp2",
        "wrong offsets",
        positions_shifted,
        r"rotary_pos_emb",
    ),
    Exhibit(
        "rotary positions from 0 on every cp rank",
        "Megatron-LM 5243",
        "parallel=cp2",
        "wrong offsets",
        positions_of_rank,
        r"rotary_pos_emb",
    ),
    Exhibit(
        "shared expert counted twice",
        "made for the tests of layouts",
        f"{MIXTRAL} parallel=ep2 model.moe.shared_expert_intermediate_size=256",
        "too much of it",
        shared_expert_twice,
        r"decoder\.layers\.0\.mlp\.shared_experts.*",
    ),
    Exhibit(
        "causal mask of own positions in a ring",
        "ring attention with zigzag, context.py",
        "parallel=cp2 parallel.cp_comm_type=p2p",
        "keys of the future are seen",
        mask_of_own_positions,
        ATTENTION,
    ),
    Exhibit(
        "gathered keys in the order of ranks",
        "zigzag split, context.py",
        "parallel=cp2 parallel.cp_comm_type=all_gather",
        "wrong keys are masked",
        keys_not_reordered,
        ATTENTION,
    ),
    Exhibit(
        "sinks of the first heads on every rank",
        "GPT-OSS under cp a2a, context.py",
        "parallel=cp2 parallel.cp_comm_type=a2a model.softmax_type=learnable",
        "gradient of other heads' sinks",
        sinks_of_first_heads,
        ATTENTION,
    ),
    Exhibit(
        "bias added by every tp rank",
        "RowParallelLinear",
        "parallel=tp2 model.add_proj_bias=true",
        "bias times tp",
        bias_added_by_each_rank,
        r"decoder\.layers\.\d\.self_attention(\.linear_proj)?",
    ),
    Exhibit(
        "all-reduce of what is not contiguous is lost",
        "patch reduce-result, Megatron-LM 5338",
        "parallel=tp2 parallel.sequence_parallel=false",
        "a rank's part of a product",
        rows_not_summed,
        r"embedding\.word_embeddings",
    ),
    Exhibit(
        "MLA's key positions miss other heads",
        "patch mla-down-projection",
        f"{DENSE_MLA} parallel=tp2",
        "gradient 1e-3 off",
        other_heads_left_out,
        r".*self_attention\.linear_kv_down_proj|.*self_attention",
    ),
    Exhibit(
        "activation sent before it is whole",
        "Megatron-LM 4047",
        "parallel=pp2",
        "a stage sees another micro-batch",
        stale_activation,
        r"decoder\.layers\.1",
    ),
    Exhibit(
        "gradient scaled between stages",
        "1/num_microbatches twice, schedules.py",
        "parallel=pp2",
        "first stages learn slower",
        gradient_of_stage_scaled,
        r"decoder\.layers\.0",
    ),
    Exhibit(
        "predicted labels rolled within a cp rank",
        "Megatron-LM MTP under cp",
        "parallel=cp2 model.mtp_num_layers=1",
        "wrong labels at borders",
        rolled_within_rank,
        r"mtp.*|embedding.*|output_layer",
    ),
    Exhibit(
        "experts of other ranks weighed alike",
        "token_dispatcher.py",
        f"{MIXTRAL} parallel=ep2",
        "routing has no weight",
        probabilities_of_first_choice,
        r"decoder\.layers\.0\.mlp.*",
    ),
    Exhibit(
        "padded vocabulary in the softmax",
        "vocabulary padded for tp",
        "parallel=tp2 model.vocab_size=4100",
        "loss too large",
        vocabulary_of_rank,
        r"output_layer",
    ),
    Exhibit(
        "adapters that do nothing under tp",
        "Automodel 1755, 3592",
        "parallel=tp2 peft=lora",
        "no update has an effect",
        adapter_not_added,
        r"decoder\.layers\.\d.*",
    ),
)
