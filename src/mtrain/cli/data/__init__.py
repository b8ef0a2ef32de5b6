"""`data`: what becomes of text before training. Each subverb is a word of `SUBVERBS`, a function and a page."""

from __future__ import annotations

import difflib
from importlib import import_module

from mtrain.errors import ConfigError, Problem, say_page

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
"""Word -> module of this package, whose function has the name of the word (`_` for `-`); `pages` has its page."""


def run(argv: list[str], *, debug: bool) -> int:
    """Runs the subverb that `argv` begins with; returns the exit code.

    Raises:
        ConfigError: there is no such subverb, or it refuses its arguments.
    """
    words = [word for word in argv if word != "--json"]
    if not words:
        from mtrain.cli.pages import page_of

        say_page(page_of("data"))
        return 2
    word = words[0]
    if word not in SUBVERBS:
        near = difflib.get_close_matches(word, SUBVERBS, n=2, cutoff=0.5)
        rule = f"{word}: there is no such subverb; subverbs: {', '.join(SUBVERBS)}"
        fix = " or ".join(f"data {name}" for name in near) or "data --help"
        raise ConfigError([Problem("MT010", "", None, rule, fix, "command line")])
    function = getattr(import_module(f"mtrain.cli.data.{SUBVERBS[word]}"), word.replace("-", "_"))
    code: int = function(words[1:], as_json="--json" in argv)
    return code
