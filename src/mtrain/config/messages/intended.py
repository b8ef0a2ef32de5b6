"""What a text was meant to be: letters that look like others, numbers with units, words for true
and for nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal, DecimalException
from typing import Any

_CYRILLIC = dict(zip("аеорсухіјѕкмтвнгп", "aeopcyxijskmtbhrn", strict=True))
_CAPITALS = dict(zip("АЕОРСУХІЈЅКМТВНΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "AEOPCYXIJSKMTBHABEZHIKMNOPTYX", strict=True))
_GREEK = dict(zip("αεηικνορτυχ", "aenikvoptux", strict=True))
_DASHES = dict.fromkeys("‐‑‒–—―−", "-")
LOOKALIKES = str.maketrans(
    {**_CYRILLIC, **_CAPITALS, **_GREEK, **_DASHES, "ı": "i", "’": "'", "“": '"', "”": '"'}
)
"""Letters of other alphabets that look like ours (Unicode's confusables, those of whole words), and
typeset signs.
"""
TRUE = ("true", "yes", "y", "on", "t", "1", "enabled")
FALSE = ("false", "no", "n", "off", "f", "0", "disabled")
NULL = ("null", "none", "nil", "~", "", "undefined")
_NUMBER = re.compile(
    r"([-+]?)([0-9][0-9_, ]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([-+]?[0-9]{1,3}))?\s*([A-Za-z]*|%)\Z"
)
_TIMES = {"ms": "0.001", "s": "1", "sec": "1", "m": "60", "min": "60", "h": "3600", "d": "86400"}
_SIZES = {"m": "0.0009765625", "g": "1", "t": "1024"}
_COUNTS = {"k": "1e3", "m": "1e6", "g": "1e9", "b": "1e9", "t": "1e12", "%": "0.01"}
_OF_TOKENS = re.compile(r"(_size|_length|_embeddings|_rank|_dim|_channels)\Z")
"""Keys of which a k is 1024: a sequence of 4k has 4096 tokens."""


def plain(text: str) -> str:
    """`text` with the letters that it seems to have."""
    return unicodedata.normalize("NFKC", text).translate(LOOKALIKES)


def as_key(text: str) -> str:
    """`text` as a dotted key is spelled: small letters, underscores, no dashes before it."""
    return re.sub(r"[-\s]+", "_", plain(text).strip().lstrip("-").lower())


def is_nothing(value: Any) -> bool:
    """Return whether a value says that there is none: null, an empty text, `none`."""
    return value is None or (isinstance(value, str) and plain(value).strip().lower() in NULL)


def as_name(value: Any) -> str:
    """Return a value as the text that it is in a file."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return plain(str(value)).strip()


def readings(path: str, value: Any) -> Iterator[list[Any]]:
    """Yield values of other types that `value` may have been meant as at the key `path`: likely
    ones before less likely.
    """
    if isinstance(value, list) and len(value) == 1:
        yield [value[0]]
    if isinstance(value, (bool, dict)) or value is None:
        return
    text = plain(str(value)).strip().strip("\"'").strip()
    word = text.lower()
    yield [
        reading for words, reading in ((TRUE, True), (FALSE, False), (NULL, None)) if word in words
    ]
    numbers = list(_numbers(path, text))
    yield [kind for number in numbers for kind in _kinds(number)]
    yield [round(number) for number in numbers if abs(number) < 1 << 63]
    if isinstance(value, list):
        return
    parts = [part.strip() for part in text.strip("[]()").split(",")]
    yield [str(value)]
    yield [[value]]
    yield [parts]
    yield [
        [
            int(n) if n == n.to_integral_value() else float(n)
            for part in parts[:64]
            for n in _numbers(path, part)
        ]
    ]


def _kinds(number: Decimal) -> Iterator[Any]:
    """Yield a number as a whole one where it is one, and as one with a fraction."""
    if number == number.to_integral_value() and abs(number) < 1 << 63:
        yield int(number)
    yield float(number)


def _numbers(path: str, text: str) -> Iterator[Decimal]:
    """Yield the numbers that a text with separators, a unit or a letter too many may stand for."""
    match = _NUMBER.match(text)
    if match is None or len(text) > 64:
        return
    sign, digits, power, unit = match.groups()
    digits = digits.replace("_", "").replace(" ", "")
    grouped = re.fullmatch(r"[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?", digits) is not None
    digits = digits.replace(",", "" if grouped else ".")
    try:
        number = Decimal(f"{sign}{digits}e{power or 0}")
        for scale in _scales(path, unit.lower()):
            yield number * Decimal(scale)
    except DecimalException:
        return


def _scales(path: str, unit: str) -> list[str]:
    last = path.rpartition(".")[2]
    if last.endswith("_s"):
        return [_TIMES.get(unit, "1")]
    if last.endswith(("_gib", "_mib")):
        scale = _SIZES.get(unit[:1], "1")
        return [str(Decimal(scale) * 1024) if last.endswith("_mib") and unit else scale]
    if unit in ("k", "ki") and _OF_TOKENS.search(last):
        return ["1024", "1000"]
    return [_COUNTS.get(unit, "1")]
