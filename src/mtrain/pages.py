"""Pages of one file that work offline: their frame and style, and text that is no markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from mtrain.errors import in_a_line, visible

TEMPLATES = Path(__file__).parent / "cli/templates"


def html_page(title: str, style: str, body: Iterable[str]) -> str:
    """Return a page with the CSS of the file `style`; its policy forbids scripts and the network.

    Only `title` is escaped here: `body` is markup.
    """
    page = Template((TEMPLATES / "page.html").read_text(encoding="utf-8"))
    css = (TEMPLATES / style).read_text(encoding="utf-8")
    return page.substitute(title=text_of(title), style=css, body="\n".join(body))


def text_of(value: Any) -> str:
    """Return text for a page: codes for unprintable characters, and no markup."""
    return escape(visible(in_a_line(str(value))))
