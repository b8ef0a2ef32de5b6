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
.document { border-left: 3px solid #8888; margin: .6rem 0; padding: .1rem 0 .1rem .8rem; }
.text { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
.t { white-space: pre-wrap; border-right: 1px solid #8886; padding: .1em 0; }
.loss { background: #2da44e44; font-weight: 600; } .instead { background: #bf870044; }
.pad { opacity: .5; } .n { opacity: .45; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(found: Sequence[Shown], remarks: Sequence[str]) -> str:
    """The page of some samples."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>data preview</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<style>{STYLE}</style></head><body>",
        "<h1>Samples</h1>",
        '<p><span class="t loss">carries loss</span> <span class="t">read, and not learned</span> '
        "A number is the position of the token behind it; a token under the pointer says its id.</p>",
        *(f'<p class="dim">{_text(remark)}</p>' for remark in remarks),
        *(part for shown in found for part in _sample(shown)),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _sample(shown: Shown) -> list[str]:
    out = [f"<h2>{_text(shown.name)}</h2>", f"<p>{_text(shown.heading)}</p>"]
    out += [f'<p class="dim">{_text(shown.place)}</p>'] if shown.place else []
    out += [f'<p>encoder reads: <span class="text">{_text(shown.read)}</span></p>'] if shown.read else []
    for document in shown.documents:
        padding = sum(token.padding for token in document)
        tokens = "".join(_token(token, index) for index, token in enumerate(document) if not token.padding)
        end = f'<span class="pad"> {padding} of padding</span>' if padding else ""
        out.append(f'<div class="document text">{tokens}{end}</div>')
    return out


def _token(token: Token, index: int) -> str:
    kind = "t loss" if token.weight else "t"
    weight = f", weighs {token.weight:.4g}" if token.weight else ""
    title = f"id {token.id}, position {token.position}{weight}"
    number = f'<span class="n">{token.position} </span>' if index % 20 == 0 else ""
    instead = f'<span class="instead">{_text(token.instead)}</span>' if token.instead else ""
    line = "<br>" if "\n" in token.text else ""
    return f'{number}<span class="{kind}" title="{_text(title)}">{_text(token.text)}</span>{instead}{line}'


def _text(text: str) -> str:
    """Text for a page: what cannot be printed becomes its code, and nothing in it is markup."""
    return escape(visible(in_a_line(text)))
