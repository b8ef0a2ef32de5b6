"""A text corpus: its files, their order, the documents in them, and its tokens in the cache."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import os
import re
import stat
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import durable, strict_json, units
from mtrain.config.compose.paths import user_path
from mtrain.config.compose.write_paths import TAG, TAG_FILE
from mtrain.config.disk.files import PIECE, SKIPPED_FOLDERS, files_below
from mtrain.config.resolve.model_tokenizer import sha256_of
from mtrain.config.schema.data import DataConfig
from mtrain.data.samples.token_stream import entropy_nats
from mtrain.data.store import cache as corpora
from mtrain.data.store.cache import FILES, writing
from mtrain.data.store.corpus import Corpus, open_indexed, similar_paths
from mtrain.data.store.indexed import IndexedWriter, token_dtype
from mtrain.errors import ConfigError, say


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus; its place in the order depends on `name`, relative to the corpus."""

    name: str
    path: Path
    stamp: tuple[int, ...]
    """Size, modification and change time in ns, inode: one of them changes with each write."""


@dataclass
class TextCorpus:
    """The documents of a text corpus, iterated as (name, text); see `open_corpus`."""

    name: str
    """Short name, fit for a file name."""
    files: tuple[SourceFile, ...]
    """Files in reading order, shuffled by name so that splits by position are not by topic."""
    limit_bytes: int | None
    shown: str
    """The name of the corpus in messages."""
    skipped: list[str] = field(default_factory=list)
    """Files met so far that are not UTF-8."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield name and text of each document that is not empty, at most `limit_bytes` of UTF-8.

        Raises ConfigError for a file that cannot be read, and at the end if there was no text.
        """
        self.skipped.clear()
        left = self.limit_bytes
        empty = True
        for file in self.files:
            text, read = self._read(file, left)
            # one file is cut into documents: a single one would leave all splits but one empty
            if len(self.files) > 1:
                documents = [(file.name, text)]
            else:
                pieces = ((f"{file.name}#{i}", piece) for i, piece in enumerate(cut(text)))
                documents = sorted(pieces, key=lambda piece: _place(piece[0]))
            for name, document in documents:
                if document:
                    empty = False
                    yield name, document
            if left is not None:
                left -= read
                if left <= 0:
                    break
        if empty:
            skipped = f", {len(self.skipped)} of them not UTF-8" if self.skipped else ""
            raise _problem(
                self.shown,
                "cannot be tokenized because the corpus has no text:"
                f" {len(self.files)} files{skipped}, the rest empty",
                "data.path=FOLDER with text files in UTF-8",
            )

    def _read(self, file: SourceFile, limit_bytes: int | None) -> tuple[str, int]:
        """Return the text of a file and how many bytes it counts for.

        With a limit, only the first `limit_bytes` are read. A file that is not UTF-8 that far
        counts as empty.
        """
        try:
            with file.path.open("rb") as stream:
                data = stream.read(-1 if limit_bytes is None else limit_bytes)
                whole = limit_bytes is None or len(data) < limit_bytes or not stream.read(1)
        except OSError as error:
            raise _problem(
                self.shown,
                f"{file.path} cannot be read: {error.strerror}",
                "make the file readable, or data.path=another",
            ) from error
        try:
            # without `final`, a character that the limit cuts in two is dropped
            return codecs.getincrementaldecoder("utf-8")().decode(data, final=whole), len(data)
        except UnicodeDecodeError:
            self.skipped.append(file.name)
            return "", 0


def cut(text: str, piece: int = PIECE) -> Iterator[str]:
    """Cut a text into documents at blank lines, else at line ends, else anywhere.

    Each but the last has `piece` to 4 * `piece` characters; joined, they are the text.
    """
    at = 0
    while at < len(text):
        first = at + piece
        last = at + 4 * piece
        end = min(last, len(text))
        for stop in ("\n\n", "\n"):
            found = text.find(stop, first, end)
            if found >= 0:
                end = found + len(stop)
                break
        yield text[at:end]
        at = end


def open_corpus(data: DataConfig) -> TextCorpus:
    """List the files of a text corpus without reading them.

    A null `data.path` means the installed Python standard library: sources, texts and
    licences, no tests. Raises ConfigError for a path that is missing, unreadable or has no file
    with these suffixes.
    """
    limit = None if data.limit_mib is None else max(1, int(data.limit_mib * units.MIB))
    if data.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        shown = f"null ({root})"
        if not root.is_dir():
            raise _problem(
                "null",
                f"the Python standard library is not a folder here: {root}",
                "data.path=FOLDER",
            )
        files = _walk(root, data.suffixes, shown, SKIPPED_FOLDERS, licences=True)
    elif not data.path:
        raise _problem(
            "",
            "cannot be an empty path",
            "data.path=FOLDER, or null for the Python standard library",
        )
    else:
        root = Path(os.path.expanduser(data.path))
        shown = data.path
        mode = _mode(root, shown)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", root.resolve().name).strip(".-")[:40] or "corpus"
        if stat.S_ISREG(mode):
            files = [_source(root.name, root)]
        elif stat.S_ISDIR(mode):
            files = _walk(root, data.suffixes, shown)
        else:
            rule = "cannot be read because it is neither a file nor a folder"
            raise _problem(shown, rule, "data.path=FOLDER")
    if not files:
        raise _problem(
            shown,
            "cannot be read because no file ends in any of"
            f" {', '.join(data.suffixes) or '(no suffixes given)'}; {_endings(root)}",
            "data.suffixes=[.ending] that the folder has, or another data.path",
        )
    return TextCorpus(
        name, tuple(sorted(files, key=lambda f: (_place(f.name), f.name))), limit, shown
    )


def _walk(
    root: Path,
    suffixes: tuple[str, ...],
    shown: str,
    skip: frozenset[str] = frozenset(),
    licences: bool = False,
) -> list[SourceFile]:
    """Return the regular files below `root` with one of the suffixes, outside hidden folders."""

    def wanted(name: str) -> bool:
        return name.endswith(suffixes) or (licences and name.startswith("LICENSE"))

    try:
        return [
            _source(os.path.relpath(path, root), path) for path in files_below(root, wanted, skip)
        ]
    except OSError as error:
        raise _problem(
            shown,
            f"{error.filename} cannot be read: {error.strerror}",
            "make it readable, or data.path=another",
        ) from error


def _source(name: str, path: Path) -> SourceFile:
    s = path.stat()
    return SourceFile(name, path, (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino))


def _place(name: str) -> bytes:
    """Return the sort key of a name, which does not depend on other names."""
    return hashlib.blake2b(os.fsencode(name), digest_size=16, salt=b"mtrain order 1").digest()


def _mode(path: Path, shown: str) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        raise _problem(shown, f"{path}: {error.strerror}", similar_paths(path)) from error
    except ValueError as error:
        raise _problem(shown, f"no path: {error}", "data.path=FOLDER") from error


def _endings(root: Path) -> str:
    """Return the most frequent endings of the files in a folder, for a message."""
    counts: dict[str, int] = {}
    for _, _, names in os.walk(root):
        for name in names:
            ending = os.path.splitext(name)[1] or "none"
            counts[ending] = counts.get(ending, 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])[:4]
    if most:
        return "endings found: " + ", ".join(f"{e} ({n})" for e, n in most)
    return "the folder is empty"


def _problem(value: str, rule: str, fix: str) -> ConfigError:
    return ConfigError.of("MT601", "data.path", value, rule, fix)


FORMAT = 1
# A file that changed less than this before it was read may change again within the same tick of its
# file system's clock.
SETTLED_NS = 2_000_000_000


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


@dataclass(frozen=True)
class _Wanted:
    """A text corpus in the cache, before anybody read its files."""

    text: TextCorpus
    cache: Path
    settings: dict[str, Any]
    given: dict[str, Any]
    """The facts of a tokenizer that is named; empty if one is trained on the text."""

    @classmethod
    def of(cls, data: DataConfig, tokenizer: Path | None) -> _Wanted:
        """Return the corpus that a configuration wants."""
        text = open_corpus(data)
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
                "tokenizer": sha256_of(tokenizer),
                "eod": end_of_document_id(Tokenizer(tokenizer)),
            }
        return cls(text, Path(os.path.expanduser(data.cache_dir)), settings, given)

    @property
    def note(self) -> Path:
        """Return the file that has the digest of the contents of these files, as they are."""
        # If the same files were seen before and did not change, their digest is known.
        stamps = [[f.name, *f.stamp] for f in self.text.files]
        root = str(self.text.files[0].path)
        stamped = {**self.settings, **self.given, "root": root, "files": stamps}
        return self.cache / "seen" / _hash(stamped)

    def seen(self) -> Corpus | None:
        """Return the corpus if these very files were tokenized before; None otherwise."""
        note = self.note
        with contextlib.suppress(OSError, ValueError):
            digest = f"{int(note.read_text(encoding='ascii'), 16):016x}"
            if (corpus := _open(self.cache / f"{self.text.name}-{digest}")) is not None:
                with contextlib.suppress(OSError):  # another user's file, or a read-only disk
                    os.utime(note)
                return corpus
        return None


def seen(data: DataConfig, tokenizer: Path | None = None) -> Corpus | None:
    """Return the corpus that `prepare` returns if its files were tokenized before; None otherwise.

    Raises ConfigError for a path that cannot be used.
    """
    if tokenizer is None and data.tokenizer:
        tokenizer = user_path(data.tokenizer)
    return _Wanted.of(data, tokenizer).seen()


def _cached(data: DataConfig, note: Callable[[str], None], tokenizer: Path | None) -> Corpus:
    """Return the tokenized text corpus from the cache; build it if it is missing."""
    wanted = _Wanted.of(data, tokenizer)
    if (corpus := wanted.seen()) is not None:
        return corpus
    text = wanted.text
    cache = wanted.cache
    settings = wanted.settings
    given = wanted.given
    # before the contents are read: a file that changes meanwhile gets a later time
    settled = max(max(f.stamp[1:3]) for f in text.files) < time.time_ns() - SETTLED_NS
    contents = _digest(text)
    # The tokens of a tokenizer that was trained on this text serve a run that names the same
    # tokenizer, as one does that continues on the weights.
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
            wanted.note.write_text(digest, encoding="ascii")
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

    def make(building: Path) -> None:
        nonlocal built
        if folder.exists():
            note(f"{folder}: damaged or incomplete; building it again")
        _build(data, text, building, contents, tokenizer)
        built = True

    with writing(cache):
        (cache / "seen").mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another user's file in a shared folder
            (cache / TAG_FILE).write_text(TAG)
        meta = corpora.build_once(folder, lambda: _meta(folder), make)
    if built:
        corpora.tidy(cache, note)
    return Corpus(folder / "tokens", folder / "tokenizer.json", meta)


def _hash(values: dict[str, Any]) -> str:
    # names of files that are not UTF-8 have surrogates, which ASCII escapes and UTF-8 refuses
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
    # with the length, so that no text can look like the beginning of the next document
    digest.update(os.fsencode(name) + b"\0%d\0" % len(data))
    digest.update(data)
    return len(data)


def _open(folder: Path) -> Corpus | None:
    """Return the corpus in a folder and mark it as used; None unless it is complete."""
    meta = _meta(folder)
    if meta is None or not corpora.use(folder):
        return None
    return Corpus(folder / "tokens", folder / "tokenizer.json", meta)


def _meta(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of a corpus; None unless every file has the size it was written with."""
    try:
        meta = corpora.read_meta(folder)
        complete = meta["format"] == FORMAT and all(
            (folder / name).stat().st_size == meta["files"][name]["bytes"] for name in FILES
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if complete else None


def _build(
    data: DataConfig, text: TextCorpus, folder: Path, contents: str, given: Path | None
) -> None:
    """Tokenize into a folder.

    `contents` is the digest that names the corpus; raises ConfigError if the text changed since.
    """
    meta = _tokenize(data, text, folder, given)
    if meta["contents"] != contents:
        rule = "cannot be tokenized because files of the corpus changed while they were read"
        fix = "run again when they are complete"
        raise ConfigError.of("MT601", "data.path", text.shown, rule, fix)


def _tokenize(
    data: DataConfig, text: TextCorpus, folder: Path, given: Path | None
) -> dict[str, Any]:
    """Encode all documents with the given tokenizer or one trained now, and write everything."""
    import tokenizers

    from mtrain.data.text.tokenizer import EOD, Tokenizer, end_of_document_id, train_bpe

    started = time.monotonic()
    if given is None:
        tokenizer = train_bpe((t for _, t in text), data.tokenizer_vocab_size)
        eod = EOD
        tokenizer_bytes = tokenizer.to_str().encode()
        vocab_size = tokenizer.get_vocab_size()
    else:
        loaded = Tokenizer(given)
        tokenizer = tokenizers.Tokenizer.from_str(given.read_text(encoding="utf-8"))
        eod = end_of_document_id(loaded)
        tokenizer_bytes = given.read_bytes()
        vocab_size = loaded.vocab_size
    trained = time.monotonic()
    durable.write(folder / "tokenizer.json", tokenizer_bytes)
    counted, sha256 = _encode(text, folder, tokenizer, eod, vocab_size)
    sha256["tokenizer.json"] = hashlib.sha256(tokenizer_bytes).hexdigest()
    meta = {
        "format": FORMAT,
        "kind": "text",
        "source": text.name,
        **counted,
        "vocab_size": vocab_size,
        "eod": eod,
        "files": {n: {"bytes": (folder / n).stat().st_size, "sha256": sha256[n]} for n in FILES},
        "fingerprint": sha256["tokens.bin"][:32],
        "seconds": {
            "train": round(trained - started, 3),
            "encode": round(time.monotonic() - trained, 3),
        },
    }
    corpora.write_meta(folder, meta)
    return meta


def _encode(
    text: TextCorpus, folder: Path, tokenizer: Any, eod: int, vocab_size: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write the tokens of all documents into `folder`; return their numbers, and sha256 by file."""
    from mtrain.data.text.tokenizer import encode_documents

    counts = np.zeros(vocab_size, np.int64)
    documents = 0
    text_bytes = 0
    # of the text that is encoded: it must be the text whose digest names the folder
    digest = hashlib.sha256()

    def texts() -> Iterator[str]:
        nonlocal documents, text_bytes
        for name, document in text:
            documents += 1
            text_bytes += _absorb(digest, name, document)
            yield document

    writer = IndexedWriter(folder / "tokens", token_dtype(vocab_size))
    with writer:
        for batch in encode_documents(tokenizer, texts(), eod):
            counts += np.bincount(batch.tokens, minlength=vocab_size)
            writer.add(batch.tokens, batch.lengths)
        sha256 = {f"tokens{end}": digits for end, digits in writer.close().items()}
    counted = {
        "documents": documents,
        "skipped": len(text.skipped),
        "tokens": int(counts.sum()),
        "text_bytes": text_bytes,
        "unigram_entropy_nats": entropy_nats(counts),
        "contents": digest.hexdigest(),
    }
    return counted, sha256
