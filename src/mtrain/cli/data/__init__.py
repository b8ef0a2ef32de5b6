"""`data`: what becomes of text before training.

Each subverb is a word of `SUBVERBS`, a function and a page.
"""

from __future__ import annotations

from mtrain.cli.subverbs import function_of
from mtrain.errors import say_page

SUBVERBS = {
    "preview": "preview",
    "tokenize": "tokenize",
    "inspect": "look",
    "verify": "look",
    "stats": "look",
    "train-tokenizer": "train",
    "merge": "change",
    "split": "change",
    "sample": "change",
    "dedup": "change",
}
"""Word -> module of this package, whose function has the name of the word (`_` for `-`); `pages`
has its page.
"""


def run(argv: list[str], *, debug: bool) -> int:
    """Run the subverb that `argv` begins with; returns the exit code.

    Raises:
        ConfigError: there is no such subverb, or it refuses its arguments.
    """
    words = [word for word in argv if word != "--json"]
    if not words:
        from mtrain.cli.pages import page_of

        say_page(page_of("data"))
        return 2
    code: int = function_of("data", words[0], SUBVERBS)(words[1:], as_json="--json" in argv)
    return code
