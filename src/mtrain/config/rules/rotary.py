"""Rotary rules: scalings that are complete, and that have an effect."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code, rule
from mtrain.config.schema.run import RunConfig

SCALING = "model.rope_scaling"
KIND = f"{SCALING}.rope_type"
OFF: Change = {SCALING: None}


@rule(
    Code(
        "MT205",
        "Frequency scaling changes rotary positions, and the model has others.",
        example="model.rope_scaling_factor=8 model.position_embedding_type=none",
    ),
    Code(
        "MT206",
        "Frequency scaling does not reach MLA, which makes its own rotary positions.",
        example="model=deepseek_tiny model.rope_scaling_factor=8",
    ),
    reads="model.rope_scaling_factor model.rope_scaling model.position_embedding_type model.mla",
)
def rotary_keys(run: RunConfig) -> Iterator[Finding]:
    """Only rotary positions read the keys of frequency scaling."""
    m = run.model
    factor = "model.rope_scaling_factor"
    for key, path, value in (
        (factor, factor, m.rope_scaling_factor),
        (SCALING, KIND, m.rope_scaling),
    ):
        if value is None:
            continue
        off: Change = {key: None}
        if m.position_embedding_type != "rope":
            rule = (
                "scales rotary positions, and position_embedding_type is"
                f" {m.position_embedding_type}"
            )
            yield Finding("MT205", path, rule, (off, {"model.position_embedding_type": "rope"}))
        elif m.mla is not None:
            rule = (
                "has no effect: MLA makes its own rotary positions, scaled by"
                " model.mla.rope_type=yarn"
            )
            yield Finding("MT206", path, rule, (off,))


@rule(
    Code(
        "MT260",
        example="model.rope_scaling={rope_type:yarn,factor:4.0} model.rope_scaling_factor=8",
    ),
    reads="model.rope_scaling model.rope_scaling_factor model.rotary_seq_len_interpolation_factor",
)
def position_scaling(run: RunConfig) -> Iterator[Finding]:
    """A model scales its rotary positions in one way."""
    m = run.model
    if m.rope_scaling is None:
        return
    for key in ("rope_scaling_factor", "rotary_seq_len_interpolation_factor"):
        if getattr(m, key) is not None:
            rule = (
                f"is {m.rope_scaling.rope_type}, and model.{key} would scale rotary positions once"
                " more"
            )
            yield Finding("MT260", KIND, rule, ({f"model.{key}": None}, OFF))


@rule(
    Code("MT261", example="model.rope_scaling={rope_type:llama3,factor:8.0,low_freq_factor:4.0}"),
    reads=(
        "model.rope_scaling.rope_type model.rope_scaling.low_freq_factor"
        " model.rope_scaling.high_freq_factor"
    ),
)
def frequency_order(run: RunConfig) -> Iterator[Finding]:
    """llama3 interpolates between the slow and the fast frequencies, so they must differ."""
    scaling = run.model.rope_scaling
    if scaling is None or scaling.rope_type != "llama3":
        return
    low = scaling.low_freq_factor or 1.0
    high = scaling.high_freq_factor or 4.0
    if low >= high:
        rule = (
            f"slow frequencies have up to {low:g} turns, and fast ones from {high:g} on:"
            " high_freq_factor is above"
        )
        usual: Change = {f"{SCALING}.low_freq_factor": None, f"{SCALING}.high_freq_factor": None}
        above: Change = {f"{SCALING}.high_freq_factor": 4 * low}
        yield Finding("MT261", f"{SCALING}.low_freq_factor", rule, (above, usual))


@rule(
    Code(
        "MT262", example="model.rope_scaling={rope_type:longrope,factor:4.0,short_factor:[1.0,1.0]}"
    ),
    reads=(
        "model.rope_scaling.rope_type model.rope_scaling.short_factor"
        " model.rope_scaling.long_factor model.rotary_percent model.kv_channels model.hidden_size"
        " model.num_attention_heads model.mla"
    ),
)
def longrope_factors(run: RunConfig) -> Iterator[Finding]:
    """longrope has a factor for each rotated pair of channels, for short and for long sequences."""
    m = run.model
    if m.rope_scaling is None or m.rope_scaling.rope_type != "longrope" or m.mla is not None:
        return
    pairs = m.rotary_dim // 2
    for key in ("short_factor", "long_factor"):
        found = len(getattr(m.rope_scaling, key) or ())
        if found != pairs:
            rule = f"{found} factors, and {pairs} pairs of channels of a head rotate: one for each"
            also = (
                "model.rotary_percent",
                "model.kv_channels",
                "model.hidden_size",
                "model.num_attention_heads",
            )
            yield Finding("MT262", f"{SCALING}.{key}", rule, (OFF,), also=also)


@rule(
    Code("MT263", example="model.rope_scaling={rope_type:dynamic,factor:4.0} model.kv_channels=2"),
    reads=(
        "model.rope_scaling.rope_type model.rotary_percent model.kv_channels model.hidden_size "
        "model.num_attention_heads model.mla"
    ),
)
def dynamic_base(run: RunConfig) -> Iterator[Finding]:
    """dynamic keeps the fastest frequency and changes the others, so it needs two."""
    m = run.model
    if (
        m.rope_scaling is None
        or m.rope_scaling.rope_type != "dynamic"
        or m.mla is not None
        or m.rotary_dim >= 4
    ):
        return
    rule = f"{m.rotary_dim} channels of a head rotate; dynamic scaling takes 4 or more"
    also = (
        "model.rotary_percent",
        "model.kv_channels",
        "model.hidden_size",
        "model.num_attention_heads",
    )
    yield Finding("MT263", KIND, rule, (OFF,), also=also)


@rule(
    Code("MT264", example="model.rope_scaling={rope_type:yarn,factor:4.0,mscale:1.0}"),
    reads=(
        "model.rope_scaling.mscale model.rope_scaling.mscale_all_dim"
        " model.rope_scaling.attention_factor"
    ),
)
def attention_temperature(run: RunConfig) -> Iterator[Finding]:
    """Either mscale with mscale_all_dim, or the attention factor itself, is set."""
    scaling = run.model.rope_scaling
    if scaling is None or (scaling.mscale is None and scaling.mscale_all_dim is None):
        return
    neither: Change = {f"{SCALING}.mscale": None, f"{SCALING}.mscale_all_dim": None}
    if scaling.attention_factor is not None:
        rule = f"has no effect with attention_factor {scaling.attention_factor:g}"
        key = "mscale" if scaling.mscale is not None else "mscale_all_dim"
        yield Finding(
            "MT264", f"{SCALING}.{key}", rule, (neither, {f"{SCALING}.attention_factor": None})
        )
        return
    for key, other in (("mscale", "mscale_all_dim"), ("mscale_all_dim", "mscale")):
        if getattr(scaling, other) is None:
            yield Finding("MT264", f"{SCALING}.{key}", f"has no effect without {other}", (neither,))


@rule(
    Code(
        "MT265",
        example=(
            "model.rope_scaling={rope_type:dynamic,factor:4.0} data.seq_length=2048"
            " data.packed=true"
        ),
    ),
    reads=(
        "model.rope_scaling.rope_type data.packed data.seq_length model.max_position_embeddings "
        "model.rope_scaling.original_max_position_embeddings"
    ),
)
def length_dependent_frequencies(run: RunConfig) -> Iterator[Finding]:
    """Length-dependent frequencies are undefined for documents of several lengths."""
    m = run.model
    seq = run.data.length
    if (
        m.rope_scaling is None
        or not run.data.packed
        or m.rope_scaling.rope_type not in ("dynamic", "longrope")
    ):
        return
    key = "model.max_position_embeddings"
    before = m.max_position_embeddings
    if m.rope_scaling.rope_type == "longrope" and m.rope_scaling.original_max_position_embeddings:
        key = f"{SCALING}.original_max_position_embeddings"
        before = m.rope_scaling.original_max_position_embeddings
    if seq > before:
        rule = (
            f"{m.rope_scaling.rope_type} frequencies change where a sequence has more than {before}"
            f" tokens ({key}), and packed documents have up to {seq}, each another number"
        )
        fixes: tuple[Change, ...] = ({"data.packed": False}, {"data.seq_length": before}, OFF)
        yield Finding("MT265", "data.packed", rule, fixes)


@rule(
    Code("MT266", example="model=gemma_tiny model.rope_scaling={rope_type:yarn,factor:4.0}"),
    reads="model.rope_scaling model.rotary_base_local",
)
def window_scaling(run: RunConfig) -> Iterator[Finding]:
    """With two bases, only linear scaling leaves the base of windowed layers unchanged."""
    m = run.model
    if m.rope_scaling is not None and m.rotary_base_local is not None:
        rule = (
            f"is {m.rope_scaling.rope_type}, and layers with a window have model.rotary_base_local,"
            " not scaled"
        )
        yield Finding("MT266", KIND, rule, (OFF, {"model.rotary_base_local": None}))


RULES = (
    rotary_keys,
    position_scaling,
    frequency_order,
    longrope_factors,
    dynamic_base,
    attention_temperature,
    length_dependent_frequencies,
    window_scaling,
)
