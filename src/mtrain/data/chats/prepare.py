"""Chats of a JSON Lines file, encoded once with the model's chat template.

A prepared file is a folder of the cache: `tokens.bin/.idx` with one document for a chat and two for
a pair; `learned.bin`, the loss mask, a byte for each token; `chats.bin`, the source line and the
learned range of each document; and `rejects.jsonl`, the lines that are not JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain import strict_json
from mtrain.config.compose.paths import user_path
from mtrain.config.disk.files import records_of
from mtrain.config.schema.data import DataConfig
from mtrain.data.chats import messages
from mtrain.data.chats.loss_mask import EncodedChat, encode_chat
from mtrain.data.chats.template import ChatFormat
from mtrain.data.chats.workers import Fault, Work, encode_lines
from mtrain.data.record_keys import Keys
from mtrain.data.store import cache
from mtrain.data.store.cache import writing
from mtrain.data.store.corpus import Corpus
from mtrain.data.store.indexed import IndexedWriter, token_dtype
from mtrain.data.store.json_lines import JsonLines
from mtrain.errors import ConfigError, CorruptData, Problem

if TYPE_CHECKING:  # importing it loads the tokenizers library
    from mtrain.data.text.tokenizer import Tokenizer

FORMAT = 5
META = "meta.json"
TOKENS = "tokens"
LEARNED = "learned.bin"
TABLE = "chats.bin"
REJECTS = "rejects.jsonl"
COLUMNS = 3
"""Columns of `chats.bin`, int64, a row for each document: line, first and last learned token."""
SHOWN = 200
"""Characters of a line that `rejects.jsonl` shows."""


def prepare(data: DataConfig, note: Callable[[str], None], tokenizer: Path | None = None) -> Corpus:
    """Encode every chat of the file with the chat template, unless the cache has it.

    Raises:
        ConfigError: the file, the tokenizer or the template is missing.
        CorruptData: the template refuses a line, or too many lines are not JSON.
        BadEnvironment: the cache cannot be written.
    """
    given = tokenizer or (user_path(data.tokenizer) if data.tokenizer else None)
    if given is None:
        rule = f"data.kind={data.kind} needs a tokenizer, and data.tokenizer is null"
        fix = "data.tokenizer=PATH of a tokenizer.json, or checkpoint.init_from=HF_DIR"
        raise ConfigError([Problem("MT603", "data.tokenizer", None, rule, fix)])
    from mtrain.data.text.tokenizer import Tokenizer

    file = _file(data.path)
    form = format_of(data, given)
    loaded = Tokenizer(given)
    sha256 = hashlib.sha256(given.read_bytes()).hexdigest()
    settings = _settings(data, file, form, sha256)
    digest = hashlib.sha256(strict_json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    folder = user_path(data.cache_dir) / f"chats-{digest}"

    def make(building: Path) -> None:
        lines = JsonLines(file)
        _make_room(folder.parent, note)
        what = "chats" if data.kind == "sft" else "pairs"
        note(f"{file}: encoding {len(lines)} {what} with the chat template")
        _make(lines, data, form, loaded, building)

    with writing(folder.parent):
        meta = cache.build_once(folder, lambda: _meta(folder), make)
    own = {"vocab_size": loaded.vocab_size, "eod": loaded.eod, "tokenizer_sha256": sha256}
    return Corpus(
        folder / TOKENS, given, {**meta, **own, "file": str(file)}, template=form.template_file
    )


def _make_room(folder: Path, note: Callable[[str], None]) -> None:
    with contextlib.suppress(OSError):
        for gone in cache.make_room(folder):
            note(f"{gone}: not used for a long time; removed to make room")


def format_of(data: DataConfig, tokenizer: Path) -> ChatFormat:
    """Return the chat template of a configuration.

    Raises ConfigError if there is no template or jinja2 is missing.
    """
    form = ChatFormat(
        tokenizer.parent, user_path(data.chat_template) if data.chat_template else None
    )
    if form.template is None:
        fix = (
            "data.chat_template=FILE, or the tokenizer_config.json of the model next to its"
            " tokenizer.json"
        )
        raise ConfigError(
            [Problem("MT509", "data.chat_template", data.chat_template, form.missing, fix)]
        )
    form.require_jinja()
    return form


def _file(path: str | None) -> Path:
    file = None
    rule = "chats are read from a file"
    if path is not None:
        file, rule = records_of(user_path(path), "what the chats are")
    if file is None:
        fix = "data.path=FILE.jsonl with one chat a line"
        raise ConfigError([Problem("MT615", "data.path", path, rule, fix)])
    return file


def _settings(data: DataConfig, file: Path, form: ChatFormat, tokenizer: str) -> dict[str, Any]:
    """Return everything that the encoded chats depend on; its hash names their folder."""
    stamp = os.stat(file)
    return {
        "format": FORMAT,
        "kind": data.kind,
        "loss_on": data.loss_on,
        "bad_lines": data.bad_lines,
        "ignored_keys": sorted(data.ignored_keys),
        "file": str(file.resolve()),
        "stamp": [stamp.st_size, stamp.st_mtime_ns, stamp.st_ino],
        "tokenizer": tokenizer,
        "templates": form.templates,
        "special": form.special_tokens,
        "versions": [version("tokenizers"), version("jinja2")],
    }


def _meta(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of prepared chats, or None unless every file has its written size."""
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
        complete = all(
            (folder / name).stat().st_size == size for name, size in meta["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if complete and meta["sizes"] else None


def _work(data: DataConfig, form: ChatFormat, tokenizer: Tokenizer) -> Work:
    """Return the function that encodes a line: its chat, or its chosen and rejected chats."""
    keys = Keys(frozenset(data.ignored_keys), "\n".join(form.templates.values()))

    def encode(line: bytes) -> Sequence[EncodedChat]:
        values = messages.parse_line(line)
        chats: Sequence[messages.Chat]
        if data.kind == "sft":
            chats = [messages.parse_chat(values, keys)]
        else:
            chats = messages.parse_pair(values, keys)
        return [encode_chat(chat, form, tokenizer, data.loss_on) for chat in chats]

    return encode


def _make(
    lines: JsonLines, data: DataConfig, form: ChatFormat, tokenizer: Tokenizer, folder: Path
) -> None:
    digest = hashlib.sha256()
    learned = 0
    largest = -1
    chats = 0
    bad = 0
    parsed = 0
    files = [open(folder / name, "wb") for name in (LEARNED, TABLE, REJECTS)]  # noqa: SIM115
    known, table, rejects = files
    with (
        known,
        table,
        rejects,
        IndexedWriter(folder / TOKENS, token_dtype(tokenizer.vocab_size)) as writer,
    ):
        encoded = encode_lines(lines, _work(data, form, tokenizer))
        for number, chat in _kept(lines, enumerate(encoded), data, rejects):
            places = np.flatnonzero(chat.learned[1:]) + 1
            writer.add(chat.ids)
            table.write(np.array([lines.numbers[number], places[0], places[-1]], "<i8").tobytes())
            known.write(chat.learned.tobytes())
            digest.update(chat.ids.tobytes() + chat.learned.tobytes())
            parsed += chat.parsed
            learned = learned + len(places)
            largest = max(largest, int(chat.ids.max()))
            chats = chats + 1
        bad = rejects.tell()
    if not chats:
        raise CorruptData(f"{lines.file}: it has no chat")
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    meta = {
        "kind": data.kind,
        "source": lines.file.name,
        "documents": chats,
        "tokens": sizes[f"{TOKENS}.bin"] // writer.dtype.itemsize,
        "learned": learned,
        "parsed_arguments": parsed,
        "bad_lines": sum(1 for _ in open(folder / REJECTS, "rb")) if bad else 0,  # noqa: SIM115
        "largest_id": largest,
        "fingerprint": digest.hexdigest()[:32],
        "sizes": sizes,
    }
    (folder / META).write_text(strict_json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _kept(
    lines: JsonLines, results: Any, data: DataConfig, rejects: Any
) -> Iterator[tuple[int, EncodedChat]]:
    """Yield line number and documents of each line; write lines that are not JSON to `rejects`."""
    limit = 100 if data.bad_lines is None else data.bad_lines
    bad = 0
    for number, result in results:
        if not isinstance(result, Fault):
            yield from ((number, chat) for chat in result)
            continue
        if not result.is_not_json:
            raise CorruptData(f"{lines.place(number)}: {result.text}")
        bad += 1
        row = {"line": int(lines.numbers[number]), "why": result.text}
        row["text"] = lines.line(number)[:SHOWN].decode("utf-8", "replace")
        rejects.write((strict_json.dumps(row) + "\n").encode())
        if bad > limit:
            raise CorruptData(
                f"{lines.place(number)}: {result.text}; {bad} lines are not JSON, and"
                f" data.bad_lines is {limit}: correct the file, or data.bad_lines={2 * bad}"
            )
