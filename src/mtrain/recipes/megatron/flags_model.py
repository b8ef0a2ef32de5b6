"""Megatron-LM's flags for the shape of the network.

Defaults are those of its argument parser: LayerNorm, gelu with biases, learned positions, tied
embeddings, dropout.
"""

from __future__ import annotations

import re
from typing import Any

from mtrain.config.messages.keys import choices_of
from mtrain.config.schema.run import RunConfig
from mtrain.models.bert.config import BertConfig
from mtrain.recipes.megatron.arguments import (
    Arguments,
    Draft,
    Entry,
    Values,
    conditional_switch,
    one,
    section,
    spelled,
    whole,
    words_of,
)
from mtrain.recipes.shell.arithmetic import pattern_of

ACTIVATIONS = {
    "--swiglu": "swiglu",
    "--squared-relu": "squared_relu",
    "--quick-geglu": "quick_geglu",
}
VARIANTS = {
    "gated_delta_net": ("model.linear_attention", "freq"),
    "dsa": ("model.dsa", "indexer_topk"),
}
"""Word of --experimental-attention-variant -> its section, and a key of the section."""
_SIDES = re.compile(r"[(\[]?\s*(-1|\d{1,9})\s*,\s*(?:-1|\d{1,9})\s*[)\]]?\Z")
"""The value of --window-size."""


def _activation(arguments: Arguments, draft: Draft) -> Draft:
    given = [(flag, word) for flag, word in ACTIVATIONS.items() if arguments.has(flag)]
    unfused = arguments.has("--no-bias-gelu-fusion")
    openai = arguments.has("--openai-gelu")
    if given:
        for flag in ("--no-bias-gelu-fusion", "--openai-gelu"):
            arguments.refuse(flag, "no effect", "the activation is no gelu")
    else:  # the fused gelu, which takes a bias, is the tanh form; without the fusion it is exact
        exact = (unfused or arguments.has("--disable-bias-linear")) and not openai
        return {"model.activation": "gelu" if exact else "gelu_tanh"}
    return {"model.activation": given[0][1]}


def _activation_words(values: Values) -> list[str]:
    if values["model.activation"] == "gelu" and values["model.add_bias_linear"]:
        return ["--no-bias-gelu-fusion"]
    return [flag for flag, word in ACTIVATIONS.items() if values["model.activation"] == word]


def _ffn(values: Values) -> int | None:
    """Return Megatron-LM's width: 4 h, or for swiglu 8/3 h cut to a multiple of 64."""
    hidden = values.get("model.hidden_size")
    if hidden is None:
        return None
    return (
        # two thirds, as a gated MLP has three matrices for two
        int(4 * hidden * 2 / 3 / 64) * 64 if values["model.activation"] == "swiglu" else 4 * hidden
    )


def _groups(arguments: Arguments, draft: Draft) -> Draft:
    key = "model.num_query_groups"
    flag = "--num-query-groups"
    groups = arguments.converted(flag, whole)
    if arguments.has("--group-query-attention") and draft["model.mla"] is None:
        # Megatron-LM's default is one group
        return {key: groups if groups is not None else 1}
    why = "MLA has no groups" if draft["model.mla"] else "read only with --group-query-attention"
    arguments.refuse(flag, "no effect", why)
    if draft["model.mla"]:
        arguments.refuse("--group-query-attention", "no effect", why)
    return {key: None}


def _groups_words(values: Values) -> list[str]:
    groups = values["model.num_query_groups"]
    return [] if groups is None else ["--group-query-attention", "--num-query-groups", str(groups)]


def _head(arguments: Arguments, draft: Draft) -> Draft:
    width = arguments.converted("--kv-channels", whole)
    if draft["model.mla"] is not None:
        arguments.refuse("--kv-channels", "no effect", "MLA has widths of its own")
        return {"model.kv_channels": None}
    return {"model.kv_channels": width}


def _positions(arguments: Arguments, draft: Draft) -> Draft:
    # Megatron-LM's default
    kind = arguments.word("--position-embedding-type") or "learned_absolute"
    if arguments.has("--use-rotary-position-embeddings"):
        kind = "rope"
    if kind not in choices_of("model.position_embedding_type"):
        arguments.refuse(
            "--position-embedding-type",
            "not supported",
            f"changes the numbers: there are no {kind} positions",
        )
        kind = "none"
    if arguments.has("--no-position-embedding"):
        arguments.refuse(
            "--no-position-embedding", "no effect", "has no effect with --position-embedding-type"
        )
    return {"model.position_embedding_type": kind}


def _positions_words(values: Values) -> list[str]:
    kind = values["model.position_embedding_type"]
    return [] if kind == "learned_absolute" else ["--position-embedding-type", kind]


def _scaling(arguments: Arguments, draft: Draft) -> Draft:
    factor = arguments.converted("--rope-scaling-factor", float)
    if not arguments.has("--use-rope-scaling"):
        arguments.refuse("--rope-scaling-factor", "no effect", "read only with --use-rope-scaling")
        return {"model.rope_scaling_factor": None}
    # 8 is Megatron-LM's default, of Llama 3.1
    return {"model.rope_scaling_factor": factor or 8.0}


def _scaling_words(values: Values) -> list[str]:
    factor = values["model.rope_scaling_factor"]
    return [] if factor is None else ["--use-rope-scaling", "--rope-scaling-factor", repr(factor)]


def _window(arguments: Arguments, draft: Draft) -> Draft:
    text = arguments.word("--window-size")
    if text is None:
        return {"model.window_size": None}
    key = "model.window_size"
    sides = _SIDES.match(text)
    if sides is None:
        arguments.refuse(
            "--window-size",
            "unreadable",
            "takes tokens to the left and to the right, as 127,0; -1: all of them",
        )
        return {key: None}
    # Causal attention sees no token to the right, whatever the other number is.
    left = int(sides[1])
    if left == 0:
        arguments.refuse(
            "--window-size",
            "not supported",
            "changes the numbers: a token would see nothing but itself",
        )
    return {key: left + 1 if left > 0 else None}


def _window_words(values: Values) -> list[str]:
    # The flag counts the tokens to the left, the key counts every visible token.
    if values["model.window_size"] is None:
        return []
    return ["--window-size", f"{values['model.window_size'] - 1},0"]


def _variant(arguments: Arguments, draft: Draft) -> Draft:
    flag = "--experimental-attention-variant"
    word = arguments.word(flag) if arguments.has(flag) else None
    if word not in (None, *VARIANTS):
        arguments.refuse(
            flag, "not supported", f"changes the numbers: there are {' and '.join(VARIANTS)}"
        )
    return {key: {} if word == variant else None for variant, (key, _) in VARIANTS.items()}


def _variant_words(values: Values) -> list[str]:
    present = [variant for variant, (key, own) in VARIANTS.items() if f"{key}.{own}" in values]
    return ["--experimental-attention-variant", *present] if present else []


def _rope_type(arguments: Arguments, draft: Draft) -> Draft:
    kind = arguments.word("--rope-type")
    if draft["model.mla"] is None:
        arguments.refuse(
            "--rope-type", "no effect" if kind == "rope" else "not supported", "is read by MLA"
        )
        return {}
    return {"model.mla.rope_type": kind if kind in choices_of("model.mla.rope_type") else "yarn"}


def _rope_type_words(values: Values) -> list[str]:
    return ["--rope-type", values["model.mla.rope_type"]] if "model.mla.rope_type" in values else []


def _layers_with_experts(arguments: Arguments, draft: Draft) -> Draft:
    key = "model.moe.first_dense_layers"
    flag = "--moe-layer-freq"
    text = arguments.word("--moe-layer-freq")
    if text is None or text.strip() == "1":
        return {key: 0}
    pattern = pattern_of(text)
    # the first layer with experts
    dense = pattern.index(1) if pattern and 1 in pattern else 0
    layers = draft.get("model.num_layers")
    if pattern is None or pattern != [0] * dense + [1] * (len(pattern) - dense):
        arguments.refuse(
            flag,
            "not supported",
            "changes the numbers: dense layers come first, all others have experts",
        )
    elif len(pattern) != layers:
        arguments.refuse(
            flag, "unreadable", f"says {len(pattern)} layers, and the model has {layers}"
        )
    return {key: dense}


def _layers_with_experts_words(values: Values) -> list[str]:
    dense = values.get("model.moe.first_dense_layers")
    if not dense:
        return []
    return ["--moe-layer-freq", f"([0]*{dense}+[1]*{values['model.num_layers'] - dense})"]


def _single(flag: str, key: str, absent: Any) -> Entry:
    """Return a flag with a list, of which only one item can be imported."""
    plain = one(flag, key, absent)

    def read(arguments: Arguments, draft: Draft) -> Draft:
        if len(arguments.words(flag) or ()) > 1:
            arguments.refuse(
                flag, "not supported", "changes the numbers: only one kind of balancing at a time"
            )
            arguments = Arguments([flag, arguments.flags[flag][0]])
        return plain.read(arguments, draft)

    return Entry((flag,), (key,), read, plain.write)


def _group_score(arguments: Arguments, draft: Draft) -> Draft:
    """Return how many best scores Megatron-LM sums per group: the experts of a token in it."""
    groups = draft.get("model.moe.router_num_groups")
    taken = draft.get("model.moe.router_group_topk")
    key = "model.moe.router_group_score_topk"
    return {key: max(1, draft["model.moe.router_topk"] // taken) if groups and taken else None}


def _gated(values: Values) -> bool:
    # swiglu, geglu, quick_geglu: every gated activation is called so
    return "glu" in values["model.activation"]


def _offset(arguments: Arguments, draft: Draft) -> Draft:
    offset = arguments.converted("--glu-linear-offset", float)
    if offset and not _gated(draft):
        arguments.refuse("--glu-linear-offset", "no effect", "is added in gated units")
        offset = None
    return {"model.glu_linear_offset": offset or 0.0}


def _offset_words(values: Values) -> list[str]:
    offset = values["model.glu_linear_offset"]
    return ["--glu-linear-offset", spelled(offset)] if offset else []


def _is_rotary(values: Values) -> bool:
    """Return whether positions rotate the queries and keys of plain attention."""
    return values["model.position_embedding_type"] == "rope" and values.get("model.mla", {}) is None


def _without_rotary(arguments: Arguments, draft: Draft) -> Draft:
    flag = "--no-rope-freq"
    text = arguments.word("--no-rope-freq")
    # scripts write both for the absence of such layers
    if text is None or text in ("0", "None"):
        return {"model.no_rope_freq": None}
    if not _is_rotary(draft):
        arguments.refuse(flag, "no effect", "there are no rotary positions to leave out")
    elif not text.isdigit() or len(text) > 6 or int(text) < 2:
        arguments.refuse(
            flag, "not supported", "changes the numbers: every n-th layer, n at least 2"
        )
    else:
        return {"model.no_rope_freq": int(text)}
    return {"model.no_rope_freq": None}


def _flex(arguments: Arguments, draft: Draft) -> Draft:
    key = "model.moe.flex_dispatcher_backend"
    backend = arguments.word("--moe-flex-dispatcher-backend")
    if draft.get("model.moe.token_dispatcher_type") != "flex":
        for flag in ("--moe-flex-dispatcher-backend", "--moe-enable-deepep"):
            arguments.has(flag)
            arguments.refuse(flag, "no effect", "read only with --moe-token-dispatcher-type flex")
        return {key: None}
    arguments.has("--moe-enable-deepep")  # an older flag for the backend
    return {key: backend if backend in choices_of(key) else "deepep"}


MODEL: tuple[Entry, ...] = (
    section("--multi-latent-attention", "model.mla", "kv_lora_rank"),
    section("--use-mup", "model.mup", "embedding_mult"),
    Entry(
        ("--experimental-attention-variant",),
        tuple(key for key, _ in VARIANTS.values()),
        _variant,
        _variant_words,
    ),
    Entry(
        (*ACTIVATIONS, "--no-bias-gelu-fusion", "--openai-gelu"),
        ("model.activation",),
        _activation,
        _activation_words,
        switches=(*ACTIVATIONS, "--no-bias-gelu-fusion", "--openai-gelu"),
    ),
    one("--ffn-hidden-size", "model.ffn_hidden_size", _ffn, always=True),
    Entry(
        ("--group-query-attention", "--num-query-groups"),
        ("model.num_query_groups",),
        _groups,
        _groups_words,
        switches=("--group-query-attention",),
    ),
    Entry(
        ("--kv-channels",),
        ("model.kv_channels",),
        _head,
        words_of("--kv-channels", "model.kv_channels"),
    ),
    conditional_switch(
        "--qk-l2-norm",
        "model.qk_l2_norm",
        lambda values: values["model.mla"] is None,
        "MLA has its own norms",
    ),
    Entry(("--glu-linear-offset",), ("model.glu_linear_offset",), _offset, _offset_words),
    Entry(
        (
            "--position-embedding-type",
            "--use-rotary-position-embeddings",
            "--no-position-embedding",
        ),
        ("model.position_embedding_type",),
        _positions,
        _positions_words,
        switches=("--use-rotary-position-embeddings", "--no-position-embedding"),
    ),
    Entry(
        ("--use-rope-scaling", "--rope-scaling-factor"),
        ("model.rope_scaling_factor",),
        _scaling,
        _scaling_words,
        switches=("--use-rope-scaling",),
    ),
    Entry(
        ("--no-rope-freq",),
        ("model.no_rope_freq",),
        _without_rotary,
        words_of("--no-rope-freq", "model.no_rope_freq"),
    ),
    Entry(("--window-size",), ("model.window_size",), _window, _window_words),
)

EXPERTS: tuple[Entry, ...] = (
    one(
        "--moe-ffn-hidden-size",
        "model.moe.ffn_hidden_size",
        lambda values: values.get("model.ffn_hidden_size"),
        always=True,
    ),
    Entry(
        ("--moe-layer-freq",),
        ("model.moe.first_dense_layers",),
        _layers_with_experts,
        _layers_with_experts_words,
    ),
    _single("--moe-router-load-balancing-type", "model.moe.router_load_balancing_type", "aux_loss"),
    _single("--moe-aux-loss-coeff", "model.moe.aux_loss_coeff", 0.0),
    Entry((), ("model.moe.router_group_score_topk",), _group_score, lambda values: []),
    Entry(
        ("--moe-flex-dispatcher-backend", "--moe-enable-deepep"),
        ("model.moe.flex_dispatcher_backend",),
        _flex,
        words_of("--moe-flex-dispatcher-backend", "model.moe.flex_dispatcher_backend"),
        switches=("--moe-enable-deepep",),
    ),
)

LATENT: tuple[Entry, ...] = (
    Entry(("--rope-type",), ("model.mla.rope_type",), _rope_type, _rope_type_words),
)


PROGRAM = "pretrain_bert.py"
SPECIAL = {
    "model.bert.cls_token_id": 101,
    "model.bert.sep_token_id": 102,
    "model.bert.mask_token_id": 103,
}
"""Special tokens of BERT's vocab.txt, cased or not."""
# flags that the program for GPTs accepts, and ignores
NO_HEAD = "--bert-no-binary-head"
SHARE = "--mask-prob"
SHORT = "--short-seq-prob"
DECIDES = {NO_HEAD: "model.bert.next_sentence", SHARE: "model.bert.masked_share"}
SAMPLES = (
    "a sample is a window of text in two halves, and tokens are masked one by one; "
    "Megatron-LM has pairs of sentences, and masks whole words"
)


def bert_keys(arguments: Arguments, draft: Draft, left: dict[str, str]) -> Draft:
    """Return the keys of megatron-core's BERT: norms before attention and MLP, and two heads, that
    for tokens with exact gelu.

    `draft` has the keys of the flags that every program reads. Keys of unknown flags are added to
    `left`.
    """
    arguments.doubts = {}
    share = arguments.converted(SHARE, float)
    arguments.refuse(
        SHORT, "not supported", "changes the numbers: every sample is as long as data.seq_length"
    )
    if draft.get("model.window_size") is not None:
        arguments.refuse(
            "--window-size", "not supported", "changes the numbers: tokens of BERT see all others"
        )
    arguments.notes.append(SAMPLES)
    if not str(arguments.word("--tokenizer-type") or "").startswith("BertWordPiece"):
        ids = ", ".join(f"{key} {value}" for key, value in SPECIAL.items())
        arguments.notes.append(
            f"special tokens are taken to be those of BERT's vocabularies: {ids}"
        )
    keys = {
        "model.family": "bert",
        "model.norm_placement": "pre",
        "model.window_size": None,
        **SPECIAL,
        "model.bert.next_sentence": not arguments.has(NO_HEAD),
        "model.bert.masked_share": BertConfig().masked_share if share is None else share,
        "model.bert.head_activation": None if draft.get("model.activation") == "gelu" else "gelu",
    }
    for flag, why in arguments.doubts.items():
        if flag in DECIDES:
            left.setdefault(DECIDES[flag], why)
    return keys


def bert_words(run: RunConfig) -> list[list[str]]:
    """Return the program's own flags for a BERT; empty for any other model."""
    bert: Any = run.model.bert
    if not is_megatrons(run):
        return []
    # written even if it is the default, so that the share is visible
    words = [[SHARE, spelled(bert.masked_share)]]
    return words if bert.next_sentence else [[NO_HEAD], *words]


def is_megatrons(run: RunConfig) -> bool:
    """Return whether Megatron-LM's program for BERT trains the model of a run."""
    return run.model.family == "bert" and run.model.norm_placement == "pre"
