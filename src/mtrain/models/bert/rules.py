"""Rules of the family bert: special tokens, and the room that they leave in a sample."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Change, Finding
from mtrain.config.rules.rule import Code
from mtrain.config.schema.run import RunConfig
from mtrain.models.bert.config import BertConfig

FEWEST_IDS = 1024
"""Of a tokenizer that is worth training."""
IDS = ("mask_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
OWN_IDS = [f"model.bert.{name}" for name in IDS]


@of_family(
    "bert",
    Code("MT250", example="model=bert_tiny model.bert.mask_token_id=70000"),
    reads=" ".join(("model.vocab_size", *OWN_IDS)),
)
def special_tokens_are_ids_of_their_own(run: RunConfig, b: BertConfig) -> Iterator[Finding]:
    """Each special token is a token of the vocabulary, and no two are the same."""
    vocab = run.model.vocab_size
    taken = dict[int, str]()
    for name in IDS:
        token = getattr(b, name)
        if token is None:
            continue
        path = f"model.bert.{name}"
        free = next(
            (i for i in range(vocab - 1, max(-1, vocab - 6), -1) if i not in b.special_ids), None
        )
        instead: tuple[Change, ...] = () if free is None else ({path: free},)
        none: tuple[Change, ...] = () if name == "mask_token_id" else ({path: None},)
        if token >= vocab:
            rule = f"the vocabulary has ids 0 to {vocab - 1} (model.vocab_size {vocab})"
            yield Finding("MT250", path, rule, (*instead, *none, {"model.vocab_size": token + 1}))
        elif token in taken:
            rule = f"{taken[token]} is the same token, {token}"
            yield Finding("MT250", path, rule, (*none, *instead))
        taken.setdefault(token, path)


@of_family(
    "bert",
    Code("MT251", example="model=bert_tiny data.seq_length=4"),
    reads=(
        "data.seq_length model.bert.next_sentence model.bert.cls_token_id model.bert.sep_token_id"
    ),
)
def special_tokens_leave_room_for_text(run: RunConfig, b: BertConfig) -> Iterator[Finding]:
    """A sample has text next to its special tokens, in each of its sentences."""
    least = b.added() + (4 if b.next_sentence else 2)
    if run.data.length < least:
        rule = (
            f"{run.data.length} tokens hold {b.added()} special ones and too little text: {least}"
            " are the fewest"
        )
        fixes: tuple[Change, ...] = tuple({"data.seq_length": n} for n in (32, 64, least))
        yield Finding("MT251", "data.seq_length", rule, fixes)


@of_family(
    "bert",
    Code("MT252", example="model=bert_tiny model.bert.type_vocab_size=1"),
    reads="model.bert.type_vocab_size model.bert.next_sentence",
)
def two_sentences_have_two_kinds(run: RunConfig, b: BertConfig) -> Iterator[Finding]:
    """Two sentences have two kinds of tokens."""
    if b.next_sentence and b.type_vocab_size < 2:
        rule = "next_sentence has a sentence of kind 0 and one of kind 1"
        fixes: tuple[Change, ...] = (
            {"model.bert.type_vocab_size": 2},
            {"model.bert.next_sentence": False},
        )
        yield Finding("MT252", "model.bert.type_vocab_size", rule, fixes)


@of_family(
    "bert",
    Code(
        "MT253",
        severity="warning",
        example="model=bert_tiny data=stdlib model.bert.mask_token_id=103",
    ),
    reads=" ".join(
        (
            "data.kind data.tokenizer data.tokenizer_vocab_size model.vocab_size",
            *OWN_IDS,
        )
    ),
)
def special_tokens_are_no_text(run: RunConfig, b: BertConfig) -> Iterator[Finding]:
    """The ids of a tokenizer that is trained here are all of text: a special token is
    another one.
    """
    d = run.data
    vocab = run.model.vocab_size
    if d.kind != "text" or d.tokenizer is not None:
        return
    lowest = min(b.special_ids)
    for last, name in enumerate(IDS, 1):
        token = getattr(b, name)
        if token is None or token >= d.tokenizer_vocab_size:
            continue
        rule = (
            f"is a token of text: data.tokenizer_vocab_size {d.tokenizer_vocab_size} makes all ids"
            " below"
        )
        fixes: list[Change] = (
            [{"data.tokenizer_vocab_size": lowest}] if lowest >= FEWEST_IDS else []
        )
        fixes += (
            [{f"model.bert.{name}": vocab - last}] if vocab - last >= d.tokenizer_vocab_size else []
        )
        fixes += [{f"model.bert.{name}": None}] if name != "mask_token_id" else []
        yield Finding("MT253", f"model.bert.{name}", rule, tuple(fixes))


RULES = (
    special_tokens_are_ids_of_their_own,
    special_tokens_leave_room_for_text,
    two_sentences_have_two_kinds,
    special_tokens_are_no_text,
)
