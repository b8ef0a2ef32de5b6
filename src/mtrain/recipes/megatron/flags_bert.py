"""The flags that only Megatron-LM's program for BERT reads."""

from __future__ import annotations

from typing import Any

from mtrain.config.schema.run import RunConfig
from mtrain.models.bert.config import BertConfig
from mtrain.recipes.megatron.arguments import Arguments, Draft
from mtrain.recipes.megatron.entries import spelled

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
    """Return the program's flags for a BERT of its own; empty for any other model."""
    bert: Any = run.model.bert
    if not is_megatrons(run):
        return []
    # written even if it is the default, so that the share is visible
    words = [[SHARE, spelled(bert.masked_share)]]
    return words if bert.next_sentence else [[NO_HEAD], *words]


def is_megatrons(run: RunConfig) -> bool:
    """Return whether Megatron-LM's program for BERT trains the model of a run."""
    return run.model.family == "bert" and run.model.norm_placement == "pre"
