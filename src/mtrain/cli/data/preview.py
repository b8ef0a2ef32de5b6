"""`data preview`: the first samples of a configuration as a person reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from mtrain.api import load
from mtrain.cli.html import html_page, text_of
from mtrain.cli.named_values import Word, as_words, one_of, read_words, whole
from mtrain.cli.output import new_page, say_json, write_page
from mtrain.config.compose.paths import user_path
from mtrain.config.resolve.batches import asked
from mtrain.config.resolve.model_tokenizer import model_tokenizer
from mtrain.errors import Styled, in_a_line, say_page, say_styled

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
# Pairs can be looked at, although no loss learns from them.
NO_LOSS = "MT343"
WIDTH = 100
# between tokens, where there is no colour to tell them apart
BETWEEN = "|"
# A row of the page has at most this many tokens, and ends with a token that ends a line.
ROW = 20
HEAD = (
    '<p><span class="t loss">carries loss</span> <span class="t">read, and not learned</span> The'
    " number in the margin is the position of the first token of its row; a token under the pointer"
    " says its id.</p>"
)


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
    found = previewed(run, splits, part, values["samples"])
    if page is not None:
        write_page(page, _page_of(found, remarks))
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


def _page_of(found: Sequence[Shown], remarks: Sequence[str]) -> str:
    """Return the page of some samples."""
    parts = ["<h1>Samples</h1>", HEAD]
    parts += [f'<p class="dim">{text_of(remark)}</p>' for remark in remarks]
    parts += [part for shown in found for part in _sample(shown)]
    return html_page("data preview", "preview.css", parts)


def _sample(shown: Shown) -> list[str]:
    out = [f"<h2>{text_of(shown.name)}</h2>", f"<p>{text_of(shown.heading)}</p>"]
    if shown.place:
        out.append(f'<p class="dim">{text_of(shown.place)}</p>')
    if shown.read:
        out.append(f'<p>encoder reads: <span class="text">{text_of(shown.read)}</span></p>')
    for document in shown.documents:
        padding = [token for token in document if token.padding]
        rows = [_row(row[0].position, "".join(map(_token, row))) for row in _rows(document)]
        if padding:
            text = f'<span class="pad">{len(padding)} of padding</span>'
            rows.append(_row(padding[0].position, text))
        out.append(f'<div class="document">{"".join(rows)}</div>')
    return out


def _rows(document: Sequence[Token]) -> list[list[Token]]:
    """Return the tokens of a document that are no padding, by rows."""
    out: list[list[Token]] = []
    for token in document:
        if token.padding:
            continue
        if not out or len(out[-1]) == ROW or "\n" in out[-1][-1].text:
            out.append([])
        out[-1].append(token)
    return out


def _row(position: int, inside: str) -> str:
    """Return a row: the position of its first token in the margin, which is no part of the text,
    and the text.
    """
    margin = f'<span class="n" aria-hidden="true">{position}</span>'
    return f'<div class="row">{margin}<span class="text">{inside}</span></div>'


def _token(token: Token) -> str:
    kind = "t loss" if token.weight else "t"
    weight = f", weighs {token.weight:.4g}" if token.weight else ""
    title = f"id {token.id}, position {token.position}{weight}"
    instead = f'<span class="instead">{text_of(token.instead)}</span>' if token.instead else ""
    return f'<span class="{kind}" title="{text_of(title)}">{text_of(token.text)}</span>{instead}'
