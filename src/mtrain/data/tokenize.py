"""Makes a corpus ready before training: tokenizes text once into a cache, checks given `.bin/.idx`.

A cached corpus is a folder `<cache_dir>/<name>-<digest>/` of `tokens.bin`, `tokens.idx`,
`tokenizer.json`, `meta.json`. It is built beside that place and renamed, with `meta.json` written
last, so that a build that was killed is never taken for a corpus; a lock lets one of several
processes build while the others wait. After a build corpora that nobody uses any more make room:
see `cache`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import durable, strict_json
from mtrain.config.compose.paths import user_path
from mtrain.config.compose.write_paths import TAG, TAG_FILE
from mtrain.config.disk.manifest import read_manifest
from mtrain.config.schema.data import DataConfig
from mtrain.data import cache as corpora
from mtrain.data.cache import FILES, writing
from mtrain.data.corpus import TextCorpus, near_paths, open_corpus
from mtrain.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from mtrain.data.prefixes import prefixes_of
from mtrain.data.remote import is_mirrored
from mtrain.data.samples import entropy_nats
from mtrain.errors import ConfigError, CorruptData, Problem, say

FORMAT = 1
SETTLED_NS = 2_000_000_000
"""A file changed so shortly before it was read may be changed again within the same tick of its
clock.
"""


@dataclass(frozen=True)
class Corpus:
    """A corpus that is ready to be read."""

    prefix: Path | None
    """Prefix of the `.bin/.idx`; None for synthetic tokens."""
    tokenizer: Path | None
    """A `tokenizer.json`; None: no text can be generated."""
    meta: dict[str, Any]
    """What is known of it: documents, tokens, vocab_size, eod, unigram_entropy_nats, fingerprint,
    ...
    """
    others: tuple[Path, ...] = ()
    """Prefixes of the corpora that are blended with the first."""
    template: Path | None = None
    """The chat template, where it is another than that beside the tokenizer."""
    of_splits: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    """Prefixes of the corpora that a split has for itself, by the split's name."""
    datasets: dict[Path, IndexedDataset] = field(default_factory=dict, repr=False, compare=False)
    """Corpora that are open already, by their prefix."""

    def opened(self, prefix: Path) -> IndexedDataset:
        """Return the corpus of a prefix; the whole index is read once."""
        if prefix not in self.datasets:
            self.datasets[prefix] = IndexedDataset(prefix)
        return self.datasets[prefix]

    @property
    def tokenizer_sha256(self) -> str | None:
        """Return hash of the tokenizer.json; None where there is none."""
        known: str | None = self.meta.get("tokenizer_sha256")
        return known or self.meta.get("files", {}).get("tokenizer.json", {}).get("sha256")


def _say(note: str) -> None:
    say(note, error=True)


def prepare(
    data: DataConfig, note: Callable[[str], None] = _say, tokenizer: Path | None = None
) -> Corpus:
    """Make the corpus of a configuration ready and return it; a text corpus is tokenized at the
    first call, with the `tokenizer.json` that is given, else that of the configuration, else one
    that is trained on it.

    Any number of processes may call it at once. Tokenizing starts threads; a process forked
    afterwards tokenizes with one, and says so. Raises ConfigError for a path or corpus that cannot
    be used, CorruptData for `.bin/.idx` that do not add up, BadEnvironment when the cache folder
    cannot be written.
    """
    if data.kind == "mock":
        return Corpus(None, None, {"kind": "mock"})
    if data.kind == "indexed":
        return _given(data)
    return _cached(data, note, tokenizer or (user_path(data.tokenizer) if data.tokenizer else None))


def verify(corpus: Corpus) -> None:
    """Read every file of a cached text corpus again; raises CorruptData for one that is not as it
    was written.
    """
    if corpus.prefix is None:
        return
    for name, expected in corpus.meta.get("files", {}).items():
        path = corpus.prefix.parent / name
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected["sha256"]:
            raise CorruptData(
                f"{path}: sha256 is {found}, was written as {expected['sha256']}: remove"
                f" {path.parent}"
            )


def _given(data: DataConfig) -> Corpus:
    """Check the `.bin/.idx` and the tokenizer that a configuration names."""
    problems: list[Problem] = []

    def problem(key: str, value: str | None, rule: str, fix: str) -> None:
        problems.append(Problem("MT602", f"data.{key}", value, rule, fix))

    prefixes = prefixes_of(data, "blend" if data.blend else "path", problem)
    if not prefixes and not problems:
        problem(
            "path",
            None,
            "data.kind=indexed reads .bin/.idx files",
            "data.path=PREFIX of the two files",
        )
    of_splits = {
        name: prefixes_of(data, f"{name}_blend", problem) for name in ("validation", "test")
    }
    of_splits = {name: found for name, found in of_splits.items() if found}
    tokenizer = Path(os.path.expanduser(data.tokenizer)) if data.tokenizer else None
    if tokenizer is not None and not os.path.isfile(tokenizer):
        fix = near_paths(tokenizer).replace("data.path=", "data.tokenizer=")
        problem("tokenizer", data.tokenizer, f"{tokenizer} is not a file", fix)
    if problems:
        raise ConfigError(problems)
    own = [prefix for found in of_splits.values() for prefix in found]
    whole = data.order == "megatron"  # it is made of all lengths
    datasets = {prefix: IndexedDataset(prefix, whole=whole) for prefix in (*prefixes, *own)}
    meta = _counts([datasets[prefix] for prefix in (*prefixes, *own)])
    meta |= told([*prefixes, *own], tokenizer)
    if tokenizer is not None:
        from mtrain.data.text import Tokenizer

        loaded = Tokenizer(tokenizer)
        meta |= {"vocab_size": loaded.vocab_size, "eod": meta.get("eod", loaded.eod)}
        meta["tokenizer_sha256"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    return Corpus(
        prefixes[0], tokenizer, meta, prefixes[1:], of_splits=of_splits, datasets=datasets
    )


def told(prefixes: list[Path], tokenizer: Path | None) -> dict[str, Any]:
    """What the manifests of corpora say that the run needs to know: the largest id of all, and the
    token that ends documents and the hash of the tokenizer where all say the same.

    Raises CorruptData for a manifest that is not as it was written or is of other files,
    ConfigError where the tokens are those of another tokenizer.
    """
    held = []
    for prefix in prefixes:
        if (one := read_manifest(prefix)) is not None:
            held.append(one)
            if wrong := one.sizes_differ(prefix, remote=is_mirrored(prefix)):
                raise CorruptData(wrong)
    if tokenizer is not None:
        ours = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        for one in held:
            if one.tokenizer_sha256 not in (None, ours):
                theirs = str(one.tokenizer_sha256)
                rule = (
                    f"its sha256 is {ours[:12]}, and {one.path} says that {theirs[:12]} made the"
                    " tokens"
                )
                fix = "data.tokenizer=PATH of the tokenizer.json that made them"
                raise ConfigError([Problem("MT620", "data.tokenizer", str(tokenizer), rule, fix)])
    if len(held) < len(prefixes):
        return {}
    out: dict[str, Any] = {"largest_id": max(one.count("largest_id") for one in held)}
    for name, found in (
        ("eod", {m.eod for m in held}),
        ("tokenizer_sha256", {m.tokenizer_sha256 for m in held}),
    ):
        if len(found) == 1 and None not in found:
            out[name] = found.pop()
    return out


def _counts(datasets: list[IndexedDataset]) -> dict[str, Any]:
    return {
        "kind": "indexed",
        "documents": sum(dataset.num_documents for dataset in datasets),
        "tokens": sum(dataset.num_tokens for dataset in datasets),
        "dtype": ", ".join(dict.fromkeys(dataset.dtype.name for dataset in datasets)),
        "fingerprint": joint_fingerprint(datasets),
    }


def joint_fingerprint(datasets: list[IndexedDataset]) -> str:
    """Return the fingerprint of one corpus, or of several in their order."""
    each = [fingerprint(dataset) for dataset in datasets]
    return each[0] if len(each) == 1 else hashlib.sha256("|".join(each).encode()).hexdigest()


def fingerprint(dataset: IndexedDataset, samples: int = 256, block: int = 4096) -> str:
    """Return a short hash over sizes, the ends of the index and `samples` evenly spread blocks of
    the tokens.

    Tells one corpus from another in milliseconds, whatever the size; it does not find a single
    changed token.
    """
    digest = hashlib.sha256(
        f"{len(dataset)}|{dataset.num_documents}|{dataset.num_tokens}|".encode()
    )
    digest.update(dataset.dtype.str.encode())
    for array in (dataset.lengths, dataset.document_indices):
        digest.update(array[:block].tobytes() + array[-block:].tobytes())
    starts = np.linspace(0, max(0, dataset.num_tokens - block), samples).astype(np.int64).tolist()
    for piece in dataset.pieces(starts, block):
        digest.update(piece.tobytes())
    return digest.hexdigest()[:32]


def _cached(data: DataConfig, note: Callable[[str], None], tokenizer: Path | None) -> Corpus:
    """Return the tokenized text corpus from the cache, built if it is not there."""
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
        from mtrain.data.text import Tokenizer, end_of

        given = {
            "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
            "eod": end_of(Tokenizer(tokenizer)),
        }
    # The same files, unchanged, as some time before: then the digest of their contents is known.
    stamps = [[f.name, *f.stamp] for f in text.files]
    seen = (
        cache
        / "seen"
        / _hash({**settings, **given, "root": str(text.files[0].path), "files": stamps})
    )
    with contextlib.suppress(OSError, ValueError):
        folder = cache / f"{text.name}-{int(seen.read_text(encoding='ascii'), 16):016x}"
        if (corpus := _open(folder)) is not None:
            with contextlib.suppress(OSError):  # of somebody else, or on a disk that is only read
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
        with contextlib.suppress(OSError):  # then the contents are read again the next time
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
    """Return the corpus in a folder of the cache, built unless another process does that first."""
    cache = folder.parent
    built = False
    with writing(cache):
        (cache / "seen").mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another user's, in a folder that several share
            (cache / TAG_FILE).write_text(TAG)
        with corpora.locked(cache / f"{folder.name}.lock"):
            corpus = _open(folder)
            if corpus is None:
                if folder.exists():
                    note(f"{folder}: damaged or not complete; it is built again")
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
    """sha256 over the names and contents of all documents."""
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
    """Return the corpus in a folder, in use from now on; None unless it is complete and every file
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
    """Tokenize into a folder beside `folder`, then rename. The caller holds the lock.

    `contents` is what the folder is named after: raises ConfigError if the text changed since.
    """
    for stale in folder.parent.glob(f".building-{folder.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    building = folder.parent / f".building-{folder.name}-{os.getpid()}"
    building.mkdir()
    try:
        meta = _tokenize(data, text, building, given)
        if meta["contents"] != contents:
            rule = "files of the corpus changed while they were read"
            raise ConfigError(
                [
                    Problem(
                        "MT601", "data.path", text.shown, rule, "run again when they are complete"
                    )
                ]
            )
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
    """Train the tokenizer or take the one given, encode all documents, write everything;
    `meta.json` comes last.
    """
    from mtrain.data import bpe
    from mtrain.data.text import Tokenizer, end_of

    started = time.monotonic()
    if given is None:
        tokenizer = bpe.train((t for _, t in text), data.tokenizer_vocab_size)
        eod = bpe.EOD
        tokenizer_bytes = tokenizer.to_str().encode()
        vocab_size = tokenizer.get_vocab_size()
    else:
        loaded = Tokenizer(given)
        tokenizer = bpe.read(given)
        eod = end_of(loaded)
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
