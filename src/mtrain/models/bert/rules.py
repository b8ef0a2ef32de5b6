"""Rules of the family bert: special tokens, and the room that they leave in a sample."""

from __future__ import annotations

from collections.abc import Iterator

from mtrain.config.rules.families import of_family
from mtrain.config.rules.finding import Change, Finding, each
from mtrain.config.rules.rule import Code
from mtrain.config.schema.run import RunConfig
from mtrain.models.bert.config import BertConfig

# A tokenizer with fewer ids is not worth training.
FEWEST_IDS = 1024
TINY = "model=bert_tiny"
IDS = ("mask_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
OWN_IDS = " ".join(f"model.bert.{name}" for name in IDS)
TYPES = "model.bert.type_vocab_size"
TRAINED_IDS = "data.tokenizer_vocab_size"


@of_family(
    "bert",
    Code("MT250", example=f"{TINY} model.bert.mask_token_id=70000"),
    reads=f"model.vocab_size {OWN_IDS}",
)
def special_token_ids(run: RunConfig, b: BertConfig) -> Iterator[Finding]:
    """Cannot use this special token because each must be a different id of the vocabulary."""
    vocab = run.model.vocab_size
    taken = dict[int, str]()
    for name in IDS:
        token = getattr(b, name)
        if token is None:
            continue
        path = f"model.bert.{name}"
        # The last ids are the least likely to be words of a trained tokenizer.
        last_ids = range(vocab - 1, max(-1, vocab - 6), -1)
        instead = each(path, [i for i in last_ids if i not in b.special_ids][:1])
        # BERT cannot train without a mask; the other tokens are optional.
        none = each(path, [None] if name != "mask_token_id" else [])
        if token >= vocab:
            fixes = [*instead, *none, {"model.vocab_size": token + 1}]
            yield Finding("MT250", path, f"ids 0 to {vocab - 1}, model.vocab_size {vocab}", fixes)
        elif token in taken:
            yield Finding("MT250", path, f"{taken[token]} is {token} too", [*none, *instead])
        taken.setdefault(token, path)


@of_family(
    "bert",
    Code("MT251", example=f"{TINY} data.seq_length=4"),
    reads=(
        "data.seq_length model.bert.next_sentence model.bert.cls_token_id model.bert.sep_token_id"
    ),
)
def sample_room(run: RunConfig, b: BertConfig) -> Iterator[Finding]:
    """Cannot fit text into a sample because its special tokens leave too little room."""
    # Two sentences need two tokens of text each, so that one can be masked.
    least = b.added() + (4 if b.next_sentence else 2)
    if run.data.length < least:
        detail = f"{run.data.length} tokens, {b.added()} special ones; at least {least}"
        yield Finding("MT251", "data.seq_length", detail, each("data.seq_length", [32, 64, least]))


@of_family(
    "bert",
    Code("MT252", example=f"{TINY} {TYPES}=1"),
    reads=f"{TYPES} model.bert.next_sentence",
)
def sentence_types(run: RunConfig, b: BertConfig) -> Iterator[Finding]:
    """Cannot distinguish two sentences because tokens have only one type."""
    if b.next_sentence and b.type_vocab_size < 2:
        fixes: list[Change] = [{TYPES: 2}, {"model.bert.next_sentence": False}]
        yield Finding("MT252", TYPES, "next_sentence is true", fixes)


@of_family(
    "bert",
    Code("MT253", severity="warning", example=f"{TINY} data=stdlib model.bert.mask_token_id=103"),
    reads=f"data.kind data.tokenizer {TRAINED_IDS} model.vocab_size {OWN_IDS}",
)
def special_tokens_in_text(run: RunConfig, b: BertConfig) -> Iterator[Finding]:
    """Cannot recognise this special token because the tokenizer trained here uses its id for
    text.
    """
    d = run.data
    vocab = run.model.vocab_size
    size = d.tokenizer_vocab_size
    if d.kind != "text" or d.tokenizer is not None:
        return
    # The trained tokenizer takes the ids from 0 up, so fewer of them may free the special ones.
    lowest = min(b.special_ids)
    for last, name in enumerate(IDS, 1):
        token = getattr(b, name)
        if token is None or token >= size:
            continue
        path = f"model.bert.{name}"
        fixes: list[Change] = [
            *each(TRAINED_IDS, [lowest] if lowest >= FEWEST_IDS else []),
            *each(path, [vocab - last] if vocab - last >= size else []),
            *each(path, [None] if name != "mask_token_id" else []),
        ]
        yield Finding("MT253", path, f"ids 0 to {size - 1} are of text", fixes)


RULES = (special_token_ids, sample_room, sentence_types, special_tokens_in_text)
