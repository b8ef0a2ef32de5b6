"""The verbs. To add one, add `pages/NAME.yaml` with its flags and page, its function, and its name
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from mtrain.cli.command import Page, Paged, Subverbs, Verb

NAMES = (
    "train",
    "check",
    "show",
    "plan",
    "tune",
    "prove",
    "rehearse",
    "resume",
    "export",
    "convert",
    "generate",
    "evaluate",
    "data",
    "recipe",
    "choices",
    "schema",
    "engines",
    "completion",
    "explain",
)
PAGES = Path(__file__).with_name("pages")
# A shell that completes a word reads all pages: the loader in C takes a tenth of the time.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def command_of(name: str) -> Verb | Subverbs:
    """Return the command that the page of a verb declares."""
    page = Page(**yaml.load((PAGES / f"{name}.yaml").read_text(encoding="utf-8"), LOADER))
    return Subverbs(name, page) if page.subverbs else Verb(name, page)


def commands() -> Iterator[tuple[str, Paged]]:
    """Yield every verb and subverb with its whole name."""
    for name in NAMES:
        command = command_of(name)
        yield name, command
        if isinstance(command, Subverbs):
            yield from ((f"{name} {sub}", inner) for sub, inner in command.commands.items())
