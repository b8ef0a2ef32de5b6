"""T5: token ids and lengths of its spans, and groups of distances."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Change, Finding, divisors, each, multiples, nearest
from mtrain.config.rules.rule import Code
from mtrain.config.schema.run import RunConfig
from mtrain.models.t5.config import T5Config, decoder_layers, lengths, spans

TINY = "model=t5_tiny"
SENTINELS = "model.t5.sentinels"
FIRST = "model.t5.first_sentinel"
DISTANCE = "model.t5.relative_attention_distance"
BUCKETS = "model.t5.relative_attention_buckets"
TRAINED_IDS = "data.tokenizer_vocab_size"
GROUP = "parallel.recompute.num_layers"
_SPANS = "data.seq_length model.t5.noise_density model.t5.mean_noise_span_length"


@of_family(
    "t5",
    Code("MT280", example=f"{TINY} model.t5.encoder_length=16"),
    reads=(
        f"model.t5.encoder_length model.t5.decoder_length {_SPANS}"
        " parallel.sequence_parallel parallel.tp"
    ),
)
def span_lengths(run: RunConfig, t: T5Config) -> Iterator[Finding]:
    """Cannot fit the two parts of a sample because each length must hold its part and divide over
    sequence-parallel ranks.
    """
    tokens = run.data.length
    p = run.parallel
    # Sequence parallelism splits both sequences over the tp ranks.
    part = p.tp if p.sequence_parallel else 1
    given = (t.encoder_length, t.decoder_length)
    for key, length, need in zip(("encoder", "decoder"), given, lengths(t, tokens), strict=True):
        path = f"model.t5.{key}_length"
        if length is not None and length < need:
            detail = f"{length}; the {key} needs {need} of the {tokens} tokens in data.seq_length"
            yield Finding("MT280", path, detail, each(path, [-(-need // part) * part, None]))
        elif length is not None and length % part:
            near = [n for n in multiples(length, part) if n >= need]
            fixes = [*each(path, near), {"parallel.sequence_parallel": False}]
            yield Finding("MT280", path, f"{length} tokens, tp {part}", fixes)


@of_family(
    "t5",
    Code("MT281", example=f"{TINY} {SENTINELS}=2"),
    reads=(
        f"{SENTINELS} {FIRST} model.t5.start_id model.t5.end_id model.vocab_size {_SPANS}"
        f" data.kind data.tokenizer {TRAINED_IDS}"
    ),
)
def sentinel_ids(run: RunConfig, t: T5Config) -> Iterator[Finding]:
    """Cannot mark every span because each needs a sentinel, an id of the vocabulary that stands for
    nothing else.
    """
    words = run.model.vocab_size
    tokens = run.data.length
    # Sentinels count down from the last id, as in the published T5.
    first = words - 1 if t.first_sentinel is None else t.first_sentinel
    last = first - t.sentinels + 1
    for path, value in (("model.t5.start_id", t.start_id), ("model.t5.end_id", t.end_id)):
        if value >= words or last <= value <= first:
            detail = f"{value} of {words} ids; {last} to {first} are sentinels"
            yield Finding("MT281", path, detail, [{path: max(0, last - 1)}])
    if first >= words or last < 0:
        fewer: Change = {SENTINELS: max(1, min(first, words - 1) // 2)}
        fixes: list[Change] = [{FIRST: None}, fewer, {FIRST: None, **fewer}]
        detail = f"{t.sentinels} sentinels from {first} down, {words} ids"
        yield Finding("MT281", SENTINELS, detail, fixes)
        return
    parts = spans(t, tokens)[1]
    if parts > t.sentinels:
        fixes = [{SENTINELS: parts}, {"data.seq_length": tokens * t.sentinels // parts}]
        detail = f"{parts} spans in a sample of {tokens} tokens, data.seq_length"
        yield Finding("MT281", SENTINELS, detail, fixes)
    d = run.data
    if d.kind == "text" and d.tokenizer is None and d.tokenizer_vocab_size > last:
        detail = f"ids of text from 0 up, sentinels from {last} on"
        yield Finding("MT281", TRAINED_IDS, detail, [{TRAINED_IDS: last}])


@of_family("t5", Code("MT282", example=f"{TINY} {DISTANCE}=8"), reads=f"{DISTANCE} {BUCKETS}")
def distance_groups(run: RunConfig, t: T5Config) -> Iterator[Finding]:
    """Cannot group the longer distances because half of the groups are single distances and reach
    that far.
    """
    # T5 gives half of the groups to short distances, one each; the others grow with the logarithm.
    single = t.relative_attention_buckets // 2
    if t.relative_attention_distance <= single:
        detail = f"distances up to {single} have a group each"
        yield Finding("MT282", DISTANCE, detail, each(DISTANCE, [4 * single, single + 1]))


@of_family(
    "t5",
    Code(
        "MT283",
        example=(f"{TINY} parallel.recompute.granularity=full {GROUP}=3 model.t5.decoder_layers=4"),
    ),
    reads=f"{GROUP} parallel.recompute.granularity model.t5.decoder_layers model.num_layers",
)
def recomputed_groups(run: RunConfig, t: T5Config) -> Iterator[Finding]:
    """Cannot recompute whole groups of layers because this size does not divide both stacks."""
    again = run.parallel.recompute
    if again.granularity != "full" or again.num_layers is None:
        return
    encoder = run.model.num_layers
    decoder = decoder_layers(run.model)
    if encoder % again.num_layers or decoder % again.num_layers:
        both = [n for n in divisors(encoder) if decoder % n == 0]
        detail = f"groups of {again.num_layers}, {encoder} encoder and {decoder} decoder layers"
        yield Finding("MT283", GROUP, detail, each(GROUP, nearest(again.num_layers, both)))


RULES = (span_lengths, sentinel_ids, distance_groups, recomputed_groups)
