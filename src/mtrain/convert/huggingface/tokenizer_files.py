"""The tokenizer files of an export: the files of the run's training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtrain import strict_json
from mtrain.config.resolve.model_tokenizer import KEPT, TOKENIZER
from mtrain.convert.huggingface.folder import COMPANIONS, GENERATION
from mtrain.convert.huggingface.model import copy_if_present
from mtrain.data.chats.template import FILES as BESIDE
from mtrain.data.chats.template import SETTINGS_FILE, ChatFormat

OF_TOKENIZERS = tuple(name for name in COMPANIONS if name != GENERATION)
CLASS = "tokenizer_class"
PLAIN = {CLASS: "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
"""The default tokenizer_config.json, which reads the tokenizer.json unchanged."""


def keep_tokenizer(home: Path, out: Path) -> None:
    """Write the files of a run's tokenizer into the folder `out`: what came with imported weights,
    and over it what the run was trained with. Of another tokenizer than the imported one, nothing
    of that is written.
    """
    # the tokenizer of the data, which may be another than that of the weights
    own = home / TOKENIZER
    imported = home / KEPT
    if (
        not own.is_file()
        or not (imported / TOKENIZER).is_file()
        or _same(own, imported / TOKENIZER)
    ):
        for name in OF_TOKENIZERS:
            copy_if_present(imported / name, out / name)
    for name in (TOKENIZER, *BESIDE):
        copy_if_present(home / name, out / name)
    if (out / TOKENIZER).is_file() and not (imported / SETTINGS_FILE).is_file():
        _complete(out)


def _same(one: Path, other: Path) -> bool:
    return one.read_bytes() == other.read_bytes()


def _complete(out: Path) -> None:
    """Complete tokenizer_config.json with the reader and the end of a text."""
    settings = ChatFormat(out).settings
    more = {key: value for key, value in PLAIN.items() if key not in settings}
    # without it, generation with transformers would not stop
    if "eos_token" not in settings and not (out / "special_tokens_map.json").is_file():
        from mtrain.data.text.tokenizer import Tokenizer

        tokenizer = Tokenizer(out / TOKENIZER)
        if tokenizer.eod is not None:
            more["eos_token"] = tokenizer.token_of(tokenizer.eod)
    if more:
        (out / SETTINGS_FILE).write_text(strict_json.dumps({**settings, **more}, indent=2) + "\n")


def special_ids(home: Path) -> dict[str, int]:
    """Return the ids of the tokens bos, eos and pad that the run's tokenizer defines."""
    if not (home / TOKENIZER).is_file():
        return {}
    from mtrain.data.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(home / TOKENIZER)
    settings = ChatFormat(home)
    found = {name: settings.special(f"{name}_token") for name in ("bos", "eos", "pad")}
    ids = {
        f"{name}_token_id": tokenizer.id_of(token)
        for name, token in found.items()
        if token is not None
    }
    return {name: number for name, number in ids.items() if number is not None}


def also_ending(home: Path, generation: Path) -> None:
    """Add the end token of the run's tokenizer to those of a generation_config.json.

    The chat template of a run may have its own token for the end of a turn. The settings that came
    with imported weights stay unchanged.
    """
    own = home / SETTINGS_FILE
    imported = home / KEPT / SETTINGS_FILE
    if not own.is_file() or (imported.is_file() and _same(own, imported)):
        return
    end = special_ids(home).get("eos_token_id")
    try:
        settings: Any = json.loads(generation.read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    if end is None or not isinstance(settings, dict):
        return
    known = settings.get("eos_token_id")
    # the key may hold one id or several
    ends = [one for one in (known if isinstance(known, list) else [known]) if one is not None]
    if end not in ends:
        value = [*ends, end] if ends else end
        generation.write_text(
            strict_json.dumps({**settings, "eos_token_id": value}, indent=2) + "\n"
        )
