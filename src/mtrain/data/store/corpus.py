"""A corpus that is ready to read, and how a `.bin/.idx` corpus of a configuration becomes one."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import units
from mtrain.config.disk.token_files import read_manifest
from mtrain.config.resolve.model_tokenizer import sha256_of
from mtrain.config.schema.data import DataConfig
from mtrain.data.store.indexed import IndexedDataset, with_suffix
from mtrain.data.store.remote import is_mirrored, mirrored
from mtrain.errors import ConfigError, CorruptData, Problem
from mtrain.object_store import is_remote


@dataclass(frozen=True)
class Corpus:
    """A corpus that is ready to read."""

    prefix: Path | None
    """Prefix of the `.bin/.idx`; None for synthetic tokens."""
    tokenizer: Path | None
    """A `tokenizer.json`; without one (None) no text can be generated."""
    meta: dict[str, Any]
    """Its facts: documents, tokens, vocab_size, eod, unigram_entropy_nats, fingerprint, ..."""
    others: tuple[Path, ...] = ()
    """Prefixes of the corpora that are blended with the first."""
    template: Path | None = None
    """The chat template, if it is not the one next to the tokenizer."""
    of_splits: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    """Split -> prefixes of the corpora that only this split reads."""
    datasets: dict[Path, IndexedDataset] = field(default_factory=dict, repr=False, compare=False)
    """Prefix -> corpus that is open already."""

    def dataset(self, prefix: Path) -> IndexedDataset:
        """Return the corpus of a prefix, and read its whole index on the first call."""
        if prefix not in self.datasets:
            self.datasets[prefix] = IndexedDataset(prefix)
        return self.datasets[prefix]

    def vocabulary_problem(self, vocab_size: int) -> Problem | None:
        """Return the problem of a model with fewer ids than the tokenizer has, or None."""
        held = self.meta.get("vocab_size")
        if held is None or held <= vocab_size:
            return None
        rule = f"cannot hold all ids because the tokenizer of the corpus has {held} tokens"
        return Problem("MT607", "model.vocab_size", vocab_size, rule, f"model.vocab_size={held}")

    @property
    def tokenizer_sha256(self) -> str | None:
        """Return the hash of the tokenizer that made the tokens, if it is known."""
        known: str | None = self.meta.get("tokenizer_sha256")
        return known or self.meta.get("files", {}).get("tokenizer.json", {}).get("sha256")


def verify(corpus: Corpus) -> None:
    """Read every file of a cached text corpus again.

    Raises CorruptData for a file that changed since it was written.
    """
    if corpus.prefix is None:
        return
    for name, expected in corpus.meta.get("files", {}).items():
        path = corpus.prefix.parent / name
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != expected["sha256"]:
            raise CorruptData(
                f"{path}: sha256 is {digest}, was written as {expected['sha256']}: remove"
                f" {path.parent}"
            )


def open_indexed(data: DataConfig) -> Corpus:
    """Check the `.bin/.idx` files and the tokenizer that a configuration names."""
    problems: list[Problem] = []

    def problem(key: str, value: str | None, rule: str, fix: str) -> None:
        problems.append(Problem("MT602", f"data.{key}", value, rule, fix))

    prefixes = prefixes_of(data, "blend" if data.blend else "path", problem)
    if not prefixes and not problems:
        rule = "cannot be null because data.kind=indexed reads .bin/.idx files"
        problem("path", None, rule, "data.path=PREFIX of the two files")
    of_splits = {}
    for name in ("validation", "test"):
        own = prefixes_of(data, f"{name}_blend", problem)
        if own:
            of_splits[name] = own
    tokenizer = Path(os.path.expanduser(data.tokenizer)) if data.tokenizer else None
    if tokenizer is not None and not os.path.isfile(tokenizer):
        fix = similar_paths(tokenizer).replace("data.path=", "data.tokenizer=")
        rule = f"cannot be read because {tokenizer} is not a file"
        problem("tokenizer", data.tokenizer, rule, fix)
    if problems:
        raise ConfigError(problems)
    every = [*prefixes, *(prefix for own in of_splits.values() for prefix in own)]
    # Megatron's order depends on the length of every sequence
    whole = data.order == "megatron"
    datasets = {prefix: IndexedDataset(prefix, whole=whole) for prefix in every}
    meta = _counts([datasets[prefix] for prefix in every])
    meta |= manifest_facts(every, tokenizer)
    if tokenizer is not None:
        from mtrain.data.text.tokenizer import Tokenizer

        loaded = Tokenizer(tokenizer)
        meta |= {"vocab_size": loaded.vocab_size, "eod": meta.get("eod", loaded.eod)}
        meta["tokenizer_sha256"] = sha256_of(tokenizer)
    return Corpus(
        prefixes[0], tokenizer, meta, prefixes[1:], of_splits=of_splits, datasets=datasets
    )


def prefixes_of(
    data: DataConfig, key: str, problem: Callable[[str, str, str, str], None]
) -> tuple[Path, ...]:
    """Return the prefixes that a key names; report those without files to `problem`."""
    named = getattr(data, key) or ()
    named = (named,) if isinstance(named, str) else named
    cache = Path(os.path.expanduser(data.cache_dir))
    limit = int(data.remote_cache_gib * units.GIB)
    prefixes = []
    for name in named:
        if is_remote(name):
            prefixes.append(mirrored(name, key, cache, limit))
        else:
            prefix = Path(os.path.expanduser(name))
            _check_files(prefix, name, key, problem)
            prefixes.append(prefix)
    return tuple(prefixes)


def _check_files(
    prefix: Path, name: str, key: str, problem: Callable[[str, str, str, str], None]
) -> None:
    """Report a prefix that is a file itself or has no `.bin` or `.idx`."""
    if prefix.suffix in (".bin", ".idx"):
        rule = f"cannot be read because it is one file, and {key} names the prefix of both"
        problem(key, name, rule, f"data.{key}={prefix.with_suffix('')}")
        return
    missing = [
        with_suffix(prefix, suffix).name
        for suffix in (".bin", ".idx")
        if not os.path.isfile(with_suffix(prefix, suffix))
    ]
    if missing:
        candidates = None
        if os.path.isdir(prefix.parent):
            candidates = sorted(path.stem for path in prefix.parent.glob("*.idx"))
        rule = f"no file {' and '.join(missing)} in {prefix.parent}"
        problem(key, name, rule, similar_paths(prefix, candidates or None))


def similar_paths(path: Path, names: list[str] | None = None) -> str:
    """Return a fix for a missing path: similar names, or its existing part."""
    if not os.access(path.parent, os.R_OK | os.X_OK):
        existing = next(p for p in (*path.absolute().parents, Path("/")) if os.path.isdir(p))
        return f"data.path= a path that exists; of this one {existing} does"
    names = sorted(os.listdir(path.parent)) if names is None else names
    similar = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or names[:3]
    if not similar:
        return f"{path.parent} is empty: data.path=another"
    return " or ".join(f"data.path={path.parent / name}" for name in similar)


def manifest_facts(prefixes: list[Path], tokenizer: Path | None) -> dict[str, Any]:
    """Return the facts that a run needs from the manifests of corpora: the largest id of all, and
    the end-of-document id and tokenizer hash if all manifests agree on them.

    Raises CorruptData for a manifest that changed or belongs to other files, ConfigError if another
    tokenizer made the tokens.
    """
    manifests = []
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        if manifest is not None:
            manifests.append(manifest)
            wrong = manifest.sizes_differ(prefix, remote=is_mirrored(prefix))
            if wrong:
                raise CorruptData(wrong)
    if tokenizer is not None:
        own = sha256_of(tokenizer)
        for manifest in manifests:
            made_by = manifest.tokenizer_sha256
            if made_by not in (None, own):
                rule = (
                    f"cannot be used because its sha256 is {own[:12]}, and {str(made_by)[:12]} made"
                    f" the tokens, by {manifest.path}"
                )
                fix = "data.tokenizer=PATH of the tokenizer.json that made them"
                raise ConfigError.of("MT620", "data.tokenizer", str(tokenizer), rule, fix)
    # a corpus without a manifest may have larger ids and other ends of documents
    if len(manifests) < len(prefixes):
        return {}
    facts: dict[str, Any] = {
        "largest_id": max(manifest.count("largest_id") for manifest in manifests)
    }
    # a blend of corpora with different ends of documents has no id that ends every document
    for name, values in (
        ("eod", {manifest.eod for manifest in manifests}),
        ("tokenizer_sha256", {manifest.tokenizer_sha256 for manifest in manifests}),
    ):
        if len(values) == 1 and None not in values:
            facts[name] = values.pop()
    return facts


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
    """Return a short hash over sizes, the ends of the index, and `samples` evenly spread blocks.

    It distinguishes corpora of any size in milliseconds; it does not detect a single changed token.
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
