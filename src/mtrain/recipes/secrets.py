"""Secrets in a script, which must be neither shown nor written: passwords, keys, tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

HIDDEN = "***"
# shorter values would black out parts of ordinary words
MIN_LENGTH = 4

_SECRET = frozenset(
    (
        "apikey",
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
_PERHAPS = frozenset(("key", "token"))
"""Words that name a secret, except the keys of attention and the tokens of a text."""
_SERVICES = frozenset(
    re.findall(
        r"\w+",
        "api access private ssh hf huggingface wandb aws s3 azure gcp ngc github gitlab openai bot",
    )
)
_OF_MODELS = frozenset(
    re.findall(
        r"\w+",
        """
        num head heads dim dims size len length width rank linear attention attn query queries
        value values qk kv layer layers norm conv bos eos eod eot pad padding mask unk sep cls sos
        special image video audio vision think begin end start stop first last prompt text label
        input output loss per max min drop dropping router expert experts dispatcher embedding
        type count json column weight
        """,
    )
)
_SHAPES = re.compile(
    "|".join(
        (
            r"hf_[A-Za-z0-9]{16,}",
            r"sk-[A-Za-z0-9_-]{16,}",
            r"gh[pousr]_[A-Za-z0-9]{20,}",
            r"glpat-[\w-]{16,}",
            r"AKIA[0-9A-Z]{12,}",
            r"xox[abprs]-[\w-]{10,}",
            r"eyJ[\w-]{10,}\.[\w-]+\.[\w-]+",
            r"\b[0-9a-fA-F]{40}\b",
            r"(?<=://)[^/@\s]+:[^/@\s]+(?=@)",
        )
    )
)
"""Tokens of known services, keys of 40 hexadecimal digits, and credentials in an address."""


def names_secret(name: str) -> bool:
    """Return whether a variable or a flag has the name of a secret."""
    words = set(re.split(r"[-_.]+", name.lower()))
    if name.startswith("--") and "token" in words and len(words - {""}) > 1:
        words.discard("token")  # in flags, tokens are those of a text unless a service is named
        return not words.isdisjoint(_SECRET | _SERVICES)
    if words.isdisjoint(_PERHAPS) or not words.isdisjoint(_SECRET):
        return not words.isdisjoint(_SECRET)
    return words.isdisjoint(_OF_MODELS) or not words.isdisjoint(_SERVICES)


class Secrets:
    """The secrets of one script, known by the names of their variables and by their shape."""

    def __init__(self, variables: Mapping[str, Iterable[str]]) -> None:
        held = {
            value for name, values in variables.items() if names_secret(name) for value in values
        }
        # the longest first: one secret may be a part of another
        self.values = sorted((v for v in held if len(v) >= MIN_LENGTH), key=len, reverse=True)
        self._hidden: dict[str, str] = {}

    def hide(self, text: str) -> str:
        """Return `text` with every secret blacked out."""
        if text not in self._hidden:
            shown = text
            for value in self.values:
                shown = shown.replace(value, HIDDEN)
            self._hidden[text] = _SHAPES.sub(HIDDEN, shown)
        return self._hidden[text]

    def within(self, text: str) -> bool:
        """Return whether `text` holds a secret."""
        return self.hide(text) != text
