"""A model small enough to train in a test, on megatron-core's own objects; needs the megatron
adapter.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

VOCAB = 64
TOKENS = 16
BATCH = 2
REFERENCE = SimpleNamespace(
    norm="reference",
    attention="reference",
    linear="reference",
    activation="reference",
    experts="reference",
)
MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "rope",
    "qk_layernorm": True,
}
MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}


def start_world(
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    pp: int = 1,
    etp: int | None = None,
    cp_sizes: list[int] | None = None,
) -> None:
    """Start process groups of these degrees and megatron-core's random state, on an initialised
    torch.distributed.
    """
    from mtrain.mcore import api

    api.parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        hierarchical_context_parallel_sizes=cp_sizes,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    api.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)


def config(**over: Any) -> Any:
    """Return a config of two layers whose initial weights do not depend on the tensor
    parallelism.
    """
    from mtrain.mcore import api

    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    } | over
    if values.get("multi_latent_attention"):
        del values["num_query_groups"]
        return api.MLATransformerConfig(**values)
    return api.TransformerConfig(**values)


def model(
    cfg: Any, spec: Any = None, *, wrap: bool = True, distributed_optimizer: bool = False
) -> Any:
    """Return a GPTModel of one stage with the portable backend (or `spec`); in
    DistributedDataParallel if `wrap`.
    """
    from mtrain.mcore import api
    from mtrain.mcore.layers import backend

    provider = backend.provider(REFERENCE)
    gpt = api.GPTModel(
        config=cfg,
        transformer_layer_spec=spec or backend.layer_spec(cfg, provider),
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=backend.mtp_spec(cfg, provider),
    )
    if not wrap:
        return gpt
    ddp = api.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return api.DistributedDataParallel(cfg, ddp, gpt)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and labels of shape [BATCH, TOKENS]."""
    drawn = torch.randint(
        0, VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(seed)
    )
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS).contiguous()
    return drawn[:, :-1].contiguous(), positions, drawn[:, 1:].contiguous()


def accumulate_gradients(
    chunk: Any, cfg: Any, finalize: Any = None, *, number: int = 1, forward_only: bool = False
) -> float:
    """Run forward and backward over so many micro-batches, the first of which is `batch()`, by
    megatron-core's schedule and finalise gradients; return the mean loss of the first.
    """
    from mtrain.mcore import api

    cfg.finalize_model_grads_func = finalize or api.finalize_model_grads
    if hasattr(chunk, "zero_grad_buffer"):
        chunk.zero_grad_buffer()
    losses = api.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([batch(seed) for seed in range(number)]),
        model=chunk,
        num_microbatches=number,
        seq_length=TOKENS,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return float(losses[0]["loss"])


def forward_step(batches: Any, module: Any) -> Any:
    """Return the losses of the next batch, and the function that averages them."""
    tokens, positions, labels = next(batches)
    return module(tokens, positions, None, labels=labels), partial(_mean_loss)


def gradients(chunk: Any) -> dict[str, torch.Tensor]:
    """Return copies of all gradients by whole name."""
    return {whole_name(name): p.main_grad.clone() for name, p in chunk.named_parameters()}


@torch.no_grad()
def redraw_matrices(chunk: Any) -> None:
    """Redraw weights from their whole names, independent of how experts are placed or grouped."""
    for name, parameter in chunk.named_parameters():
        if parameter.ndim == 2:
            draw = torch.Generator().manual_seed(zlib.crc32(whole_name(name).encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)


def whole_name(name: str) -> str:
    """Return a parameter's name without wrappers and with experts counted over all ranks,
    grouped or not.
    """
    from mtrain.mcore import api

    name = name.removeprefix("module.")
    first = api.parallel_state.get_expert_model_parallel_rank() * (
        MOE["num_moe_experts"] // api.parallel_state.get_expert_model_parallel_world_size()
    )
    if found := re.fullmatch(r"(.*experts\.)local_experts\.(\d+)\.(\w+)\.weight", name):
        return f"{found[1]}{found[3]}.weight{first + int(found[2])}"
    if found := re.fullmatch(r"(.*experts\.\w+\.weight)(\d+)", name):
        return f"{found[1]}{first + int(found[2])}"
    return name


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.mean()
    return loss, {"loss": loss.detach()}


FINE = "fine"
GATED_DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def gated_delta_norm() -> str:
    """Return FINE if the norm after the states of all heads has the gradient of all heads."""
    from mtrain.mcore import api

    start_world(tp=2)
    cfg = config(tensor_model_parallel_size=2, **GATED_DELTA)
    net = model(cfg)
    before = {}

    def remember_and_finalize(chunks: Any, *args: Any, **kwargs: Any) -> None:
        before.update(gradients(net))
        api.finalize_model_grads(chunks, *args, **kwargs)

    accumulate_gradients(net, cfg, remember_and_finalize)
    name = "decoder.layers.0.self_attention.out_norm.weight"
    torch.distributed.all_reduce(before[name])
    same = torch.allclose(gradients(net)[name], before[name])
    return FINE if same else "the gradient of one rank's heads"


def resumes_bitwise(trainee: Callable[[], tuple[Any, Any, Callable[[], None]]], steps: int) -> bool:
    """Return whether a second trainee (model, optimizer and a step), with megatron-core's state of
    the first after three steps, has equal weights after so many more.
    """
    model, optimizer, step = trainee()
    for _ in range(3):
        step()
    weights = _copy(model.state_dict())
    state = _copy(optimizer.state_dict())
    state["param_state"] = _copy(optimizer.get_parameter_state_dp_zero(use_gloo_comm=False))
    state["param_state_sharding_type"] = "dp_zero_gather_scatter"
    resumed, resumed_optimizer, resumed_step = trainee()
    resumed.load_state_dict(weights)
    resumed_optimizer.load_state_dict(state)
    for _ in range(steps):
        step()
        resumed_step()
    pairs = zip(model.parameters(), resumed.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _copy(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if torch.is_tensor(x) else x, tree)
