"""megatron-core's steps without a number that the host asks the device for, so that the host runs
ahead of it.

The norm of the gradient, the factor that clips it, the number of tokens of a step and where packed
documents begin stay tensors. What decides by one of them on the host still may (a loss scale,
`optim.skip_above_grad_norm`): it waits, as it would without this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer import clip_grads, layer_wise_optimizer, optimizer
from torch import Tensor

from mtrain.config.engine import release as engine
from mtrain.config.engine.release import UNTIL_0_16
from mtrain.mcore.adapter.installed import require_installed
from mtrain.mcore.layers.context import context_positions

_norm = clip_grads.get_grad_norm_fp32
_clip = clip_grads.clip_grad_by_total_norm_fp32


def stay_on_device(config: Any) -> None:
    """Stop models of a TransformerConfig from requesting these numbers, in this process."""
    # Both modules imported the function by name: replacing it in clip_grads would not reach them.
    for module in (optimizer, layer_wise_optimizer):
        module.get_grad_norm_fp32 = norm
    optimizer.clip_grad_by_total_norm_fp32 = clip
    release = engine.release()
    # Later releases divide on the device themselves.
    if release is None or release in UNTIL_0_16:
        config.finalize_model_grads_func = finalize
    rope_utils._apply_rotary_pos_emb_thd = rotated


def norm(grads_for_norm: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None) -> Any:
    """Return the result of `get_grad_norm_fp32` as fp64 [] if the norm is the Euclidean one."""
    if norm_type != 2:
        return _norm(grads_for_norm, norm_type, grad_stats_parallel_group)
    grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else list(grads_for_norm)
    group = None
    for grad in grads:
        group = clip_grads.get_data_parallel_group_if_dtensor(grad, group)
    local = [clip_grads.to_local_if_dtensor(grad) for grad in grads]
    # megatron-core ends with `.item()`, where the host waits for the whole backward. The same
    # reductions on a tensor let it launch the optimizer meanwhile.
    squares = _length(local) ** 2.0
    if group:
        dist.all_reduce(squares, group=group)
    dist.all_reduce(squares, group=grad_stats_parallel_group)
    # fp64, because megatron-core takes the root of a Python float.
    return squares.double().sqrt().reshape(())


def _length(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of all of them as one vector: fp32 [1]."""
    if not grads:
        return torch.zeros(1, device=require_installed().namespace.current_device())
    overflow = torch.zeros(1, dtype=torch.int, device=grads[0].device)
    found, _ = clip_grads.multi_tensor_applier(
        clip_grads.l2_norm_impl, overflow, [list(grads)], False
    )
    return found.reshape(1)  # type: ignore[no-any-return]


def clip(
    parameters: Any, max_norm: float, total_norm: Any, use_decoupled_grad: bool = False
) -> None:
    """Do as `clip_grad_by_total_norm_fp32` with a tensor as the norm: multiply by at most 1."""
    if not isinstance(total_norm, Tensor):
        _clip(parameters, max_norm, total_norm, use_decoupled_grad)
        return
    name = "decoupled_grad" if use_decoupled_grad else "grad"
    found = [getattr(parameter, name, None) for parameter in parameters]
    grads = [clip_grads.to_local_if_dtensor(grad).detach() for grad in found if grad is not None]
    if grads:
        # megatron-core multiplies only where the factor is below 1. Only the host could decide
        # that, so the clamp makes it 1 elsewhere.
        factor = (max_norm / (total_norm + 1.0e-6)).clamp(max=1.0).float()
        torch._foreach_mul_(grads, factor)


def finalize(model: Any, num_tokens: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """Do as `finalize_model_grads`, dividing by the tokens of the step on the device."""
    # Given a count, megatron-core tests `num_tokens > 0` on the host before it divides.
    finalize_model_grads(model, None, *args, **kwargs)
    if num_tokens is None:
        return
    groups = kwargs.get("pg_collection") or (args[0] if args else None)
    if groups is None:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    else:
        pipeline = groups.pp
        data = groups.dp_cp
    # The loss, and so the count, exists on the last pipeline stage only.
    dist.broadcast(
        num_tokens, src=dist.get_global_rank(pipeline, pipeline.size() - 1), group=pipeline
    )
    dist.all_reduce(num_tokens, group=data)
    factor = 1.0 / num_tokens.clamp(min=1)
    for chunk in model:
        chunk.scale_gradients(factor)


def rotated(
    t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, cp_group: Any = None, **kwargs: Any
) -> Tensor:
    """Do as `_apply_rotary_pos_emb_thd`: rotate packed tokens [t, heads, dim] by their places."""
    # megatron-core splits the batch into its documents, whose lengths it reads on the host. A table
    # of positions turns all of them at once.
    angles = freqs.index_select(0, _places(cu_seqlens, len(t), cp_group))
    turned: Tensor = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, *args, **kwargs)
    return turned.squeeze(1)


def _places(cu_seqlens: Tensor, tokens: int, group: Any) -> Tensor:
    """Return this rank's tokens' places in their documents, once for all layers: int64 [tokens]."""
    # Every layer gets the same tensor of boundaries, so it carries the result. A write in place,
    # by which its memory is used again, raises the version.
    version, known = getattr(cu_seqlens, "mtrain_places", (None, None))
    if known is not None and version == cu_seqlens._version and len(known) == tokens:
        return known  # type: ignore[no-any-return]
    ranks = group.size()
    mine = torch.arange(tokens, device=cu_seqlens.device)
    if ranks > 1:
        mine = context_positions(tokens * ranks, ranks, cu_seqlens, cu_seqlens.device)[group.rank()]
    bounds = cu_seqlens.to(mine.dtype)
    places = mine - bounds[torch.searchsorted(bounds, mine.contiguous(), right=True) - 1]
    cu_seqlens.mtrain_places = cu_seqlens._version, places  # type: ignore[attr-defined]
    return places
