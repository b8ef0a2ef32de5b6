"""What a family of models that ships does not have: keys that must stay as they are for it, and its
own section.

A family that reads no such key, or of which megatron-core or this system cannot do what the key
says, names it here; a rule refuses another value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Only:
    """The values that a key has for a family."""

    key: str
    values: tuple[Any, ...]
    """The first one is offered in place of another."""
    why: str
    """As it stands behind a value in a message."""
    also: tuple[tuple[str, Any], ...] = ()
    """Keys that go with it, and what they are then."""


_NO_ADAPTERS = "adapters are of decoder-only transformers"
_WHOLE_MODEL = Only(
    "peft.kind",
    (None,),
    _NO_ADAPTERS,
    tuple((f"peft.{key}", None) for key in ("r", "alpha", "target")),
)
SECTIONS = {
    "bert": "model.bert",
    "t5": "model.t5",
    "llava": "model.llava",
    "hybrid": "model.hybrid",
}
"""Family -> the section of its own keys, which no other shipped family may have."""

_NO_NORMS_ON_SUMS = Only(
    "model.norm_placement",
    ("pre", "post", "pre_and_post"),
    "norms on the sum are of the family bert",
)
_NOT_BERT = "is no part of BERT"
_BERT_MODEL = (
    Only(
        "model.norm_placement",
        ("post_residual", "pre"),
        "BERT has its norms on the sum with the residual stream, and Megatron's BERT before"
        " attention and MLP",
    ),
    Only("model.normalization", ("LayerNorm",), "BERT's norms have a mean and a bias"),
    Only("model.activation", ("gelu", "gelu_tanh"), "BERT's MLP and its head have a gelu"),
    Only(
        "model.position_embedding_type",
        ("learned_absolute",),
        "BERT adds an embedding of each position",
    ),
    Only("model.add_bias_linear", (True,), "every linear layer of BERT has a bias"),
    Only(
        "model.tie_word_embeddings", (True,), "BERT's output layer shares the embedding's weights"
    ),
    *(
        Only(f"model.{key}", (off,), _NOT_BERT)
        for off, keys in (
            (
                None,
                (
                    "num_query_groups kv_channels moe mla mtp_num_layers rope_scaling"
                    " rope_scaling_factor window_size"
                ),
            ),
            (None, "linear_attention mup"),
            (None, "softmax_scale attn_logit_softcapping final_logit_softcapping"),
            (False, "parallel_residual add_qkv_bias qk_layernorm qk_l2_norm scale_embedding"),
            (False, "layernorm_zero_centered_gamma attention_output_gate"),
            ("vanilla", "softmax_type"),
        )
        for key in keys.split()
    ),
)
_WHOLE = "a token of an encoder sees those before and behind it, and samples are whole windows"
_ENCODER_RUN = (
    _WHOLE_MODEL,
    Only(
        "parallel.cp",
        (1,),
        "the sequence of an encoder is not sharded over ranks: its first token is pooled",
    ),
    Only("parallel.hybrid_context_parallel", (False,), _WHOLE),
    Only("data.packed", (False,), _WHOLE),
    Only("trainer.sample_tokens", (0,), "it continues no text"),
)

_STAGES = (
    "megatron-core hands one tensor on from stage to stage, and every layer of a decoder needs that"
    " of the encoder too"
)
_NOT_T5 = "is no part of T5"
_T5_MODEL = (
    Only("model.normalization", ("RMSNorm",), "T5's norms have neither a mean nor a bias"),
    Only("model.norm_placement", ("pre",), "T5 has its norms before attention and MLP"),
    Only("model.position_embedding_type", ("relative",), "T5 has a bias of attention by distance"),
    Only("model.softmax_type", ("vanilla",), _NOT_T5),
    Only(
        "model.init_method_std",
        (0.02,),
        "model.t5.initializer_factor says how T5's weights are drawn",
    ),
    Only(
        "model.embedding_init_method_std",
        (None,),
        "model.t5.initializer_factor says how T5's weights are drawn",
    ),
    *(
        Only(f"model.{key}", (off,), _NOT_T5)
        for off, keys in (
            (False, "parallel_residual add_bias_linear add_qkv_bias add_proj_bias add_mlp_bias"),
            (False, "qk_layernorm qk_l2_norm scale_embedding"),
            (
                None,
                (
                    "num_query_groups moe mla mtp_num_layers rope_scaling rope_scaling_factor"
                    " window_size"
                ),
            ),
            (None, "linear_attention mup"),
            (False, "attention_output_gate"),
            (None, "attn_logit_softcapping final_logit_softcapping"),
        )
        for key in keys.split()
    ),
)
_WHOLE_PAIRS = "biases by distance and cross attention are made for whole sequences"
_UNTRIED = "encoder-decoders have weights in 16 or 32 bits"
_T5_RUN = (
    _WHOLE_MODEL,
    Only("parallel.pp", (1,), _STAGES),
    Only("parallel.vpp", (1,), _STAGES),
    Only("parallel.cp", (1,), _WHOLE_PAIRS),
    Only("parallel.hybrid_context_parallel", (False,), _WHOLE_PAIRS),
    Only(
        "parallel.recompute.method",
        ("uniform", None),
        "biases by distance are of all layers: all are computed again",
    ),
    Only("precision.fp8", (None,), _UNTRIED),
    Only("precision.fp4", (None,), _UNTRIED),
    Only("data.packed", (False,), "spans are left out of whole windows"),
    Only("data.eod_mask_loss", (False,), "every token that is left out counts"),
    Only("trainer.sample_tokens", (0,), "it continues no text"),
)

_LLAMA = "LLaVA-1.5's language model is a Llama"
_IMAGES = "the sequence is not sharded over ranks: an image may lie in the parts of two"
_LLAVA = (
    _NO_NORMS_ON_SUMS,
    _WHOLE_MODEL,
    Only("model.moe", (None,), f"{_LLAMA}, without experts"),
    Only("model.mla", (None,), f"{_LLAMA}, without MLA"),
    Only("model.linear_attention", (None,), f"{_LLAMA}, with softmax attention"),
    Only("model.mup", (None,), f"{_LLAMA}, and a vision tower has a width of its own"),
    Only("model.attention_output_gate", (False,), f"{_LLAMA}, whose attention has no gate"),
    Only(
        "model.mtp_num_layers", (None,), "MTP layers embed tokens by themselves, and know no images"
    ),
    Only(
        "model.scale_embedding",
        (False,),
        f"{_LLAMA}; the scale would not be that of patch features",
    ),
    Only("model.position_embedding_type", ("rope",), f"{_LLAMA}, whose positions are rotary"),
    Only("parallel.cp", (1,), _IMAGES),
    Only("parallel.hybrid_context_parallel", (False,), _IMAGES),
    Only(
        "parallel.fsdp",
        ("none",),
        "weights that are not trained, such as those of layers behind the features, cannot be"
        " sharded by FSDP; parallel.distributed_optimizer=true shards the state of the others",
        (("parallel.fsdp_sharding", None),),
    ),
    Only("data.packed", (False,), "a sample is one text with its images, and is padded"),
    Only("data.eod_mask_loss", (False,), "a sample is one text, and nothing follows its end"),
    Only("trainer.sample_tokens", (0,), "text about an image is not generated yet"),
)
_NOT_HYBRID = "is no part of a hybrid here: its layers are those of Nemotron-H and Granite 4"
_STATES = (
    "mixers exchange their heads among the ranks of parallel.cp, not among those of each document"
)
_HYBRID = (
    Only("model.norm_placement", ("pre",), "each layer of a hybrid has its norm in front"),
    Only(
        "model.position_embedding_type",
        ("none", "rope", "learned_absolute"),
        "a bias of attention by distance is of the family t5",
    ),
    Only("model.softmax_type", ("vanilla",), _NOT_HYBRID),
    *(
        Only(f"model.{key}", (off,), _NOT_HYBRID)
        for off, keys in (
            (
                False,
                (
                    "parallel_residual add_bias_linear add_qkv_bias add_proj_bias add_mlp_bias"
                    " scale_embedding"
                ),
            ),
            (False, "qk_l2_norm rotary_interleaved"),
            (
                None,
                (
                    "mtp_num_layers rope_scaling rope_scaling_factor no_rope_freq rotary_base_local"
                    " window_size"
                ),
            ),
            (None, "mup"),
            (None, "attn_logit_softcapping final_logit_softcapping"),
        )
        for key in keys.split()
    ),
    Only("parallel.hybrid_context_parallel", (False,), _STATES),
    Only(
        "precision.fp8_recipe",
        (None, "tensorwise", "blockwise"),
        "linear layers of hybrids are tried with ours alone",
    ),
    Only("precision.fp4", (None,), "hybrids have weights in 8, 16 or 32 bits"),
)
_ONE_BY_ONE = "attention and MLP of a layer are built as layers of their own"
BUILDER: tuple[Only, ...] = (
    Only(
        "model.parallel_residual",
        (False,),
        f"{_ONE_BY_ONE}, and the one reads what the other has added",
    ),
    Only(
        "model.mtp_num_layers",
        (None,),
        "layers of multi-token prediction are built behind those of a GPTModel",
        (("model.mtp_loss_scaling_factor", None), ("model.mtp_detach_heads", False)),
    ),
    Only(
        "parallel.recompute.granularity",
        ("none", "selective"),
        f"{_ONE_BY_ONE}, and no two of them are computed again together",
        tuple(
            (f"parallel.recompute.{key}", off)
            for key, off in (
                ("method", None),
                ("num_layers", None),
                ("distribute_saved_activations", False),
            )
        ),
    ),
    Only(
        "parallel.hybrid_context_parallel",
        (False,),
        "its rotary positions are made for one group of context-parallel ranks",
        (("parallel.max_seqlen_per_dp_cp_rank", None),),
    ),
)
"""What `model.builder=hybrid` is limited to, in the family gpt."""
_CHOSEN = "sparse attention is not proven with it"
_ALL_PAIRS = "an indexer chooses keys by a mask of each pair in a sequence"
SPARSE_ATTENTION: tuple[Only, ...] = (
    Only("model.add_bias_linear", (False,), "megatron-core has it without biases since 0.19"),
    Only("model.softmax_type", ("vanilla",), _CHOSEN),
    Only("model.attn_logit_softcapping", (None,), _CHOSEN),
    Only("model.attention_dropout", (0.0,), _CHOSEN),
    Only(
        "model.window_size",
        (None,),
        "an indexer chooses keys, not their distance",
        (("model.window_attn_skip_freq", None),),
    ),
    Only("parallel.cp", (1,), f"{_ALL_PAIRS} that one rank has whole", (("parallel.ranks", None),)),
    Only("parallel.hybrid_context_parallel", (False,), f"{_ALL_PAIRS} that one rank has whole"),
    Only(
        "parallel.fsdp",
        ("none",),
        "an indexer is not proven with FSDP's weights; parallel.distributed_optimizer=true shards"
        " the state",
        (("parallel.fsdp_sharding", None), ("parallel.hsdp_replicas", 1)),
    ),
    Only("data.packed", (False,), f"{_ALL_PAIRS}, and knows no documents in it"),
    Only(
        "trainer.cuda_graph_impl", ("none",), "what an indexer chooses is not tried in CUDA graphs"
    ),
    Only(
        "parallel.activation_offload.modules",
        (None,),
        "what an indexer keeps is not tried in host memory",
    ),
    Only(
        "peft.kind",
        (None,),
        "an indexer would stay as it is, and the attention that it was taught would not",
        tuple((f"peft.{key}", None) for key in ("r", "alpha", "target")),
    ),
)
"""What `model.dsa` is limited to."""
ONLY: dict[str, tuple[Only, ...]] = {
    "gpt": (
        Only(
            "model.position_embedding_type",
            ("rope", "learned_absolute", "none"),
            "a bias of attention by distance is of the family t5",
        ),
        _NO_NORMS_ON_SUMS,
    ),
    "bert": (*_BERT_MODEL, *_ENCODER_RUN),
    "t5": (*_T5_MODEL, *_T5_RUN),
    "llava": _LLAVA,
    "hybrid": _HYBRID,
}
"""Family -> what its keys are limited to."""


def limited(family: str, key: str) -> Only | None:
    """What a key of a family is limited to, if it is."""
    return next((only for only in ONLY.get(family, ()) if only.key == key), None)
