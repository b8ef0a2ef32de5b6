"""The objective of a decoder-only transformer: the next token, within documents where they are
packed, and of chats the parts that are trained.
"""

from __future__ import annotations

from mtrain.config.schema.run import RunConfig
from mtrain.data import BlendOfDocuments, ChatSamples, PairSamples, Splits, WholeDocuments
from mtrain.data.answers import answer_collator
from mtrain.data.batch import (
    Collator,
    Packing,
    chat_collator,
    document_collator,
    next_token_collator,
)
from mtrain.data.pairs import MockPairs, packed_pair_collator, pair_collator
from mtrain.data.samples.token_stream import FillInTheMiddle
from mtrain.errors import ConfigError


def require_labels_read(run: RunConfig) -> None:
    """Raise ConfigError if an objective of pairs gets single, labelled answers."""
    name = run.objective.name
    if run.objective.contrasts:
        rule = (
            f"{run.data.path} has single answers with labels, and {name} compares two of a prompt"
        )
        raise ConfigError.of("MT395", "objective.name", name, rule, "objective=kto")


def reads_margins(run: RunConfig, splits: Splits) -> bool:
    """Return whether a run reads how much better the chosen answers of its data are.

    Raises ConfigError if the file has margins that the objective does not read, or lacks scores
    that margins are to come from.
    """
    o = run.objective
    meta = splits.corpus.meta
    scored = meta.get("preferences") == "scores"
    key = "objective.score_margins"
    if o.score_margins and run.data.kind == "preference" and not scored:
        rule = f"cannot make margins of scores because {run.data.path} has no scored answers"
        raise ConfigError.of("MT496", key, True, rule, f"{key}=false")
    if meta.get("margins") and not o.reads_values:
        rule = f"cannot use the column margin of {run.data.path} because {o.name} reads no margins"
        fix = "objective=reward, or data.ignored_keys=[margin]"
        raise ConfigError.of("MT496", "objective.name", o.name, rule, fix)
    return bool(meta.get("margins")) or (scored and o.score_margins)


def collator(run: RunConfig, splits: Splits, part: str) -> Collator:
    """Return the micro-batches of `part` of the splits."""
    source = getattr(splits, part)
    data = run.data
    ends = splits.document_ends
    if run.objective.pairs:
        o = run.objective
        if isinstance(source, ChatSamples) and source.chats.group == 1:
            require_labels_read(run)
        if data.packed:
            is_file = isinstance(source, ChatSamples)
            rows = source if is_file else MockPairs(source, data.packed_multiple or 1)
            return packed_pair_collator(rows)
        answers = source if isinstance(source, PairSamples | ChatSamples) else MockPairs(source)
        return pair_collator(
            answers,
            mismatched=o.mismatches,
            at_ends=o.reads_values,
            margins=reads_margins(run, splits),
        )
    if run.objective.rolls:
        most = run.rollout.tokens(data.length)
        o = run.objective
        return answer_collator(source, o.divisor, most, criticised=o.criticises)
    if isinstance(source, ChatSamples):
        return chat_collator(source)
    if isinstance(source, WholeDocuments | BlendOfDocuments):
        return document_collator(source, splits.masked_eod)
    packing = Packing(ends, data.packed_multiple or 1) if data.packed else None
    moved = None
    if data.fim.rate and data.fim.ids is not None:
        moved = FillInTheMiddle(
            data.fim.rate, data.fim.spm_rate, data.fim.ids, ends, run.trainer.seed, part
        )
    return next_token_collator(splits.masked_eod, packing, moved)
