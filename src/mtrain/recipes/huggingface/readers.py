"""Readers of a Hugging Face `config.json` for keys that are more than a copy: activations, biases,
experts, attention.
"""

from __future__ import annotations

from mtrain.recipes.huggingface.config_file import ConfigFile

_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
UNGATED_WORDS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(_TANH, "gelu_tanh"),
    "relu2": "squared_relu",
}
"""Hugging Face's activations of an MLP without a gate -> ours."""
GATED_WORDS = {
    **dict.fromkeys(("silu", "swish"), "swiglu"),
    **dict.fromkeys(("gelu", "gelu_python"), "geglu"),
    **dict.fromkeys(_TANH, "geglu_tanh"),
    "quick_gelu": "quick_geglu",
}
"""Hugging Face's activations of a gate -> ours."""


def _activation(file: ConfigFile, key: str, words: dict[str, str]) -> None:
    kind = file.get(key)
    if isinstance(kind, str) and kind in words:
        file.out["model.activation"] = words[kind]
        return
    file.out["model.activation"] = next(iter(words.values()))
    file.refuse(key, "not supported", f"changes the numbers: there are {', '.join(words)}")


def gate(file: ConfigFile) -> None:
    """Read the activation of a gate."""
    _activation(file, "hidden_act", GATED_WORDS)


def llama_biases(file: ConfigFile) -> None:
    """Read biases in attention, in the MLP or in both; both are one key here."""
    attention = bool(file.get("attention_bias", False))
    mlp = bool(file.get("mlp_bias", False))
    _biases(file, attention, mlp)


def attention_biases(file: ConfigFile) -> None:
    """Read biases in all projections of attention, or in no projection (Qwen3)."""
    _biases(file, bool(file.get("attention_bias", False)), mlp=False)


def _biases(file: ConfigFile, attention: bool, mlp: bool) -> None:
    both = attention and mlp
    file.out |= {
        "model.add_bias_linear": both,
        "model.add_qkv_bias": attention and not both,
        "model.add_proj_bias": attention and not both,
        "model.add_mlp_bias": mlp and not both,
    }


def no_attention_bias(file: ConfigFile) -> None:
    """Refuse biases, which OLMo 2 and Gemma do not have."""
    file.must(
        "attention_bias",
        (False,),
        "changes the numbers: biases only in query, key and value, or everywhere",
    )


def gemma_attention(file: ConfigFile) -> None:
    """Read the divisor of attention scores and the activation of Gemma 2 and 3."""
    _activation(file, "hidden_activation", GATED_WORDS)
    divisor = file.get("query_pre_attn_scalar")
    file.out["model.softmax_scale"] = (
        None if divisor == file.get("head_dim") else float(divisor) ** -0.5
    )
    file.must(
        "use_bidirectional_attention", (False,), "changes the numbers: a token sees those before it"
    )
    file.must(
        "sliding_window_size",
        (file.get("sliding_window"),),
        "changes the numbers: sliding_window is another width",
    )
    no_attention_bias(file)


def uncapped_scores(file: ConfigFile) -> None:
    """Note the cap of Gemma 2, a key that Gemma 3's class has and does not use."""
    file.idle(("attn_logit_softcapping",), "scores of this family are not capped")


def _experts(file: ConfigFile, count: str, width: str) -> int:
    """Read the keys of every mixture of experts; return the number of experts per token."""
    topk: int = file.get("num_experts_per_tok")
    file.out |= {
        "model.moe.num_experts": file.get(count),
        "model.moe.router_topk": topk,
        "model.moe.ffn_hidden_size": file.get(width),
    }
    return topk


def _balancing(file: ConfigFile, topk: int, dense: int = 0) -> None:
    """Convert Hugging Face's coefficient of the balancing loss to `model.moe.aux_loss_coeff`, to
    six digits.

    `dense` layers have no experts, and do not count in Hugging Face's mean.
    """
    theirs = float(file.get("router_aux_loss_coef"))
    layers = max(1, file.layers - dense)
    ours = float(f"{theirs * topk / layers:.6g}")
    file.out["model.moe.aux_loss_coeff"] = ours
    if theirs:
        text = (
            f"is {ours!r} here: their loss averages {layers} layers and counts {topk} choices, ours"
            " adds layers up"
        )
        file.refuse("router_aux_loss_coef", "derived here", text)


def mixtral_experts(file: ConfigFile) -> None:
    """Read the experts of Mixtral, as wide as a dense MLP."""
    _balancing(file, _experts(file, "num_local_experts", "intermediate_size"))
    text = (
        "changes the numbers: model.moe.input_jitter_eps reaches only the router, and theirs also"
        " the experts"
    )
    file.must("router_jitter_noise", (0,), text)
    refuse_single_expert(file)


def qwen_experts(file: ConfigFile) -> None:
    """Read the experts of Qwen3-MoE, in all layers or after dense ones."""
    topk = _experts(file, "num_local_experts", "moe_intermediate_size")
    file.out["model.moe.router_pre_softmax"] = not file.get("norm_topk_prob", False)
    if file.get("norm_topk_prob", False):
        refuse_single_expert(file)
    step = file.get("decoder_sparse_step")
    dense = set(file.get("mlp_only_layers", []))
    layers = range(file.layers)
    without = [i for i in layers if i in dense or (i + 1) % step]
    file.out["model.moe.first_dense_layers"] = len(without)
    _balancing(file, topk, len(without))
    if without != list(layers[: len(without)]):
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        file.refuse(
            key,
            "not supported",
            "changes the numbers: dense layers come first, all others have experts",
        )


def qwen2_experts(file: ConfigFile) -> None:
    """Read the experts of Qwen2-MoE, with gated shared ones."""
    qwen_experts(file)
    shared_expert(file)
    file.out["model.add_qkv_bias"] = file.get("qkv_bias")


def shared_expert(file: ConfigFile) -> None:
    """Read an expert that every token visits, with a gate (Qwen2-MoE, Qwen3-Next)."""
    shared = file.get("shared_expert_intermediate_size") or None
    file.out |= {
        "model.moe.shared_expert_intermediate_size": shared,
        "model.moe.shared_expert_gate": shared is not None,
    }


def minimax_experts(file: ConfigFile) -> None:
    """Read the experts of MiniMax-M2: scores are a sigmoid, chosen with a bias, and normalised."""
    _experts(file, "num_local_experts", "intermediate_size")
    file.out |= {
        "model.moe.router_score_function": "sigmoid",
        "model.moe.router_enable_expert_bias": True,
        "model.moe.router_load_balancing_type": "none",
        "model.moe.aux_loss_coeff": 0.0,
    }
    for key, (allowed, text) in {
        "scoring_func": ("sigmoid", "scores of this family are a sigmoid"),
        "use_routing_bias": (True, "experts of this family are chosen with a bias"),
        "use_qk_norm": (True, "queries and keys of this family have norms"),
        "qk_norm_type": ("per_layer", "these norms are over all heads of a layer"),
        "shared_intermediate_size": (0, "this family has no shared experts"),
        "attn_type_list": ([1] * file.layers, "every layer has softmax attention"),
        "sliding_window": (None, "no layer has a window"),
        "router_jitter_noise": (
            0,
            "model.moe.input_jitter_eps reaches only the router, and theirs also the experts",
        ),
        "output_router_logits": (False, "only the bias balances experts here"),
    }.items():
        file.must(key, (allowed,), f"changes the numbers: {text}")
    refuse_single_expert(file)
    file.idle(
        ("router_aux_loss_coef",),
        "is read only with output_router_logits; the bias balances experts",
    )
    file.idle(
        ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        "is of layers that transformers does not build",
    )


def gpt_oss_experts(file: ConfigFile) -> None:
    """Read the experts of GPT-OSS, with clamped gates and biases; its first files hold the number
    of experts twice.
    """
    if file.get("experts_per_token", file.get("num_experts_per_tok")) != file.get(
        "num_experts_per_tok"
    ):
        file.refuse(
            "experts_per_token", "no effect", "is read by no layer of GptOss in transformers"
        )
    file.must(
        "hidden_act",
        ("silu", "swish"),
        "changes the numbers: the gate of this family is x sigmoid(1.702 x)",
    )
    file.must(
        "swiglu_alpha",
        (1.702,),
        "changes the numbers: the gate of this family is x sigmoid(1.702 x)",
    )
    file.must(
        "attention_bias", (True,), "changes the numbers: biases in all linear layers of this family"
    )
    file.out["model.activation_func_clamp_value"] = float(file.get("swiglu_limit"))
    _balancing(file, _experts(file, "num_local_experts", "intermediate_size"))
    refuse_single_expert(file)


def _experts_after_dense_layers(file: ConfigFile) -> None:
    """Read the experts of DeepSeek and its successors: with shared ones, and after dense layers."""
    shared = file.number("n_shared_experts", 0) * file.number("moe_intermediate_size")
    balancing = "seq_aux_loss" if file.get("seq_aux") else "aux_loss"
    _experts(file, "n_routed_experts", "moe_intermediate_size")
    file.out |= {
        "model.moe.shared_expert_intermediate_size": shared or None,
        "model.moe.first_dense_layers": file.get("first_k_dense_replace"),
        "model.moe.router_topk_scaling_factor": float(file.get("routed_scaling_factor")),
        "model.moe.router_load_balancing_type": balancing,
        "model.moe.aux_loss_coeff": float(file.get("aux_loss_alpha")),
    }
    if "aux_loss_alpha" not in file.given:
        report = file.family.absent["aux_loss_alpha"]
        file.notes.append(
            f"aux_loss_alpha is not set; model.moe.aux_loss_coeff is {report}, of the model's"
            " report"
        )
    file.must(
        "moe_layer_freq", (1,), "changes the numbers: every layer after the dense ones has experts"
    )


_LATENT_EPSILON = 1e-6
"""The epsilon of MLA's norms in both DeepSeek families, whatever that of the other norms."""


def _latent(file: ConfigFile) -> None:
    """Read MLA and the shape of the experts of both DeepSeek families."""
    _experts_after_dense_layers(file)
    file.out |= {
        "model.num_query_groups": None,
        "model.mla.q_lora_rank": file.get("q_lora_rank"),
        "model.mla.kv_lora_rank": file.get("kv_lora_rank"),
        "model.mla.qk_head_dim": file.get("qk_nope_head_dim"),
        "model.mla.qk_pos_emb_head_dim": file.get("qk_rope_head_dim"),
        "model.mla.v_head_dim": file.get("v_head_dim"),
    }
    heads = file.get("num_attention_heads")
    file.must("num_key_value_heads", (heads,), "changes the numbers: MLA has no groups")
    file.must("attention_bias", (False,), "changes the numbers: MLA has no biases here")
    file.must("mlp_bias", (False,), "changes the numbers: biases in all linear layers or in none")
    if file.get("rms_norm_eps") != _LATENT_EPSILON:
        file.out["model.mla.layernorm_epsilon"] = _LATENT_EPSILON


def _groups(file: ConfigFile, best: int) -> None:
    """Read group-limited routing, where a group's score is the sum of its `best` scores; one group
    means no groups.
    """
    many = file.get("n_group", 1) > 1
    file.out |= {
        "model.moe.router_num_groups": file.get("n_group") if many else None,
        "model.moe.router_group_topk": file.get("topk_group") if many else None,
        "model.moe.router_group_score_topk": best if many else None,
    }
    if not many:
        file.must("topk_group", (1,), "changes the numbers: of one group of experts, one is chosen")


def refuse_single_expert(file: ConfigFile) -> None:
    """Refuse one expert per token with normalised scores: megatron-core builds no such router."""
    if file.get("num_experts_per_tok") == 1:
        text = (
            "the score of one chosen expert is 1 there, whatever the router computes, so that no"
            " gradient reaches it; use two experts or more, or one whose score is not normalised"
        )
        file.refuse("num_experts_per_tok", "not supported", text)


def deepseek_v2_experts(file: ConfigFile) -> None:
    """Read experts whose scores are a softmax; a group's score is its best one."""
    _latent(file)
    file.out |= {"model.moe.router_score_function": "softmax", "model.moe.router_pre_softmax": True}
    file.must(
        "scoring_func", ("softmax",), "changes the numbers: scores of this family are a softmax"
    )
    file.must(
        "norm_topk_prob",
        (False,),
        "changes the numbers: chosen scores of this family are not normalised",
    )
    file.must(
        "topk_method",
        ("greedy", "group_limited_greedy"),
        "changes the numbers: experts of this family are chosen by greedy or group_limited_greedy",
    )
    if file.get("topk_method") == "group_limited_greedy":
        _groups(file, 1)
    else:
        file.idle(("n_group", "topk_group"), "is read only with topk_method group_limited_greedy")


def _balanced_by_bias(file: ConfigFile) -> None:
    """Read experts whose scores are a sigmoid, chosen with a bias; a group's score is the sum of
    its two best.

    MTP layers follow the model's own.
    """
    _groups(file, 2)
    file.out |= {
        "model.moe.router_score_function": "sigmoid",
        "model.moe.router_enable_expert_bias": True,
        "model.mtp_num_layers": file.get("num_nextn_predict_layers", 0) or None,
    }
    file.must(
        "norm_topk_prob",
        (True,),
        "changes the numbers: chosen scores of this family are normalised",
    )
    refuse_single_expert(file)


def glm4_experts(file: ConfigFile) -> None:
    """Read GLM-4.5: experts of DeepSeek-V3, with grouped, biased, partly normed attention."""
    _experts_after_dense_layers(file)
    _balanced_by_bias(file)
    file.out |= {
        "model.add_qkv_bias": file.get("attention_bias"),
        "model.qk_layernorm": file.get("use_qk_norm"),
    }


def phi3_block(file: ConfigFile) -> None:
    """Refuse the dropout of Phi-3, which applies only to residuals."""
    text = (
        "changes the numbers: model.hidden_dropout applies to the embeddings too, and Phi-3's has"
        " no dropout there"
    )
    file.must("resid_pdrop", (0,), text)


def _computed_widths(file: ConfigFile) -> None:
    """Refuse a value, or null, that transformers puts in the place of one that it computed."""
    rotary = file.get("qk_rope_head_dim")
    declared = file.read_by.null if file.read_by else {}
    for key, width in {
        "head_dim": rotary,
        "qk_head_dim": rotary + file.get("qk_nope_head_dim"),
    }.items():
        if key not in declared and file.given.get(key, width) != width:
            file.refuse(
                key,
                "not supported",
                f"changes the numbers: {width} of qk_rope_head_dim and qk_nope_head_dim",
            )


def deepseek_v3_experts(file: ConfigFile) -> None:
    """Read MLA, and experts that a bias balances."""
    _latent(file)
    _balanced_by_bias(file)
    file.must(
        "scoring_func", ("sigmoid",), "changes the numbers: scores of this family are a sigmoid"
    )
    file.must(
        "topk_method",
        ("noaux_tc",),
        "changes the numbers: experts of this family are chosen with a bias",
    )
    _computed_widths(file)
    file.must(
        "rope_interleave", (True,), "changes the numbers: rotary pairs of MLA are neighbours here"
    )


def gpt2_block(file: ConfigFile) -> None:
    """Read GPT-2, whose configuration has its own names."""
    file.out["model.ffn_hidden_size"] = file.get("n_inner", 4 * file.get("n_embd", 0))
    _activation(file, "activation_function", UNGATED_WORDS)
    drops = {key: float(file.get(key)) for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")}
    file.out |= {
        "model.attention_dropout": drops["attn_pdrop"],
        "model.hidden_dropout": drops["resid_pdrop"],
    }
    if drops["embd_pdrop"] != drops["resid_pdrop"]:
        file.refuse(
            "embd_pdrop",
            "not supported",
            "changes the numbers: one rate for embeddings and residuals",
        )
    file.out["model.softmax_scale"] = None if file.get("scale_attn_weights", True) else 1.0
    file.must(
        "scale_attn_by_inverse_layer_idx",
        (False,),
        "changes the numbers: scores are not scaled by the layer",
    )
    file.must(
        "reorder_and_upcast_attn",
        (False,),
        "changes the rounding: scores are not multiplied in fp32",
    )


def neox_block(file: ConfigFile) -> None:
    """Read GPT-NeoX, where attention and MLP are parallel or in sequence."""
    _activation(file, "hidden_act", UNGATED_WORDS)
    file.out["model.parallel_residual"] = file.get("use_parallel_residual")
    file.out["model.hidden_dropout"] = float(file.get("hidden_dropout"))
    _biases(file, bool(file.get("attention_bias", True)), mlp=True)
