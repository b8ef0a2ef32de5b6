"""`data preview`: the first samples of a configuration as a person reads them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain import strict_json
from mtrain.api import load
from mtrain.cli.data.arguments import as_words
from mtrain.cli.named_values import Word, number, read_words
from mtrain.config.compose.origins import COMMAND_LINE
from mtrain.config.compose.paths import user_path
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer
from mtrain.errors import ConfigError, Problem, Styled, in_a_line, say_page, say_styled

if TYPE_CHECKING:  # it imports torch
    from mtrain.train.preview import Shown, Token

WORDS = {
    "samples": Word(3, number(int, 1, 1000), "a whole number from 1 to 1000", "samples=3"),
    "split": Word(
        "train",
        {name: name for name in ("train", "validation", "test")}.__getitem__,
        "a split",
        "split=train",
    ),
    "html": Word(None, user_path, "a file", "html=samples.html"),
}
USAGE = "preview [KEY=VALUE ...] [samples=N] [split=NAME] [--html FILE]"
NO_LOSS = "MT343"
"""The code of pairs, which no loss learns from: they can be looked at."""
WIDTH = 100
BETWEEN = "|"
"""Between tokens, where there is no colour to tell them apart."""


def preview(argv: Sequence[str], *, as_json: bool) -> int:
    """Print the first samples of what `argv` describes, or write them to a page."""
    values, overrides = read_words(as_words(argv, WORDS, USAGE), WORDS)
    run = load(overrides, to_run=False, but=frozenset({NO_LOSS})).run
    page: Path | None = values["html"]
    if page is not None and os.path.lexists(page):
        rule = f"{page} is there already; nothing is written over"
        raise ConfigError(
            [
                Problem(
                    "MT704", "html", str(page), rule, "--html FILE with another name", COMMAND_LINE
                )
            ]
        )
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
    found = previewed(run, splits, part, values["samples"])
    if page is not None:
        from mtrain.cli.data.preview_page import page_of

        try:
            with page.open("x", encoding="utf-8") as file:
                file.write(page_of(found, remarks))
        except OSError as error:
            rule = f"cannot be written: {error.strerror}"
            fix = "--html FILE in an existing folder"
            raise ConfigError(
                [Problem("MT704", "html", str(page), rule, fix, COMMAND_LINE)]
            ) from None
        say_page(f"{len(found)} samples: {page}")
    elif as_json:
        rows = [{**dataclasses.asdict(shown), "counts": shown.counts} for shown in found]
        say_page(strict_json.dumps({"remarks": remarks, "samples": rows}, indent=2))
    else:
        say_styled(
            *([(remark, "")] for remark in remarks),
            *(line for shown in found for line in lines_of(shown)),
        )
    return 0


def lines_of(shown: Shown) -> list[Styled]:
    """Return a sample as lines: in front of each the position of its first token, and whether its
    tokens carry loss.
    """
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
                out.append(
                    [
                        (f"{position:>7}  ", "dim"),
                        ("loss  " if learned else "      ", style),
                        (line, style),
                    ]
                )
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
