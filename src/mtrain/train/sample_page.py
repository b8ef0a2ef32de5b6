"""The page of samples, which `data preview` and the report of an anomaly write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtrain.pages import html_page, text_of

# Loading this module must not load torch, which `preview` does.
if TYPE_CHECKING:
    from mtrain.train.preview import Shown, Token

# A row of the page has at most this many tokens, and ends with a token that ends a line.
ROW = 20
HEAD = (
    '<p><span class="t loss">carries loss</span> <span class="t">read, and not learned</span> The'
    " number in the margin is the position of the first token of its row; a token under the pointer"
    " says its id.</p>"
)


def page_of(found: Sequence[Shown], remarks: Sequence[str]) -> str:
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
    """Return a row: the place of its first token in the margin, outside the text, and the text."""
    margin = f'<span class="n" aria-hidden="true">{position}</span>'
    return f'<div class="row">{margin}<span class="text">{inside}</span></div>'


def _token(token: Token) -> str:
    kind = "t loss" if token.weight else "t"
    weight = f", weighs {token.weight:.4g}" if token.weight else ""
    title = f"id {token.id}, position {token.position}{weight}"
    instead = f'<span class="instead">{text_of(token.instead)}</span>' if token.instead else ""
    return f'<span class="{kind}" title="{text_of(title)}">{text_of(token.text)}</span>{instead}'
