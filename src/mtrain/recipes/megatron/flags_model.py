"""Megatron-LM's flags for the shape of the network.

Defaults are those of its argument parser: LayerNorm, gelu with biases, learned positions, tied
embeddings, dropout.
"""

from __future__ import annotations

import re
from typing import Any

from mtrain.config.messages.keys import choices_of
from mtrain.recipes.megatron.arguments import Arguments, Draft, Entry, Values, whole
from mtrain.recipes.megatron.entries import conditional_switch, one, spelled
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
NEAREST = {"quick_geglu": "geglu"}
_SIDES = re.compile(r"[(\[]?\s*(-1|\d{1,9})\s*,\s*(?:-1|\d{1,9})\s*[)\]]?\Z")
"""The value of --window-size."""


def _activation(a: Arguments, d: Draft) -> Draft:
    given = [(flag, word) for flag, word in ACTIVATIONS.items() if a.has(flag)]
    unfused = a.has("--no-bias-gelu-fusion")
    openai = a.has("--openai-gelu")
    if given:
        for flag in ("--no-bias-gelu-fusion", "--openai-gelu"):
            a.refuse(flag, "no effect", "the activation is no gelu")
    else:  # the fused gelu, which takes a bias, is the tanh form; without the fusion it is exact
        exact = (unfused or a.has("--disable-bias-linear")) and not openai
        return {"model.activation": "gelu" if exact else "gelu_tanh"}
    flag, word = given[0]
    if word not in choices_of("model.activation"):
        word = NEAREST[word]
        a.refuse(
            flag,
            "not supported",
            f"changes the numbers: model.activation={word} is the nearest activation",
        )
    return {"model.activation": word}


def _activation_words(d: Values) -> list[str]:
    if d["model.activation"] == "gelu" and d["model.add_bias_linear"]:
        return ["--no-bias-gelu-fusion"]
    return [flag for flag, word in ACTIVATIONS.items() if d["model.activation"] == word]


def _ffn(d: Values) -> int | None:
    """Return Megatron-LM's width: 4 h, or for swiglu 8/3 h cut to a multiple of 64."""
    hidden = d.get("model.hidden_size")
    if hidden is None:
        return None
    return int(4 * hidden * 2 / 3 / 64) * 64 if d["model.activation"] == "swiglu" else 4 * hidden


def _groups(a: Arguments, d: Draft) -> Draft:
    key = "model.num_query_groups"
    flag = "--num-query-groups"
    groups = a.converted(flag, whole)
    if a.has("--group-query-attention") and d["model.mla"] is None:
        return {key: groups if groups is not None else 1}
    why = "MLA has no groups" if d["model.mla"] else "read only with --group-query-attention"
    a.refuse(flag, "no effect", why)
    if d["model.mla"]:
        a.refuse("--group-query-attention", "no effect", why)
    return {key: None}


def _groups_words(d: Values) -> list[str]:
    groups = d["model.num_query_groups"]
    return [] if groups is None else ["--group-query-attention", "--num-query-groups", str(groups)]


def _head(a: Arguments, d: Draft) -> Draft:
    width = a.converted("--kv-channels", whole)
    if d["model.mla"] is not None:
        a.refuse("--kv-channels", "no effect", "MLA has widths of its own")
        return {"model.kv_channels": None}
    return {"model.kv_channels": width}


def _head_words(d: Values) -> list[str]:
    return [] if d["model.kv_channels"] is None else ["--kv-channels", str(d["model.kv_channels"])]


def _positions(a: Arguments, d: Draft) -> Draft:
    kind = a.word("--position-embedding-type") or "learned_absolute"
    if a.has("--use-rotary-position-embeddings"):
        kind = "rope"
    if kind not in choices_of("model.position_embedding_type"):
        a.refuse(
            "--position-embedding-type",
            "not supported",
            f"changes the numbers: there are no {kind} positions",
        )
        kind = "none"
    if a.has("--no-position-embedding"):
        a.refuse(
            "--no-position-embedding", "no effect", "has no effect with --position-embedding-type"
        )
    return {"model.position_embedding_type": kind}


def _positions_words(d: Values) -> list[str]:
    kind = d["model.position_embedding_type"]
    return [] if kind == "learned_absolute" else ["--position-embedding-type", kind]


def _scaling(a: Arguments, d: Draft) -> Draft:
    factor = a.converted("--rope-scaling-factor", float)
    if not a.has("--use-rope-scaling"):
        a.refuse("--rope-scaling-factor", "no effect", "read only with --use-rope-scaling")
        return {"model.rope_scaling_factor": None}
    return {"model.rope_scaling_factor": factor or 8.0}


def _scaling_words(d: Values) -> list[str]:
    factor = d["model.rope_scaling_factor"]
    return [] if factor is None else ["--use-rope-scaling", "--rope-scaling-factor", repr(factor)]


def _window(a: Arguments, d: Draft) -> Draft:
    text = a.word("--window-size")
    if text is None:
        return {"model.window_size": None}
    key = "model.window_size"
    sides = _SIDES.match(text)
    if sides is None:
        a.refuse(
            "--window-size",
            "unreadable",
            "takes tokens to the left and to the right, as 127,0; -1: all of them",
        )
        return {key: None}
    # Causal attention sees no token to the right, whatever the other number is.
    left = int(sides[1])
    if left == 0:
        a.refuse(
            "--window-size",
            "not supported",
            "changes the numbers: a token would see nothing but itself",
        )
    return {key: left + 1 if left > 0 else None}


def _window_words(d: Values) -> list[str]:
    # The flag counts the tokens to the left, the key counts every visible token.
    if d["model.window_size"] is None:
        return []
    return ["--window-size", f"{d['model.window_size'] - 1},0"]


def _latent(a: Arguments, d: Draft) -> Draft:
    return {"model.mla": {} if a.has("--multi-latent-attention") else None}


def _latent_words(d: Values) -> list[str]:
    return ["--multi-latent-attention"] if "model.mla.kv_lora_rank" in d else []


def _variant(a: Arguments, d: Draft) -> Draft:
    flag = "--experimental-attention-variant"
    word = a.word(flag) if a.has(flag) else None
    if word not in (None, *VARIANTS):
        a.refuse(flag, "not supported", f"changes the numbers: there are {' and '.join(VARIANTS)}")
    return {key: {} if word == variant else None for variant, (key, _) in VARIANTS.items()}


def _variant_words(d: Values) -> list[str]:
    present = [variant for variant, (key, own) in VARIANTS.items() if f"{key}.{own}" in d]
    return ["--experimental-attention-variant", *present] if present else []


def _rope_type(a: Arguments, d: Draft) -> Draft:
    kind = a.word("--rope-type")
    if d["model.mla"] is None:
        a.refuse(
            "--rope-type", "no effect" if kind == "rope" else "not supported", "is read by MLA"
        )
        return {}
    return {"model.mla.rope_type": kind if kind in choices_of("model.mla.rope_type") else "yarn"}


def _rope_type_words(d: Values) -> list[str]:
    return ["--rope-type", d["model.mla.rope_type"]] if "model.mla.rope_type" in d else []


def _layers_with_experts(a: Arguments, d: Draft) -> Draft:
    key = "model.moe.first_dense_layers"
    flag = "--moe-layer-freq"
    text = a.word("--moe-layer-freq")
    if text is None or text.strip() == "1":
        return {key: 0}
    pattern = pattern_of(text)
    dense = pattern.index(1) if pattern and 1 in pattern else 0
    layers = d.get("model.num_layers")
    if pattern is None or pattern != [0] * dense + [1] * (len(pattern) - dense):
        a.refuse(
            flag,
            "not supported",
            "changes the numbers: dense layers come first, all others have experts",
        )
    elif len(pattern) != layers:
        a.refuse(flag, "unreadable", f"says {len(pattern)} layers, and the model has {layers}")
    return {key: dense}


def _layers_with_experts_words(d: Values) -> list[str]:
    dense = d.get("model.moe.first_dense_layers")
    if not dense:
        return []
    return ["--moe-layer-freq", f"([0]*{dense}+[1]*{d['model.num_layers'] - dense})"]


def _single(flag: str, key: str, absent: Any) -> Entry:
    """Return a flag with a list, of which only one item can be imported."""
    plain = one(flag, key, absent)

    def read(a: Arguments, d: Draft) -> Draft:
        if len(a.words(flag) or ()) > 1:
            a.refuse(
                flag, "not supported", "changes the numbers: only one kind of balancing at a time"
            )
            a = Arguments([flag, a.flags[flag][0]])
        return plain.read(a, d)

    return Entry((flag,), (key,), read, plain.write)


def _group_score(a: Arguments, d: Draft) -> Draft:
    """Return how many best scores Megatron-LM sums per group: the experts that a token takes from
    each of its groups.
    """
    groups = d.get("model.moe.router_num_groups")
    taken = d.get("model.moe.router_group_topk")
    key = "model.moe.router_group_score_topk"
    return {key: max(1, d["model.moe.router_topk"] // taken) if groups and taken else None}


def _gated(d: Values) -> bool:
    return "glu" in d["model.activation"]


def _offset(a: Arguments, d: Draft) -> Draft:
    offset = a.converted("--glu-linear-offset", float)
    if offset and not _gated(d):
        a.refuse("--glu-linear-offset", "no effect", "is added in gated units")
        offset = None
    return {"model.glu_linear_offset": offset or 0.0}


def _offset_words(d: Values) -> list[str]:
    offset = d["model.glu_linear_offset"]
    return ["--glu-linear-offset", spelled(offset)] if offset else []


def _is_rotary(d: Values) -> bool:
    """Return whether positions rotate the queries and keys of plain attention."""
    return d["model.position_embedding_type"] == "rope" and d.get("model.mla", {}) is None


def _without_rotary(a: Arguments, d: Draft) -> Draft:
    flag = "--no-rope-freq"
    text = a.word("--no-rope-freq")
    if text is None or text in ("0", "None"):
        return {"model.no_rope_freq": None}
    if not _is_rotary(d):
        a.refuse(flag, "no effect", "there are no rotary positions to leave out")
    elif not text.isdigit() or len(text) > 6 or int(text) < 2:
        a.refuse(flag, "not supported", "changes the numbers: every n-th layer, n at least 2")
    else:
        return {"model.no_rope_freq": int(text)}
    return {"model.no_rope_freq": None}


def _without_rotary_words(d: Values) -> list[str]:
    return (
        [] if d["model.no_rope_freq"] is None else ["--no-rope-freq", str(d["model.no_rope_freq"])]
    )


def _flex(a: Arguments, d: Draft) -> Draft:
    key = "model.moe.flex_dispatcher_backend"
    backend = a.word("--moe-flex-dispatcher-backend")
    if d.get("model.moe.token_dispatcher_type") != "flex":
        for flag in ("--moe-flex-dispatcher-backend", "--moe-enable-deepep"):
            a.has(flag)
            a.refuse(flag, "no effect", "read only with --moe-token-dispatcher-type flex")
        return {key: None}
    a.has("--moe-enable-deepep")  # an older flag for the backend
    return {key: backend if backend in choices_of(key) else "deepep"}


def _flex_words(d: Values) -> list[str]:
    backend = d.get("model.moe.flex_dispatcher_backend")
    return [] if backend is None else ["--moe-flex-dispatcher-backend", backend]


MODEL: tuple[Entry, ...] = (
    Entry(
        ("--multi-latent-attention",),
        ("model.mla",),
        _latent,
        _latent_words,
        switches=("--multi-latent-attention",),
    ),
    Entry(
        ("--use-mup",),
        ("model.mup",),
        lambda a, d: {"model.mup": {} if a.has("--use-mup") else None},
        lambda d: ["--use-mup"] if "model.mup.embedding_mult" in d else [],
        switches=("--use-mup",),
    ),
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
    Entry(("--kv-channels",), ("model.kv_channels",), _head, _head_words),
    conditional_switch(
        "--qk-l2-norm",
        "model.qk_l2_norm",
        lambda d: d["model.mla"] is None,
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
    Entry(("--no-rope-freq",), ("model.no_rope_freq",), _without_rotary, _without_rotary_words),
    Entry(("--window-size",), ("model.window_size",), _window, _window_words),
)

EXPERTS: tuple[Entry, ...] = (
    one(
        "--moe-ffn-hidden-size",
        "model.moe.ffn_hidden_size",
        lambda d: d.get("model.ffn_hidden_size"),
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
    Entry((), ("model.moe.router_group_score_topk",), _group_score, lambda d: []),
    Entry(
        ("--moe-flex-dispatcher-backend", "--moe-enable-deepep"),
        ("model.moe.flex_dispatcher_backend",),
        _flex,
        _flex_words,
        switches=("--moe-enable-deepep",),
    ),
)

LATENT: tuple[Entry, ...] = (
    Entry(("--rope-type",), ("model.mla.rope_type",), _rope_type, _rope_type_words),
)
