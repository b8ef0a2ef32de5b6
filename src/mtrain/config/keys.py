"""Every key there is, the ones near a misspelt one, and the names other systems use for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mtrain.config.intended import as_key
from mtrain.config.run import GROUPS, RunConfig
from mtrain.config.unmapped import UNMAPPED

FOREIGN = {
    "tensor_model_parallel_size": "parallel.tp",
    "tensor_parallel": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "pipeline_parallel": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "virtual_pipeline_model_parallel_size": "parallel.vpp",
    "num_virtual_stages_per_pipeline_rank": "parallel.vpp",
    "context_parallel_size": "parallel.cp",
    "context_parallel": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_parallel": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "use_distributed_optimizer": "parallel.distributed_optimizer",
    "world_size": "parallel.ranks",
    "num_gpus": "parallel.ranks",
    "gpus_per_node": "cluster.devices_per_node",
    "nproc_per_node": "cluster.devices_per_node",
    "num_nodes": "cluster.nodes",
    "nnodes": "cluster.nodes",
    "num_hidden_layers": "model.num_layers",
    "n_layers": "model.num_layers",
    "n_layer": "model.num_layers",
    "encoder_num_layers": "model.num_layers",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "intermediate_size": "model.ffn_hidden_size",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "num_key_value_heads": "model.num_query_groups",
    "n_kv_heads": "model.num_query_groups",
    "head_dim": "model.kv_channels",
    "padded_vocab_size": "model.vocab_size",
    "n_positions": "model.max_position_embeddings",
    "rms_norm_eps": "model.layernorm_epsilon",
    "layer_norm_eps": "model.layernorm_epsilon",
    "norm_epsilon": "model.layernorm_epsilon",
    "norm_eps": "model.layernorm_epsilon",
    "rope_theta": "model.rotary_base",
    "partial_rotary_factor": "model.rotary_percent",
    "rope_scaling": "model.rope_scaling_factor",
    "hidden_act": "model.activation",
    "activation_func": "model.activation",
    "attention_bias": "model.add_qkv_bias",
    "qk_norm": "model.qk_layernorm",
    "initializer_range": "model.init_method_std",
    "untie_embeddings_and_output_weights": "model.tie_word_embeddings",
    "share_embeddings_and_output_weights": "model.tie_word_embeddings",
    "num_moe_experts": "model.moe.num_experts",
    "num_local_experts": "model.moe.num_experts",
    "n_routed_experts": "model.moe.num_experts",
    "num_experts_per_tok": "model.moe.router_topk",
    "moe_router_topk": "model.moe.router_topk",
    "moe_ffn_hidden_size": "model.moe.ffn_hidden_size",
    "moe_intermediate_size": "model.moe.ffn_hidden_size",
    "moe_shared_expert_intermediate_size": "model.moe.shared_expert_intermediate_size",
    "moe_aux_loss_coeff": "model.moe.aux_loss_coeff",
    "router_aux_loss_coef": "model.moe.aux_loss_coeff",
    "moe_z_loss_coeff": "model.moe.z_loss_coeff",
    "moe_token_dispatcher_type": "model.moe.token_dispatcher_type",
    "first_k_dense_replace": "model.moe.first_dense_layers",
    "n_group": "model.moe.router_num_groups",
    "topk_group": "model.moe.router_group_topk",
    "routed_scaling_factor": "model.moe.router_topk_scaling_factor",
    "qk_nope_head_dim": "model.mla.qk_head_dim",
    "qk_rope_head_dim": "model.mla.qk_pos_emb_head_dim",
    "lr_decay_style": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "lr_decay_iters": "optim.decay_iters",
    "lr_warmup_iters": "optim.warmup_iters",
    "warmup_steps": "optim.warmup_iters",
    "lr_wsd_decay_iters": "optim.wsd_decay_iters",
    "lr_wsd_decay_style": "optim.wsd_decay_style",
    "learning_rate": "optim.lr",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_eps": "optim.eps",
    "adam_epsilon": "optim.eps",
    "sgd_momentum": "optim.momentum",
    "max_grad_norm": "optim.clip_grad",
    "grad_clip": "optim.clip_grad",
    "optimizer": "optim.name",
    "max_steps": "trainer.train_iters",
    "train_steps": "trainer.train_iters",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "eval_steps": "trainer.eval_interval",
    "exit_interval": "trainer.train_iters",
    "data_path": "data.path",
    "tokenizer_model": "data.tokenizer",
    "sequence_length": "data.seq_length",
    "encoder_seq_length": "data.seq_length",
    "max_seq_len": "data.seq_length",
    "params_dtype": "precision.dtype",
    "fp8_format": "precision.fp8",
    "fp4_format": "precision.fp4",
    "no_fp8_wgrad": "precision.fp8_wgrad",
    "train_data_path": "data.blend",
    "torch_dtype": "precision.dtype",
    "accumulate_allreduce_grads_in_fp32": "precision.grad_reduce_in_fp32",
    "min_scale": "precision.min_loss_scale",
    "save_steps": "checkpoint.save_interval",
    "load": "checkpoint.resume",
    "deterministic_mode": "trainer.deterministic",
    "bucket_size": "parallel.ddp_bucket_size",
    "apply_layernorm_1p": "model.layernorm_zero_centered_gamma",
    "moe_input_jitter_eps": "model.moe.input_jitter_eps",
    "moe_router_force_load_balancing": "model.moe.router_force_load_balancing",
    "moe_shared_expert_gate": "model.moe.shared_expert_gate",
    "moe_flex_dispatcher_backend": "model.moe.flex_dispatcher_backend",
    "moe_router_padding_for_fp8": "model.moe.router_padding_for_quantization",
    "compute_capability": "cluster.sm",
    "log_interval": "log.interval",
    "logging_steps": "log.interval",
    "distributed_timeout_minutes": "trainer.timeout_s",
    "start_weight_decay": "optim.weight_decay",
    "end_weight_decay": "optim.weight_decay",
    "zero_stage": "parallel.distributed_optimizer",
    "attention_backend": "kernels.attention",
    "transformer_impl": "kernels.linear",
    "data_prefix": "data.path",
    "blend": "data.path",
}
"""Names of Megatron-LM flags and Hugging Face configuration keys -> the key here."""

OTHERWISE = {
    "untie_embeddings_and_output_weights": ", which says the opposite",
    "distributed_timeout_minutes": ", in seconds",
}
"""How a foreign name's value differs from that of the key here."""

DERIVED = {
    "data_parallel_size": "the data-parallel size is derived: ranks / (tp * pp * cp)",
    "dp": "the data-parallel size is derived: ranks / (tp * pp * cp); as a choice: parallel=tp2dp2",
    "data_parallel": "the data-parallel size is derived: ranks / (tp * pp * cp)",
    "num_microbatches": "micro-batches are derived: global_batch_size / (micro_batch_size * dp)",
    "gradient_accumulation_steps": "micro-batches are derived: global_batch_size / (micro_batch_size * dp)",
    "train_samples": "a run is as long as trainer.train_iters says: samples / trainer.global_batch_size",
    "betas": "two keys hold them: optim.beta1 and optim.beta2",
    "bf16": "the number format is one key: precision.dtype=bf16",
    "fp16": "the number format is one key: precision.dtype=fp16",
    "pipeline_dtype": "it follows from precision.dtype",
    **dict.fromkeys(
        (
            "bias_activation_fusion",
            "bias_swiglu_fusion",
            "bias_dropout_fusion",
            "apply_rope_fusion",
        ),
        "what is fused follows from the implementations that `kernels` names",
    ),
    "bias_gelu_fusion": "the form of gelu is model.activation=gelu (exact) or gelu_tanh, and what is fused follows",
    "fp8_param_gather": "weights are drawn, cut and saved in precision.dtype; only products are in 8 bits",
    "make_vocab_size_divisible_by": "the vocabulary is always padded to a multiple of 128",
}
"""Names that have no key here, and why."""


MERGE = "<<"
"""YAML's key for a mapping that is merged into another one. It is not read."""


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class inside `X`, `X | None`; None for a leaf."""
    if get_origin(annotation) in (Union, UnionType):
        inner = [a for a in get_args(annotation) if a is not NoneType]
        annotation = inner[0] if len(inner) == 1 else None
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


@cache
def schema_keys() -> dict[str, FieldInfo]:
    """Every leaf key by its dotted path, the recipe's words about itself included."""
    return {path: field for path, field in _all_keys().items() if section_in(field.annotation) is None}


@cache
def _all_keys() -> dict[str, FieldInfo]:
    out: dict[str, FieldInfo] = {}

    def walk(prefix: str, section: type[BaseModel]) -> None:
        for name, field in section.model_fields.items():
            path = f"{prefix}{name}"
            out[path] = field
            inner = section_in(field.annotation)
            if inner is not None:
                walk(f"{path}.", inner)

    walk("", RunConfig)
    return out


def field_of(path: str) -> FieldInfo | None:
    """The schema's field at `path`, sections included; None where there is none."""
    return _all_keys().get(path)


def choices_of(path: str) -> tuple[str, ...]:
    """The words that a key, an item of its list or a name in its table may be, where they are few; else empty."""
    field = field_of(path) or (field_of(path.rpartition(".")[0]) if path.rpartition(".")[2].isdigit() else None)
    return next(_words(field.annotation), ()) if field is not None else ()


def _words(annotation: Any) -> Iterator[tuple[str, ...]]:
    if get_origin(annotation) is Literal:
        yield get_args(annotation)
    for inner in get_args(annotation):
        yield from _words(inner)


def suggest(path: str) -> tuple[list[str], str]:
    """Keys that `path` may have meant, best first, and a sentence about it where there is something to say."""
    import difflib

    path = ".".join(part for part in as_key(path).split(".") if part != MERGE)
    if path in _all_keys():
        return [path], ""
    last = path.rpartition(".")[2].strip("_")
    if last in DERIVED:
        return [], DERIVED[last]
    if last in FOREIGN:
        return [FOREIGN[last]], f"{last} is called {FOREIGN[last]} here{OTHERWISE.get(last, '')}"
    keys = list(schema_keys())
    field = next((name for name in UNMAPPED if name.partition(".")[2] == last), None)
    if field is not None:
        why, text = UNMAPPED[field]
        return [], f"megatron-core's {field} has no key, it is {why}: {text}"
    same_word = [key for key in keys if key.rpartition(".")[2] == last and not key.startswith("recipe.")]
    if same_word:
        return sorted(same_word, key=lambda k: -difflib.SequenceMatcher(None, k, path).ratio())[:3], ""
    if "." not in path and (groups := difflib.get_close_matches(path, GROUPS, n=1, cutoff=0.6)):
        return groups, ""
    near = difflib.get_close_matches(path, keys, n=3, cutoff=0.75)
    words = {key.rpartition(".")[2]: key for key in keys}
    near += [words[w] for w in difflib.get_close_matches(last, list(words), n=2, cutoff=0.8)]
    if not near:
        foreign = difflib.get_close_matches(last, list(FOREIGN), n=1, cutoff=0.85)
        near += [FOREIGN[name] for name in foreign]
    return list(dict.fromkeys(near))[:3], ""
