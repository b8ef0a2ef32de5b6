"""Plain models of megatron-core, saved and loaded by megatron-core itself: the judge of
conversions.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forked import run_ranks

Metadata = dict[str, Any] | None
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
IDS = 300
WORDS = (
    "model.num_layers=2 model.hidden_size=32 model.num_attention_heads=4 model.vocab_size=300"
    " data=mock"
)


@dataclass(frozen=True)
class Case:
    """A model of megatron-core, and the words that describe the same model here."""

    words: str
    config: Mapping[str, Any]
    tied: bool = False
    rows: int = 384
    """Number of rows in its embedding of token ids."""
    experts: int | None = None
    layer: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of its layer specification."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of a layer's weights -> those in a checkpoint, since TransformerEngine's layers
    fuse norms.
    """


GATED = {
    **{
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
    },
    **{"normalization": "RMSNorm", "ffn_hidden_size": 48},
}
LLAMA = f"model=llama_tiny {WORDS} model.ffn_hidden_size=48 model.num_query_groups=2"
MIXTRAL = (
    f"model=mixtral_tiny {WORDS} model.ffn_hidden_size=48 model.num_query_groups=2"
    " model.moe.ffn_hidden_size=48"
)
LATENT = (
    f"model=llama_tiny {WORDS} model.ffn_hidden_size=48 model.num_query_groups=null"
    " model.qk_layernorm=true "
    "+model.mla={q_lora_rank:24,kv_lora_rank:16,qk_head_dim:8,qk_pos_emb_head_dim:8,v_head_dim:8}"
)
MIXTRAL_CONFIG = {
    **GATED,
    **{
        "num_query_groups": 2,
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 48,
        "moe_router_topk": 2,
    },
}
LATENT_LAYER = {"multi_latent_attention": True, "qk_layernorm": True}
LATENT_CONFIG = {
    **GATED,
    **{"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"},
    **{
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 8,
    },
}


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


CASES = {
    "grouped queries, gated": Case(LLAMA, {**GATED, "num_query_groups": 2}),
    "tied, another padding": Case(
        f"{LLAMA} model.tie_word_embeddings=true",
        {**GATED, "num_query_groups": 2},
        tied=True,
        rows=512,
    ),
    "untied, less padding": Case(LLAMA, {**GATED, "num_query_groups": 2}, rows=304),
    "layer norms, biases": Case(
        f"model=gpt2 {WORDS} model.ffn_hidden_size=48 model.max_position_embeddings=64",
        {"ffn_hidden_size": 48, "add_bias_linear": True, "activation_func": _gelu},
        tied=True,
    ),
    "experts": Case(
        MIXTRAL,
        MIXTRAL_CONFIG,
        experts=4,
    ),
    "latent attention": Case(LATENT, LATENT_CONFIG, layer=LATENT_LAYER),
    "latent attention, fused norms": Case(
        LATENT,
        LATENT_CONFIG,
        layer=LATENT_LAYER,
        renamed={
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        },
    ),
    "experts, fused norms": Case(
        MIXTRAL, MIXTRAL_CONFIG, experts=4, renamed={"pre_mlp_layernorm.": "pre_mlp_layernorm."}
    ),
}


def build(case: Case, seed: int) -> Any:
    """Build a `GPTModel` with random weights and norms, on one rank or with tensor parallelism on
    all.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        model_parallel_cuda_manual_seed(1)
    kind = MLATransformerConfig if case.config.get("multi_latent_attention") else TransformerConfig
    ranks = dist.get_world_size()
    config = kind(
        **SIZES, **case.config, use_cpu_initialization=True, tensor_model_parallel_size=ranks
    )
    spec = get_gpt_layer_local_spec(
        num_experts=case.experts,
        moe_grouped_gemm=False,
        normalization=config.normalization,
        **case.layer,
    )
    if case.layer:  # its own attention does not know the widths of MLA, and has no weights
        from megatron.core.transformer.identity_op import IdentityOp

        spec.submodules.self_attention.submodules.core_attention = IdentityOp
    spec.submodules.sharded_state_dict_keys_map = {
        **spec.submodules.sharded_state_dict_keys_map,
        **case.renamed,
    }
    learned = "gpt2" in case.words
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=case.rows,
        max_sequence_length=64,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="learned_absolute" if learned else "rope",
    )
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            split = getattr(parameter, "tensor_model_parallel", False)
            torch.manual_seed(seed * 1000 + number + (100 * dist.get_rank() if split else 0))
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def alone(fn: Callable[[], Any]) -> Any:
    """Return `fn()` of a process of its own, the only rank of a gloo world."""
    return run_ranks(1, fn)[0]


def save(model: Any, folder: Path, metadata: Metadata = None) -> None:
    """Save weights as megatron-core does, with the other files that Megatron-LM saves."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # of this process: a manager's takes seconds to start
    filesystem_async._results_queue = queue.Queue()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it forks writers
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({**state_of(model, metadata), **_beside_weights()}, str(folder))


def _beside_weights() -> dict[str, Any]:
    from argparse import Namespace

    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    place = (dist.get_rank(),), (dist.get_world_size(),)
    moments = torch.ones(2, 3)
    kept = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    return {
        "args": Namespace(rotary_base=10000, add_bias_linear=None, data_path=["a"], hidden_size=32),
        "iteration": 100,
        "moments": ShardedTensor.from_rank_offsets(
            kept, moments, (0, dist.get_rank(), dist.get_world_size())
        ),
        "generators": ShardedObject("rng_state", {"seed": 3}, place[1], place[0]),
    }


def load(model: Any, folder: Path, metadata: Metadata = None) -> set[str]:
    """Load weights as megatron-core does; return the names that it does not request."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    every = StrictHandling.RETURN_ALL
    loaded, unknown, lacking = dist_checkpointing.load(
        state_of(model, metadata), str(folder), strict=every
    )
    assert not lacking, lacking
    model.load_state_dict({k: v for k, v in loaded.items() if k in model.state_dict()})
    return set(unknown)


def state_of(model: Any, metadata: Metadata = None) -> dict[str, Any]:
    """Return its sharded state."""
    found: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    return found


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield its parameters."""
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
