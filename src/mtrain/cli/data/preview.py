"""`data preview`: the first samples of a configuration as a person reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from mtrain.api import load
from mtrain.cli.named_values import Word, as_words, one_of, read_words, whole
from mtrain.cli.output import new_page, say_json, write_page
from mtrain.config.compose.paths import user_path
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer
from mtrain.errors import Styled, in_a_line, say_page, say_styled
from mtrain.train.sample_page import page_of

# Loading this module must not load torch, which `previewed` does.
if TYPE_CHECKING:
    from mtrain.train.preview import Shown, Token

SPLITS = ("train", "validation", "test")
WORDS = {
    "samples": whole(3, 1, 1000, "3", "a whole number from 1 to 1000"),
    "split": Word("train", one_of(*SPLITS), "a split", "train"),
    "html": Word(None, user_path, "a file", "samples.html"),
}
USAGE = "preview [KEY=VALUE ...] [samples=N] [split=NAME] [--html FILE]"
# Pairs can be looked at whatever the objective is.
NO_LOSS = "MT328"
WIDTH = 100
# between tokens, if no colour separates them
BETWEEN = "|"


def preview(words: Sequence[str], *, as_json: bool) -> int:
    """Print the first samples of what `words` describe, or write them to a page."""
    values, overrides = read_words(as_words(words, WORDS, USAGE), WORDS)
    run = load(overrides, to_run=False, but=frozenset({NO_LOSS})).run
    page = None if values["html"] is None else new_page(values["html"])
    from mtrain.data import open_splits, prepare_for_model
    from mtrain.train.preview import previewed

    part = values["split"]
    corpus = prepare_for_model(
        run.data, model_tokenizer(run), accept_changes=run.checkpoint.accept_changes
    )
    splits = open_splits(
        run.data, run.model.vocab_size, run.trainer.seed, corpus, (part,), asked(run)
    )
    remarks = splits.remarks()
    found = previewed(run, splits, part, range(values["samples"]))
    if page is not None:
        write_page(page, page_of(found, remarks))
        say_page(f"{len(found)} samples: {page}")
    elif as_json:
        rows = [{**dataclasses.asdict(shown), "counts": shown.counts} for shown in found]
        say_json({"remarks": remarks, "samples": rows})
    else:
        say_styled(
            *([(remark, "")] for remark in remarks),
            *(line for shown in found for line in lines_of(shown)),
        )
    return 0


def lines_of(shown: Shown) -> list[Styled]:
    """Return a sample as lines: its positions, tokens, and whether they carry loss."""
    out: list[Styled] = [[("", "")], [(f"{shown.name}: {shown.heading}", "bold")]]
    out += [[(f"  {shown.place}", "dim")]] if shown.place else []
    out += [[("  encoder reads: ", "dim"), (in_a_line(shown.read), "")]] if shown.read else []
    for index, document in enumerate(shown.documents, 1):
        if len(shown.documents) > 1 and not document[0].padding:
            positions = f"positions {document[0].position} to {document[-1].position}"
            out.append([(f"  document {index}, {positions}", "bold")])
        for (padding, learned), run in groupby(
            document, lambda token: (token.padding, token.weight > 0)
        ):
            tokens = list(run)
            if padding:
                out.append([(f"{tokens[0].position:>7}        {len(tokens)} of padding", "dim")])
            else:
                out += _lines(tokens, learned)
    return out


def _lines(tokens: Sequence[Token], learned: bool) -> list[Styled]:
    """Return tokens that all carry loss, or none of them; one that ends a document ends a line."""
    out: list[Styled] = []
    style = "loss" if learned else ""
    first = 0
    for last, token in enumerate(tokens, 1):
        if token.ends or last == len(tokens):
            for position, line in _wrapped(tokens[first:last]):
                mark = "loss  " if learned else "      "
                out.append([(f"{position:>7}  ", "dim"), (mark, style), (line, style)])
            first = last
        if token.ends:
            out.append([("         a document ends, and the next one sees it", "dim")])
    return out


def _wrapped(tokens: Sequence[Token]) -> list[tuple[int, str]]:
    """Return lines of tokens, each with the position of its first one."""
    out: list[tuple[int, str]] = []
    for token in tokens:
        text = in_a_line(token.text) + (f" -> {in_a_line(token.instead)}" if token.instead else "")
        if out and len(out[-1][1]) + len(text) < WIDTH:
            out[-1] = out[-1][0], f"{out[-1][1]}{BETWEEN}{text}"
        else:
            out.append((token.position, text))
    return out
