"""`recipe`: list, show, new, diff, lock, verify, import, export. None of them imports torch."""

from __future__ import annotations

import difflib
from importlib import import_module

from mtrain.cli.pages import page_of
from mtrain.errors import ConfigError, Problem, say_page

SUBVERBS = {
    "list": "listing",
    "show": "listing",
    "new": "new",
    "diff": "diff",
    "lock": "lock",
    "verify": "lock",
    "import": "exchange",
    "export": "exchange",
}
"""Word -> module of this package; `cli.pages` says what each does."""


def run(argv: list[str], *, debug: bool) -> int:
    """Runs the subverb that `argv` begins with; returns the exit code.

    Raises:
        ConfigError: there is no such subverb, or it refuses its arguments.
    """
    if not argv:
        say_page(page_of("recipe"))
        return 2
    word = argv[0]
    if word not in SUBVERBS:
        near = difflib.get_close_matches(word, SUBVERBS, n=2, cutoff=0.5)
        rule = f"{word}: there is no such subverb; subverbs: {', '.join(SUBVERBS)}"
        fix = " or ".join(f"recipe {name}" for name in near)
        raise ConfigError([Problem("MT010", "", None, rule, fix, "command line")])
    function = f"{word}_" if word in ("import", "list") else word
    code: int = getattr(import_module(f"mtrain.cli.recipe.{SUBVERBS[word]}"), function)(argv[1:])
    return code
