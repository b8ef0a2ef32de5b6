"""The verbs. To add one, add `pages/NAME.yaml` with its flags, its function, and its name here."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mtrain.cli.command import Page, Paged, Subverbs, Verb
from mtrain.errors import own_yaml

NAMES = (
    "train",
    "check",
    "show",
    "plan",
    "tune",
    "prove",
    "rehearse",
    "resume",
    "render",
    "submit",
    "export",
    "convert",
    "generate",
    "evaluate",
    "data",
    "recipe",
    "choices",
    "schema",
    "engines",
    "doctor",
    "goodput",
    "compare",
    "bisect",
    "report",
    "watch",
    "profile",
    "checkpoint",
    "completion",
    "explain",
)
PAGES = Path(__file__).with_name("pages")


@cache
def command_of(name: str) -> Verb | Subverbs:
    """Return the command that the page of a verb declares."""
    page = Page(**own_yaml(PAGES / f"{name}.yaml"))
    return Subverbs(name, page) if page.subverbs else Verb(name, page)


def commands() -> Iterator[tuple[str, Paged]]:
    """Yield every verb and subverb with its whole name."""
    for name in NAMES:
        command = command_of(name)
        yield name, command
        if isinstance(command, Subverbs):
            yield from ((f"{name} {sub}", inner) for sub, inner in command.commands.items())
