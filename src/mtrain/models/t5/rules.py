"""T5: token ids and lengths of its spans, and groups of distances."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Change, Finding, divisors, multiples, nearest
from mtrain.config.rules.rule import Code
from mtrain.config.schema.run import RunConfig
from mtrain.models.t5.config import T5Config, lengths, spans

TINY = "model=t5_tiny"


@of_family(
    "t5",
    Code("MT280", example=f"{TINY} model.t5.encoder_length=16"),
    reads=(
        "model.t5.encoder_length model.t5.decoder_length data.seq_length model.t5.noise_density"
        " model.t5.mean_noise_span_length parallel.sequence_parallel parallel.tp"
    ),
)
def spans_fit_their_sequences(run: RunConfig, t: T5Config) -> Iterator[Finding]:
    """What is left of a sample, and what is left out of it, fit the lengths of encoder
    and decoder.
    """
    tokens = run.data.length
    p = run.parallel
    given = (t.encoder_length, t.decoder_length)
    for key, said, need in zip(("encoder", "decoder"), given, lengths(t, tokens), strict=True):
        path = f"model.t5.{key}_length"
        part = p.tp if p.sequence_parallel else 1
        fixes: tuple[Change, ...] = ({path: -(-need // part) * part}, {path: None})
        if said is not None and said < need:
            rule = (
                f"the {key} needs {need} tokens of a sample of {tokens} (data.seq_length), and has"
                f" {said}"
            )
            yield Finding("MT280", path, rule, fixes)
        elif said is not None and said % part:
            rule = f"{said} tokens are not divided by tp {part}, over which sequences are sharded"
            near: tuple[Change, ...] = tuple({path: n} for n in multiples(said, part) if n >= need)
            yield Finding("MT280", path, rule, (*near, {"parallel.sequence_parallel": False}))


@of_family(
    "t5",
    Code("MT281", example=f"{TINY} model.t5.sentinels=2"),
    reads=(
        "model.t5.sentinels model.t5.first_sentinel model.t5.start_id model.t5.end_id"
        " model.vocab_size data.seq_length model.t5.noise_density model.t5.mean_noise_span_length"
        " data.kind data.tokenizer data.tokenizer_vocab_size"
    ),
)
def sentinels_stand_for_spans(run: RunConfig, t: T5Config) -> Iterator[Finding]:
    """Every span of a sample has a token id of its own, which is no token of the text."""
    words = run.model.vocab_size
    tokens = run.data.length
    first = words - 1 if t.first_sentinel is None else t.first_sentinel
    last = first - t.sentinels + 1
    for name in ("start_id", "end_id"):
        value = getattr(t, name)
        if value >= words or last <= value <= first:
            rule = (
                f"{value} is a sentinel or outside of the vocabulary: {words} ids, {last} to"
                f" {first} are sentinels"
            )
            yield Finding(
                "MT281", f"model.t5.{name}", rule, ({f"model.t5.{name}": max(0, last - 1)},)
            )
    if first >= words or last < 0:
        rule = (
            f"{t.sentinels} sentinels from {first} down are outside of the vocabulary of"
            f" {words} ids"
        )
        fewer: Change = {"model.t5.sentinels": max(1, min(first, words - 1) // 2)}
        top: Change = {"model.t5.first_sentinel": None}
        yield Finding("MT281", "model.t5.sentinels", rule, (top, fewer, {**top, **fewer}))
        return
    parts = spans(t, tokens)[1]
    if parts > t.sentinels:
        rule = (
            f"{parts} spans of a sample of {tokens} tokens (data.seq_length) need a sentinel each"
        )
        fixes: tuple[Change, ...] = (
            {"model.t5.sentinels": parts},
            {"data.seq_length": tokens * t.sentinels // parts},
        )
        yield Finding("MT281", "model.t5.sentinels", rule, fixes)
    if (
        run.data.kind == "text"
        and run.data.tokenizer is None
        and run.data.tokenizer_vocab_size > last
    ):
        path = "data.tokenizer_vocab_size"
        rule = f"its ids go from 0 up, and those from {last} on are sentinels"
        yield Finding("MT281", path, rule, ({path: last},))


@of_family(
    "t5",
    Code("MT282", example=f"{TINY} model.t5.relative_attention_distance=8"),
    reads=("model.t5.relative_attention_distance model.t5.relative_attention_buckets"),
)
def distances_go_beyond_single_ones(run: RunConfig, t: T5Config) -> Iterator[Finding]:
    """Half of the groups are single distances, and the others lie between those and the longest."""
    if t.relative_attention_distance <= t.relative_attention_buckets // 2:
        single = t.relative_attention_buckets // 2
        path = "model.t5.relative_attention_distance"
        rule = (
            f"distances up to {single} have a group of their own, half of the groups are for longer"
            " ones"
        )
        yield Finding("MT282", path, rule, ({path: 4 * single}, {path: single + 1}))


@of_family(
    "t5",
    Code(
        "MT283",
        example=(
            f"{TINY} parallel.recompute.granularity=full parallel.recompute.num_layers=3"
            " model.t5.decoder_layers=4"
        ),
    ),
    reads=(
        "parallel.recompute.num_layers parallel.recompute.granularity model.t5.decoder_layers"
        " model.num_layers"
    ),
)
def recomputed_groups_of_both_stacks(run: RunConfig, t: T5Config) -> Iterator[Finding]:
    """Layers are computed again in whole groups, in the decoder too."""
    again = run.parallel.recompute
    path = "parallel.recompute.num_layers"
    if again.granularity != "full" or again.num_layers is None:
        return
    encoder = run.model.num_layers
    decoder = t.decoder_layers or run.model.num_layers
    if encoder % again.num_layers or decoder % again.num_layers:
        rule = (
            f"groups of {again.num_layers} layers do not divide {encoder} of the encoder and"
            f" {decoder} of the decoder"
        )
        both = [n for n in divisors(encoder) if decoder % n == 0]
        yield Finding(
            "MT283", path, rule, tuple({path: n} for n in nearest(again.num_layers, both))
        )


RULES = (
    spans_fit_their_sequences,
    sentinels_stand_for_spans,
    distances_go_beyond_single_ones,
    recomputed_groups_of_both_stacks,
)
