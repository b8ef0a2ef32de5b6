"""Readers of a Hugging Face `config.json` for keys that are more than a copy: activations, biases,
experts, attention.

Values that a family cannot have otherwise are in `families.json`.
"""

from __future__ import annotations

from mtrain.recipes.huggingface.config_file import ConfigFile

# one formula, under the names of its implementations in transformers
_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
UNGATED_WORDS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(_TANH, "gelu_tanh"),
    "relu2": "squared_relu",
}
"""Hugging Face's activations of an MLP without a gate -> mtrain's."""
GATED_WORDS = {
    **dict.fromkeys(("silu", "swish"), "swiglu"),
    **dict.fromkeys(("gelu", "gelu_python"), "geglu"),
    **dict.fromkeys(_TANH, "geglu_tanh"),
    "quick_gelu": "quick_geglu",
}
"""Hugging Face's activations of a gate -> mtrain's."""


def _activation(file: ConfigFile, key: str, words: dict[str, str]) -> None:
    kind = file.get(key)
    if isinstance(kind, str) and kind in words:
        file.out["model.activation"] = words[kind]
        return
    # any valid value, so that one pass reports the other problems too
    file.out["model.activation"] = next(iter(words.values()))
    file.differs(key, f"there are {', '.join(words)}")


def gate(file: ConfigFile) -> None:
    """Read the activation of a gate."""
    _activation(file, "hidden_act", GATED_WORDS)


def llama_biases(file: ConfigFile) -> None:
    """Read biases in attention, in the MLP or in both; both are one key here."""
    _biases(file, bool(file.get("attention_bias", False)), bool(file.get("mlp_bias", False)))


def attention_biases(file: ConfigFile) -> None:
    """Read biases in all projections of attention, or in no projection (Qwen3)."""
    _biases(file, bool(file.get("attention_bias", False)), mlp=False)


def _biases(file: ConfigFile, attention: bool, mlp: bool) -> None:
    # our key for all linear layers excludes the ones for a part of them
    both = attention and mlp
    file.out |= {
        "model.add_bias_linear": both,
        "model.add_qkv_bias": attention and not both,
        "model.add_proj_bias": attention and not both,
        "model.add_mlp_bias": mlp and not both,
    }


def gemma_attention(file: ConfigFile) -> None:
    """Read the divisor of attention scores and the activation of Gemma 2 and 3."""
    _activation(file, "hidden_activation", GATED_WORDS)
    divisor = file.get("query_pre_attn_scalar")
    # null spells the usual scale exactly, as a number would not
    file.out["model.softmax_scale"] = (
        None if divisor == file.get("head_dim") else float(divisor) ** -0.5
    )
    file.must(
        "sliding_window_size",
        (file.get("sliding_window"),),
        "changes the numbers: sliding_window is another width",
    )


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
    # six digits hide the rounding of the division, and a round number stays round
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
    refuse_single_expert(file)


def qwen_experts(file: ConfigFile) -> None:
    """Read the experts of Qwen3-MoE, in all layers or after dense ones."""
    topk = _experts(file, "num_local_experts", "moe_intermediate_size")
    file.out["model.moe.router_pre_softmax"] = not file.get("norm_topk_prob", False)
    # a score that is not normalised keeps its gradient even with one expert
    if file.get("norm_topk_prob", False):
        refuse_single_expert(file)
    step = file.get("decoder_sparse_step")
    dense = set(file.get("mlp_only_layers", []))
    layers = range(file.layers)
    # transformers counts layers from 1 for the step, and from 0 in the list
    without = [i for i in layers if i in dense or (i + 1) % step]
    file.out["model.moe.first_dense_layers"] = len(without)
    _balancing(file, topk, len(without))
    if without != list(layers[: len(without)]):
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        file.differs(key, "dense layers come first, all others have experts")


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
    file.must(
        "attn_type_list",
        ([1] * file.layers,),
        "changes the numbers: every layer has softmax attention",
    )
    refuse_single_expert(file)


def gpt_oss_experts(file: ConfigFile) -> None:
    """Read GPT-OSS's experts: clamped gates and biases; its first files count them twice."""
    # published files hold the number twice; transformers reads only num_experts_per_tok
    if file.get("experts_per_token", file.get("num_experts_per_tok")) != file.get(
        "num_experts_per_tok"
    ):
        file.refuse(
            "experts_per_token", "no effect", "is read by no layer of GptOss in transformers"
        )
    file.out["model.activation_func_clamp_value"] = float(file.get("swiglu_limit"))
    _balancing(file, _experts(file, "num_local_experts", "intermediate_size"))
    refuse_single_expert(file)


def _experts_after_dense_layers(file: ConfigFile) -> None:
    """Read the experts of DeepSeek and its successors: with shared ones, and after dense layers."""
    # shared experts are as wide as routed ones, and are one wide MLP here
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
    # published files may lack it, though the training had such a loss
    if "aux_loss_alpha" not in file.given:
        report = file.family.absent["aux_loss_alpha"]
        file.notes.append(
            f"aux_loss_alpha is not set; model.moe.aux_loss_coeff is {report}, of the model's"
            " report"
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
    # transformers builds the norms of latents without passing an epsilon
    if file.get("rms_norm_eps") != _LATENT_EPSILON:
        file.out["model.mla.layernorm_epsilon"] = _LATENT_EPSILON


def _groups(file: ConfigFile, best: int) -> None:
    """Read group-limited routing, a group scoring the sum of its `best` scores."""
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
    # the score of a group is that of its best expert
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
    refuse_single_expert(file)


def glm4_experts(file: ConfigFile) -> None:
    """Read GLM-4.5: experts of DeepSeek-V3, with grouped, biased, partly normed attention."""
    _experts_after_dense_layers(file)
    _balanced_by_bias(file)
    file.out |= {
        "model.add_qkv_bias": file.get("attention_bias"),
        "model.qk_layernorm": file.get("use_qk_norm"),
    }


def _computed_widths(file: ConfigFile) -> None:
    """Refuse a value, or null, that transformers puts in the place of one that it computed."""
    rotary = file.get("qk_rope_head_dim")
    declared = file.read_by.null if file.read_by else {}
    for key, width in {
        "head_dim": rotary,
        "qk_head_dim": rotary + file.get("qk_nope_head_dim"),
    }.items():
        if key not in declared and file.given.get(key, width) != width:
            file.differs(key, f"{width} of qk_rope_head_dim and qk_nope_head_dim")


def deepseek_v3_experts(file: ConfigFile) -> None:
    """Read MLA, and experts that a bias balances."""
    _latent(file)
    _balanced_by_bias(file)
    _computed_widths(file)


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
        file.differs("embd_pdrop", "one rate for embeddings and residuals")
    file.out["model.softmax_scale"] = None if file.get("scale_attn_weights", True) else 1.0


def neox_block(file: ConfigFile) -> None:
    """Read GPT-NeoX, where attention and MLP are parallel or in sequence."""
    _activation(file, "hidden_act", UNGATED_WORDS)
    file.out["model.parallel_residual"] = file.get("use_parallel_residual")
    file.out["model.hidden_dropout"] = float(file.get("hidden_dropout"))
    _biases(file, bool(file.get("attention_bias", True)), mlp=True)


def indexed_layers(file: ConfigFile) -> None:
    """Refuse layers of DeepSeek-V3.2 without an indexer, and dense MLPs that do not come first."""
    dense = min(int(file.get("first_k_dense_replace")), file.layers)
    text = "changes the numbers: every layer has an indexer, and dense MLPs come first"
    file.must("layer_types", (["indexed_attention"] * file.layers, None), text)
    mlps = ["dense"] * dense + ["sparse"] * (file.layers - dense)
    file.must("mlp_layer_types", (mlps, None), text)
    if file.get("q_lora_rank") is None:
        file.differs("q_lora_rank", "an indexer reads latent queries")


LINEAR_KEYS = (
    "num_key_heads",
    "num_value_heads",
    "key_head_dim",
    "value_head_dim",
    "conv_kernel_dim",
)
"""Keys of `model.linear_attention`; Hugging Face's have the prefix `linear_`."""


def linear_layers(count: int, every: int) -> list[str]:
    """Return Qwen3-Next's kind of each layer: softmax attention in every n-th one."""
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]


def linear_attention(file: ConfigFile) -> None:
    """Read the pattern of Qwen3-Next's layers, and the sizes of those with linear attention."""
    every = file.get("full_attention_interval")
    kinds = file.get("layer_types", linear_layers(file.layers, every))
    softmax = "full_attention"
    # without a softmax layer, any interval beyond the last layer means the same
    every = kinds.index(softmax) + 1 if softmax in kinds else max(every, len(kinds) + 1)
    if every < 2 or kinds != linear_layers(file.layers, every):
        key = "layer_types" if file.given.get("layer_types") else "full_attention_interval"
        file.differs(key, "linear attention is in all layers but every n-th here")
    # a smaller interval was refused above; the schema takes none
    file.out["model.linear_attention.freq"] = max(2, every)
    for key in LINEAR_KEYS:
        file.out[f"model.linear_attention.{key}"] = file.get(f"linear_{key}")


def qwen3_next_experts(file: ConfigFile) -> None:
    """Read the experts of Qwen3-MoE and a shared one, unless every layer is dense."""
    qwen_experts(file)
    shared_expert(file)
    # a section of experts that no layer has would be refused
    if file.out["model.moe.first_dense_layers"] >= file.layers:
        file.out = {
            key: value for key, value in file.out.items() if not key.startswith("model.moe.")
        }


def nemotron_block(file: ConfigFile) -> None:
    """Read the activation of Nemotron-3 and -4."""
    word = file.get("hidden_act")
    known = isinstance(word, str) and word in UNGATED_WORDS
    file.out["model.activation"] = UNGATED_WORDS[word] if known else "squared_relu"
    words = tuple(UNGATED_WORDS)
    file.must("hidden_act", words, f"changes the numbers: there are {', '.join(words)}")
    if file.given.get("partial_rotary_factor", 0) is None:
        file.differs("partial_rotary_factor", "transformers takes no null here")
