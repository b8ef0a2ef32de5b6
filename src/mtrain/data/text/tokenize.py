"""Tokenized text corpora: built once, then read from the cache.

A cached corpus is a folder `<cache_dir>/<name>-<digest>/` of `tokens.bin`, `tokens.idx`,
`tokenizer.json` and `meta.json`. It is built in a folder next to it that is then renamed, with
`meta.json` written last, so that a killed build never passes for a corpus. A lock lets one of
several processes build while the others wait. After a build, `store.cache` removes corpora that are
no longer used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import durable, strict_json
from mtrain.config.compose.paths import user_path
from mtrain.config.compose.write_paths import TAG, TAG_FILE
from mtrain.config.schema.data import DataConfig
from mtrain.data.samples.token_stream import entropy_nats
from mtrain.data.store import cache as corpora
from mtrain.data.store.cache import FILES, writing
from mtrain.data.store.corpus import Corpus, open_indexed
from mtrain.data.store.indexed import IndexedWriter, token_dtype
from mtrain.data.text.files import TextCorpus, open_corpus
from mtrain.errors import ConfigError, Problem, say

FORMAT = 1
SETTLED_NS = 2_000_000_000
"""A file that changed less than this before it was read may change again within the same tick of
its file system's clock.
"""


def say_to_stderr(note: str) -> None:
    """Print a note to stderr."""
    say(note, error=True)


def prepare(
    data: DataConfig, note: Callable[[str], None] = say_to_stderr, tokenizer: Path | None = None
) -> Corpus:
    """Return the corpus of a configuration; tokenize a text corpus on the first call.

    Text is tokenized with `tokenizer`, else with the tokenizer of the configuration, else with one
    that is trained on the text. Any number of processes may call this at once. Tokenizing starts
    threads; a process that forks afterwards tokenizes with one thread and reports that.

    Raises ConfigError for a path or corpus that cannot be used, CorruptData for `.bin/.idx` that do
    not add up, BadEnvironment if the cache folder cannot be written.
    """
    if data.kind == "mock":
        return Corpus(None, None, {"kind": "mock"})
    if data.kind == "indexed":
        return open_indexed(data)
    if tokenizer is None and data.tokenizer:
        tokenizer = user_path(data.tokenizer)
    return _cached(data, note, tokenizer)


def _cached(data: DataConfig, note: Callable[[str], None], tokenizer: Path | None) -> Corpus:
    """Return the tokenized text corpus from the cache; build it if it is missing."""
    text = open_corpus(data)
    cache = Path(os.path.expanduser(data.cache_dir))
    settings = {
        "format": FORMAT,
        "vocab_size": data.tokenizer_vocab_size,
        "limit_bytes": text.limit_bytes,
        "tokenizers": version("tokenizers"),
    }
    given: dict[str, Any] = {}
    if tokenizer is not None:
        from mtrain.data.text.tokenizer import Tokenizer, end_of_document_id

        given = {
            "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
            "eod": end_of_document_id(Tokenizer(tokenizer)),
        }
    # If the same files were seen before and did not change, the digest of their contents is known.
    stamps = [[f.name, *f.stamp] for f in text.files]
    stamped = {**settings, **given, "root": str(text.files[0].path), "files": stamps}
    seen = cache / "seen" / _hash(stamped)
    with contextlib.suppress(OSError, ValueError):
        folder = cache / f"{text.name}-{int(seen.read_text(encoding='ascii'), 16):016x}"
        if (corpus := _open(folder)) is not None:
            with contextlib.suppress(OSError):  # another user's file, or a read-only disk
                os.utime(seen)
            return corpus
    settled = max(max(f.stamp[1:3]) for f in text.files) < time.time_ns() - SETTLED_NS
    contents = _digest(text)
    digest = _hash({**settings, "contents": contents})[:16]
    corpus = _open(folder := cache / f"{text.name}-{digest}")
    known = None if corpus is None else (corpus.tokenizer_sha256, corpus.meta["eod"])
    if tokenizer is not None and known != (given["tokenizer"], given["eod"]):
        digest = _hash({**settings, **given, "contents": contents})[:16]
        corpus = _open(folder := cache / f"{text.name}-{digest}")
    corpus = corpus or _made(data, text, folder, contents, note, tokenizer)
    if settled:
        # without the note, the next run reads the contents again
        with contextlib.suppress(OSError):
            seen.write_text(digest, encoding="ascii")
    return corpus


def _made(
    data: DataConfig,
    text: TextCorpus,
    folder: Path,
    contents: str,
    note: Callable[[str], None],
    tokenizer: Path | None,
) -> Corpus:
    """Return the corpus in a folder of the cache; build it unless another process does."""
    cache = folder.parent
    built = False
    with writing(cache):
        (cache / "seen").mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another user's file in a shared folder
            (cache / TAG_FILE).write_text(TAG)
        with corpora.locked(cache / f"{folder.name}.lock"):
            corpus = _open(folder)
            if corpus is None:
                if folder.exists():
                    note(f"{folder}: damaged or incomplete; building it again")
                corpus = _build(data, text, folder, contents, tokenizer)
                built = True
    if built:
        corpora.use(folder)
        with contextlib.suppress(OSError):
            for gone in corpora.make_room(cache):
                note(f"{gone}: not used for a long time; removed to make room")
    return corpus


def _hash(values: dict[str, Any]) -> str:
    text = strict_json.dumps(values, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _digest(text: TextCorpus) -> str:
    """Return the sha256 over the names and contents of all documents."""
    digest = hashlib.sha256()
    for name, document in text:
        _absorb(digest, name, document)
    return digest.hexdigest()


def _absorb(digest: Any, name: str, document: str) -> int:
    data = document.encode()
    digest.update(os.fsencode(name) + b"\0%d\0" % len(data))
    digest.update(data)
    return len(data)


def _open(folder: Path) -> Corpus | None:
    """Return the corpus in a folder and mark it as used; None unless it is complete and every file
    has the size it was written with.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        complete = meta["format"] == FORMAT and all(
            (folder / name).stat().st_size == meta["files"][name]["bytes"] for name in FILES
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not complete or not corpora.use(folder):
        return None
    return Corpus(folder / "tokens", folder / "tokenizer.json", meta)


def _build(
    data: DataConfig, text: TextCorpus, folder: Path, contents: str, given: Path | None
) -> Corpus:
    """Tokenize into a temporary folder, then rename it to `folder`. The caller holds the lock.

    `contents` is the digest that names the folder; raises ConfigError if the text changed since.
    """
    for stale in folder.parent.glob(f".building-{folder.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    building = folder.parent / f".building-{folder.name}-{os.getpid()}"
    building.mkdir()
    try:
        meta = _tokenize(data, text, building, given)
        if meta["contents"] != contents:
            rule = "files of the corpus changed while they were read"
            fix = "run again when they are complete"
            raise ConfigError([Problem("MT601", "data.path", text.shown, rule, fix)])
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return Corpus(folder / "tokens", folder / "tokenizer.json", meta)


def _tokenize(
    data: DataConfig, text: TextCorpus, folder: Path, given: Path | None
) -> dict[str, Any]:
    """Encode all documents with the given tokenizer or one trained now, and write everything."""
    from mtrain.data.text import bpe
    from mtrain.data.text.tokenizer import Tokenizer, end_of_document_id

    started = time.monotonic()
    if given is None:
        tokenizer = bpe.train((t for _, t in text), data.tokenizer_vocab_size)
        eod = bpe.EOD
        tokenizer_bytes = tokenizer.to_str().encode()
        vocab_size = tokenizer.get_vocab_size()
    else:
        loaded = Tokenizer(given)
        tokenizer = bpe.read(given)
        eod = end_of_document_id(loaded)
        tokenizer_bytes = given.read_bytes()
        vocab_size = loaded.vocab_size
    trained = time.monotonic()
    durable.write(folder / "tokenizer.json", tokenizer_bytes)
    counts = np.zeros(vocab_size, np.int64)
    documents = text_bytes = 0
    digest = hashlib.sha256()

    def texts() -> Iterator[str]:
        nonlocal documents, text_bytes
        for name, document in text:
            documents += 1
            text_bytes += _absorb(digest, name, document)
            yield document

    writer = IndexedWriter(folder / "tokens", token_dtype(vocab_size))
    with writer:
        for batch in bpe.encode(tokenizer, texts(), eod):
            counts += np.bincount(batch.tokens, minlength=vocab_size)
            writer.add(batch.tokens, batch.lengths)
        sha256 = writer.close()
    sha256 = {"tokens.bin": sha256[".bin"], "tokens.idx": sha256[".idx"]}
    sha256["tokenizer.json"] = hashlib.sha256(tokenizer_bytes).hexdigest()
    meta = {
        "format": FORMAT,
        "kind": "text",
        "source": text.name,
        "documents": documents,
        "skipped": len(text.skipped),
        "tokens": int(counts.sum()),
        "text_bytes": text_bytes,
        "vocab_size": vocab_size,
        "eod": eod,
        "unigram_entropy_nats": entropy_nats(counts),
        "files": {n: {"bytes": (folder / n).stat().st_size, "sha256": sha256[n]} for n in FILES},
        "fingerprint": sha256["tokens.bin"][:32],
        "contents": digest.hexdigest(),
        "seconds": {
            "train": round(trained - started, 3),
            "encode": round(time.monotonic() - trained, 3),
        },
    }
    durable.write(folder / "meta.json", (strict_json.dumps(meta, indent=1) + "\n").encode())
    return meta
