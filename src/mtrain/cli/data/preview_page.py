"""The page of `data preview --html`: one file without scripts, in which all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mtrain.errors import in_a_line, visible
from mtrain.train.preview import Shown, Token

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.7 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1rem; margin: 2.5rem 0 0; } p { margin: .2rem 0; } .dim { opacity: .65; }
.document { margin: .6rem 0; }
.row { display: grid; grid-template-columns: 4.5rem minmax(0, 1fr); }
.row > .text { border-left: 3px solid #8888; padding: 0 0 0 .8rem; }
.n { opacity: .55; text-align: right; padding-right: .8rem; user-select: none; font-variant-numeric: tabular-nums; }
.text { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
.t { white-space: pre-wrap; border-right: 1px solid #8886; padding: .1em 0; }
.loss { background: #2da44e44; font-weight: 600; } .instead { background: #bf870044; }
.pad { opacity: .5; }
@media (max-width: 40rem) { .row { grid-template-columns: 3rem minmax(0, 1fr); } .n { padding-right: .4rem; } }
"""
ROW = 20
"""Tokens of a row, at most; a row ends with a token that ends a line."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(found: Sequence[Shown], remarks: Sequence[str]) -> str:
    """Return the page of some samples."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>data preview</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<style>{STYLE}</style></head><body>",
        "<h1>Samples</h1>",
        (
            '<p><span class="t loss">carries loss</span> <span class="t">read, and not'
            " learned</span> The number in the margin is the position of the first token of its"
            " row; a token under the pointer says its id.</p>"
        ),
        *(f'<p class="dim">{_text(remark)}</p>' for remark in remarks),
        *(part for shown in found for part in _sample(shown)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _sample(shown: Shown) -> list[str]:
    out = [f"<h2>{_text(shown.name)}</h2>", f"<p>{_text(shown.heading)}</p>"]
    if shown.place:
        out.append(f'<p class="dim">{_text(shown.place)}</p>')
    if shown.read:
        out.append(f'<p>encoder reads: <span class="text">{_text(shown.read)}</span></p>')
    for document in shown.documents:
        padding = [token for token in document if token.padding]
        rows = [_row(row[0].position, "".join(map(_token, row))) for row in _rows(document)]
        if padding:
            rows.append(
                _row(padding[0].position, f'<span class="pad">{len(padding)} of padding</span>')
            )
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
    instead = f'<span class="instead">{_text(token.instead)}</span>' if token.instead else ""
    return f'<span class="{kind}" title="{_text(title)}">{_text(token.text)}</span>{instead}'


def _text(text: str) -> str:
    """Return text for a page: what cannot be printed becomes its code, and nothing in
    it is markup.
    """
    return escape(visible(in_a_line(text)))
