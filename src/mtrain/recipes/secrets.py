"""What a script may hold that must not be shown or written on: passwords, keys, tokens of services."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

HIDDEN = "***"
MIN_LENGTH = 4

_WORDS = frozenset(
    (
        "key",
        "apikey",
        "token",
        "secret",
        "password",
        "passwd",
        "passphrase",
        "credential",
        "credentials",
        "auth",
        "pat",
    )
)
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{12,}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]+|\b[0-9a-fA-F]{40}\b|(?<=://)[^/@\s]+:[^/@\s]+(?=@)"
)


def names_secret(name: str) -> bool:
    """Whether a variable or a flag is named as one that holds a secret."""
    return not _WORDS.isdisjoint(re.split(r"[-_.]+", name.lower()))


class Secrets:
    """The secrets of one script: by the names of its variables, and by their shape."""

    def __init__(self, variables: Mapping[str, Iterable[str]]) -> None:
        held = {value for name, values in variables.items() if names_secret(name) for value in values}
        self.values = sorted((v for v in held if len(v) >= MIN_LENGTH), key=len, reverse=True)

    def hide(self, text: str) -> str:
        """`text` with every secret blacked out."""
        for value in self.values:
            text = text.replace(value, HIDDEN)
        return _SHAPES.sub(HIDDEN, text)

    def within(self, text: str) -> bool:
        """Whether `text` holds a secret."""
        return self.hide(text) != text
