"""The pages of `data` and of its subverbs; a new subverb is a line of `SUBVERBS`, a module and a page here."""

from __future__ import annotations

from mtrain.cli.page import Page

DATA_PAGES: dict[str, Page] = {}
"""Subverb -> page."""
DATA = Page(
    "data SUBVERB ...",
    "What becomes of text before training. `data SUBVERB --help` says more. `--name VALUE` and `name=VALUE` are the\n"
    "same.",
    tuple((name, page.text.partition("\n")[0]) for name, page in DATA_PAGES.items()),
    (),
    tuple(page.examples[0] for page in DATA_PAGES.values()),
)
