"""`recipe`: list, show, new, diff, lock, verify, import, export. None of them imports torch."""

from __future__ import annotations

from mtrain.cli.pages import page_of
from mtrain.cli.subverbs import function_of
from mtrain.errors import say_page

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
    """Run the subverb that `argv` begins with; returns the exit code.

    Raises:
        ConfigError: there is no such subverb, or it refuses its arguments.
    """
    if not argv:
        say_page(page_of("recipe"))
        return 2
    code: int = function_of("recipe", argv[0], SUBVERBS)(argv[1:])
    return code
