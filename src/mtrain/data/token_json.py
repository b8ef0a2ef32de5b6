"""What a `tokenizer.json` may say: checked before the library reads it, which would take the memory
or the process.

Source: the JSON of Hugging Face's tokenizers 0.23, and the header of sentencepiece's
    `precompiled_charsmap`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from mtrain.errors import CorruptData

MAX_ID = 1 << 24
"""Largest token id: tables of all ids are made, and the largest known vocabulary is a tenth of it.
"""
MAX_GROWTH = 4096
"""Letters that steps in a row may make of one."""
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
_LETTERS = ("content", "prepend", "replacement")


def check_tokenizer(path: Path, text: str) -> None:
    """Pass a `tokenizer.json` whose sizes are those of a tokenizer.

    Raises:
        CorruptData: it is no JSON object, a token id is too large, a step makes far more text than
            it is given, or a table of letters is not as large as it says.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: no tokenizer.json: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise CorruptData(f"{path}: no tokenizer.json: it is no JSON object")
    largest = max(_ids(body), default=0)
    if largest > MAX_ID:
        raise CorruptData(
            f"{path}: no tokenizer.json: it has the token id {str(largest)[:20]}, over {MAX_ID}"
        )
    for name in _STEPS:
        steps = list(_dicts(body.get(name)))
        growth = prod(
            max(1, len(step[key]))
            for step in steps
            for key in _LETTERS
            if isinstance(step.get(key), str)
        )
        if growth > MAX_GROWTH:
            raise CorruptData(
                f"{path}: no tokenizer.json: its {name} can make {str(growth)[:20]} letters of one"
            )
        for step in steps:
            if "precompiled_charsmap" in step and not _is_charsmap(step["precompiled_charsmap"]):
                raise CorruptData(
                    f"{path}: no tokenizer.json: the precompiled_charsmap of its {name} is cut or"
                    " altered"
                )


def _ids(body: dict[str, Any]) -> Iterator[int]:
    model = body.get("model")
    added = body.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += (
        [token.get("id") for token in added if isinstance(token, dict)]
        if isinstance(added, list)
        else []
    )
    yield from (number for number in ids if type(number) is int)


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a value."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _is_charsmap(value: Any) -> bool:
    """Return whether it is a size in four bytes, a table of this size in units of four bytes, and
    text in UTF-8.
    """
    try:
        data = base64.b64decode(value, validate=True)
        size = int.from_bytes(data[:4], "little")
        data[4 + size :].decode()
    except (binascii.Error, TypeError, ValueError):
        return False
    return len(data) >= 4 and size % 4 == 0 and size <= len(data) - 4
