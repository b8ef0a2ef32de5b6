"""Parameters, floating-point operations and the least memory of a model, as its family
counts them.
"""

from __future__ import annotations

from mtrain.config.engine.formats import bytes_of, is_half
from mtrain.config.optimizers import OPTIMIZERS
from mtrain.config.schema.model import ModelConfig
from mtrain.config.schema.parallel import ParallelConfig
from mtrain.config.schema.run import RunConfig
from mtrain.models.count import (
    active_parameters,
    adapter_parameters,
    expert_parameters,
    frozen_parameters,
    parameters,
)
from mtrain.models.registry import family_of
from mtrain.plan.critic import critic_of
from mtrain.plan.teacher import other_model_of

__all__ = [
    "TOKEN_BYTES",
    "active_parameters",
    "adapter_parameters",
    "expert_parameters",
    "flops_of_token",
    "flops_per_token",
    "frozen_parameters",
    "parameters",
    "state_bytes",
]

# Bytes of a token of a batch: 8 each for its id, label and position, 4 for its weight in the
# loss.
TOKEN_BYTES = 28


def flops_per_token(model: ModelConfig, seq_length: int, *, causal: bool = True) -> float:
    """Return the model FLOPs of one token's forward and backward, without recomputation.

    Attention of each token to half the sequence if `causal`, else to all of it (published figures
    use both).
    """
    return family_of(model).flops_per_token(model, seq_length, causal=causal)


def flops_of_token(run: RunConfig, length: int | None = None, *, causal: bool = True) -> float:
    """Return `flops_per_token` of a run's training: frozen weights have no gradients, and adapters
    come on top.

    Of a document of `length` tokens; None: of as many as plans take it to have.
    """
    model = run.model
    whole = flops_per_token(
        model, run.data.seen_tokens if length is None else length, causal=causal
    )
    if run.peft.kind is None:
        return whole
    table = 0 if model.ties_output else model.padded_vocab_size * model.hidden_size
    dense, experts = adapter_parameters(run)
    visited = (
        experts * model.moe.router_topk / model.moe.num_experts if model.moe is not None else 0.0
    )
    # A frozen weight saves the product for its gradient, 2 of 6 FLOPs; an adapter costs all 6.
    # Looking up a row of an untied embedding is no product, so `whole` does not have it.
    return whole - 2.0 * (active_parameters(model) - table) + 6.0 * (dense + visited)


def state_bytes(run: RunConfig) -> int:
    """Return the bytes of weights, gradients and optimizer state over all ranks, replicas counted;
    a lower bound of the memory.

    fp32: 4 weights + 4 gradients + 8 moments; bf16 and fp16: 2 + 4 (2 if reduced in that format) +
    4 main weights + 8, and less where the optimizer keeps them in low precision. The distributed
    optimizer keeps main weights and moments once instead of once per data-parallel rank, FSDP all
    of it; experts have as many copies as the expert grid has data-parallel ranks. Frozen
    parameters have only weights.
    """
    critic = critic_of(run)
    judging = 0 if critic is None else _own_state_bytes(critic)
    return _own_state_bytes(run) + frozen_copy_bytes(run) + judging


def frozen_copy_bytes(run: RunConfig) -> int:
    """Return the bytes of the weights of a frozen reference, a teacher or a model of rewards over
    all ranks.
    """
    teacher = other_model_of(run)
    models = [run.model] * run.objective.copies + ([teacher.model] if teacher else [])
    p = run.parallel
    total = 0
    for model in models:
        experts = expert_parameters(model)
        copies = max(1, p.ranks // (p.tp * p.pp)), max(1, p.ranks // _ranks_of_experts(p))
        total += (parameters(model) - experts) * copies[0] + experts * copies[1]
    return total * bytes_of(run.precision.format)


def _ranks_of_experts(p: ParallelConfig) -> int:
    """Return the ranks that hold one copy of all experts."""
    return (p.etp or p.tp) * p.ep * p.pp


def _own_state_bytes(run: RunConfig) -> int:
    p = run.parallel
    dtype = run.precision.format
    half = is_half(dtype)
    per_weight = bytes_of(dtype) + bytes_of("fp32" if run.precision.grad_reduce_in_fp32 else dtype)
    per_state = (_main_weight_bytes(run) if half else 0) + _moment_bytes(run)
    experts = expert_parameters(run.model)
    frozen = frozen_parameters(run.model)
    dense = parameters(run.model) - experts
    adapters = adapter_parameters(run)
    trained = adapters if run.peft.kind else (dense - frozen, experts)
    total = 0
    for number, learning, ranks_of_a_copy in (
        (dense, trained[0], p.tp * p.pp),
        (experts, trained[1], _ranks_of_experts(p)),
    ):
        replicas = max(1, p.ranks // ranks_of_a_copy)
        # FSDP shards weights and gradients, too: together its ranks hold one copy.
        copies = replicas if p.fsdp == "none" else 1
        still = number if run.peft.kind else number - learning
        total += still * bytes_of(dtype) * copies
        total += learning * (
            per_weight * copies + per_state * (1 if p.distributed_optimizer else copies)
        )
    return total


def _main_weight_bytes(run: RunConfig) -> int:
    """Return the bytes of a main weight, on top of its weight of 16 bits."""
    if run.optim.main_params_dtype != "fp32":
        return 0
    # The weight itself has the upper 16 bits, so the remainder is the other half.
    return 2 if run.optim.store_param_remainders else 4


def _moment_bytes(run: RunConfig) -> int:
    """Return the bytes of the moments of a parameter; without the scale that 128 of those in eight
    bits share.
    """
    return sum(map(bytes_of, OPTIMIZERS[run.optim.name].states(run).values()))
