"""Chats of a JSON Lines file, written once as the model reads them, and their samples by number.

A prepared file is a folder of the cache: `tokens.bin/.idx`, a document for each chat or two for
each pair; `learned.bin`, a byte for each token; `chats.bin`, where each comes from and begins to be
learned; `rejects.jsonl`, the lines that are no JSON. Which chats make a sample is a function of
seed, epoch and number, and of the windows that are filled by first fit where samples are packed.
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
from mtrain.data import cache, messages
from mtrain.data.cache import writing
from mtrain.data.chat import ChatFormat
from mtrain.data.chat_marks import Encoded, encoded
from mtrain.data.chat_writers import Fault, Work, written
from mtrain.data.indexed import IndexedWriter, token_dtype
from mtrain.data.json_lines import JsonLines
from mtrain.data.record_keys import Keys
from mtrain.data.tokenize import Corpus
from mtrain.errors import ConfigError, CorruptData, Problem

if TYPE_CHECKING:  # it imports the library of tokenizers
    from mtrain.data.text import Tokenizer

FORMAT = 5
META = "meta.json"
TOKENS = "tokens"
LEARNED = "learned.bin"
TABLE = "chats.bin"
REJECTS = "rejects.jsonl"
COLUMNS = 3
"""Of `chats.bin`, int64: the line, the first token that is learned, the last one; a row for each
document.
"""
SHOWN = 200
"""Letters of a line that `rejects.jsonl` shows."""


def prepare(data: DataConfig, note: Callable[[str], None], tokenizer: Path | None = None) -> Corpus:
    """Write every chat of the file as the model reads it, unless that was done before.

    Raises:
        ConfigError: there is no such file, tokenizer or template.
        CorruptData: a line is no chat that the template takes; too many are no JSON.
        BadEnvironment: the cache cannot be written.
    """
    given = tokenizer or (user_path(data.tokenizer) if data.tokenizer else None)
    if given is None:
        rule = f"data.kind={data.kind} is written by a tokenizer, and data.tokenizer is null"
        fix = "data.tokenizer=PATH of a tokenizer.json, or checkpoint.init_from=HF_DIR"
        raise ConfigError([Problem("MT603", "data.tokenizer", None, rule, fix)])
    from mtrain.data.text import Tokenizer

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
        note(
            f"{file}: writing {len(lines)} {'chats' if data.kind == 'sft' else 'pairs'} as the"
            " model reads them"
        )
        _make(lines, data, form, loaded, building)

    with writing(folder.parent):
        meta = cache.made(folder, lambda: _meta(folder), make)
    own = {"vocab_size": loaded.vocab_size, "eod": loaded.eod, "tokenizer_sha256": sha256}
    return Corpus(
        folder / TOKENS, given, {**meta, **own, "file": str(file)}, template=form.template_file
    )


def _make_room(folder: Path, note: Callable[[str], None]) -> None:
    with contextlib.suppress(OSError):
        for gone in cache.make_room(folder):
            note(f"{gone}: not used for a long time; removed to make room")


def format_of(data: DataConfig, tokenizer: Path) -> ChatFormat:
    """Return the template that chats are written with.

    Raises ConfigError where there is none, or jinja2 is missing.
    """
    form = ChatFormat(
        tokenizer.parent, user_path(data.chat_template) if data.chat_template else None
    )
    if form.template is None:
        fix = (
            "data.chat_template=FILE, or the tokenizer_config.json of the model beside its"
            " tokenizer.json"
        )
        raise ConfigError(
            [Problem("MT509", "data.chat_template", data.chat_template, form.lacking, fix)]
        )
    form.require_jinja()
    return form


def _file(path: str | None) -> Path:
    if path is None:
        found, rule = (None, "chats are read from a file")
    else:
        found, rule = records_of(user_path(path), "what the chats are")
    if found is None:
        raise ConfigError(
            [Problem("MT615", "data.path", path, rule, "data.path=FILE.jsonl, a chat a line")]
        )
    return found


def _settings(data: DataConfig, file: Path, form: ChatFormat, tokenizer: str) -> dict[str, Any]:
    """What prepared chats are a function of, and the file as it is now."""
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
    """What is noted of prepared chats; None unless every file has the size that it was written
    with.
    """
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
        complete = all(
            (folder / name).stat().st_size == size for name, size in meta["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if complete and meta["sizes"] else None


def _work(data: DataConfig, form: ChatFormat, tokenizer: Tokenizer) -> Work:
    """What is made of a line: the tokens of its chat, or those of the chosen and the
    rejected one.
    """

    keys = Keys(frozenset(data.ignored_keys), "\n".join(form.templates.values()))

    def one(line: bytes) -> Sequence[Encoded]:
        values = messages.read(line)
        chats = (
            (messages.chat(values, keys),) if data.kind == "sft" else messages.pair(values, keys)
        )
        return [encoded(chat, form, tokenizer, data.loss_on) for chat in chats]

    return one


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
        results = zip(range(len(lines)), written(lines, _work(data, form, tokenizer)), strict=True)
        for number, chat in _kept(lines, results, data, rejects):
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
        raise CorruptData(f"{lines.file}: there is no chat in it")
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
) -> Iterator[tuple[int, Encoded]]:
    """Yield the documents of the lines, and in the file of rejects the lines that are no JSON."""
    limit = 100 if data.bad_lines is None else data.bad_lines
    bad = 0
    for number, result in results:
        if not isinstance(result, Fault):
            yield from ((number, chat) for chat in result)
            continue
        if not result.is_no_json:
            raise CorruptData(f"{lines.place(number)}: {result.text}")
        bad += 1
        row = {"line": int(lines.numbers[number]), "why": result.text}
        row["text"] = lines.line(number)[:SHOWN].decode("utf-8", "replace")
        rejects.write((strict_json.dumps(row) + "\n").encode())
        if bad > limit:
            said = (
                f"{lines.place(number)}: {result.text}; line {bad} that is no JSON, and"
                f" data.bad_lines is {limit}"
            )
            raise CorruptData(f"{said}: correct the file, or data.bad_lines={2 * bad}")
