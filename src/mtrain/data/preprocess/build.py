"""The build of a corpus from documents: `.bin`, `.idx`, manifest and rejects, or nothing at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mtrain import durable
from mtrain.config.disk import token_files
from mtrain.data.preprocess.encoder import OtherIds
from mtrain.data.preprocess.journal import (
    BIN,
    LENGTHS,
    REJECTS,
    SEQUENCES,
    Draft,
    Totals,
    disk,
    finish,
)
from mtrain.data.preprocess.readers import cut
from mtrain.data.preprocess.sources import PARTIAL, REJECTED, REMOVED, UNIT, Source, Unit, plan
from mtrain.data.preprocess.workers import Job, Pool, Worker
from mtrain.data.store.indexed import write_index
from mtrain.errors import ConfigError, CorruptInput, first_line

ENDINGS = (".bin", ".idx", token_files.SUFFIX, REJECTED, REMOVED)
LIBRARIES = {"sentencepiece": "sentencepiece", "tiktoken": "tiktoken"}
Progress = Callable[[Unit, Totals], None]


@dataclass(frozen=True)
class Facts:
    """Facts of a loaded tokenizer."""

    vocab_size: int
    eod: int | None
    unk: int | None
    dtype: str
    engine: str
    passed_over: str
    """The reason not to use a faster library."""


@dataclass(frozen=True)
class Limits:
    """Settings of a build that do not change the corpus."""

    workers: int
    max_rejects: int
    fresh: bool = False
    overwrite: bool = False


def tokenize(
    job: Job, prefix: Path, limits: Limits, progress: Progress, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Build a corpus, or resume a killed build; return the manifest.

    If gigatoken, chosen by `engine=auto`, gives other ids than the tokenizer, the build starts
    again with tokenizers, and `tell` reports it.

    Raises:
        ConfigError: the files exist, or were begun with other settings; a learning flag of a record
            is neither yes nor no.
        CorruptInput: more records are rejected than the limit.
        CorruptData: an input or the tokenizer does not have the format of its name.
        BadEnvironment: a library is missing, a process was killed, or the disk fails.
    """
    try:
        return _made(job, prefix, limits, progress, tell)
    except OtherIds as error:
        if job.spec.engine != "auto":
            raise
        tell(f"{first_line(error)}: starting again with tokenizers")
    again = replace(job, spec=replace(job.spec, engine="tokenizers"))
    return _made(again, prefix, replace(limits, fresh=True), lambda unit, totals: None, tell)


def _made(
    job: Job, prefix: Path, limits: Limits, progress: Progress, tell: Callable[[str], None]
) -> dict[str, Any]:
    folder = prefix.with_name(prefix.name + PARTIAL)
    # before the processes start; a killed build that had begun to rename its files goes on
    if not os.path.exists(folder):
        refuse_existing(prefix, limits.overwrite)
    # the pool starts before any file is open, which its processes would inherit
    with Pool(limits.workers, Worker, job) as pool:
        facts = pool.ask(_facts)
        if facts.passed_over:
            tell(f"gigatoken is not used: {facts.passed_over}")
        names = [source.name for source in job.sources]
        with Draft(folder, _settings(job, facts), names, fresh=limits.fresh) as draft:
            if not draft.finished:
                try:
                    refuse_existing(prefix, limits.overwrite)
                except ConfigError:
                    if not draft.units:
                        draft.remove()
                    raise
                _grow(draft, pool, job, limits, progress)
                _complete(draft, job, facts)
            moves = [
                (folder / name, path_of(prefix, name))
                for name in (BIN, "tokens.idx", REJECTS, "manifest.json")
            ]
            with disk(folder):
                if (folder / BIN).exists():  # no file is renamed yet
                    remove_optional_files(prefix)
                finish(moves, durable.sync)
                draft.remove()
    found = token_files.read_manifest(prefix)
    assert found is not None
    return found.body


def path_of(prefix: Path, name: str) -> Path:
    """Return the final path of a file of the draft folder."""
    ending = {BIN: ".bin", "tokens.idx": ".idx", REJECTS: REJECTED}.get(name, token_files.SUFFIX)
    return prefix.with_name(prefix.name + ending)


# Functions of the module, since the pool sends them to its processes by name
def _facts(worker: Worker) -> Facts:
    encoder = worker.encoder
    return Facts(
        encoder.vocab_size,
        encoder.eod,
        encoder.unk,
        worker.dtype.name,
        worker.engine,
        worker.passed_over,
    )


def _tables(_: Worker, source: Source) -> list[tuple[int, int, int]]:
    return cut(source)


def refuse_existing(prefix: Path, overwrite: bool) -> None:
    """Refuse a prefix whose files would be overwritten.

    Raises:
        ConfigError: a file of this name exists.
    """
    names = [prefix.name + ending for ending in ENDINGS]
    existing = [name for name in names if os.path.lexists(prefix.with_name(name))]
    if existing and not overwrite:
        verb = "exists" if len(existing) == 1 else "exist"
        rule = f"cannot be written because {', '.join(existing)} {verb} already"
        fix = f"out={prefix}-2, or overwrite=true"
        raise ConfigError.of("MT622", "out", str(prefix), rule, fix, "command line")


def remove_optional_files(prefix: Path) -> None:
    """Remove the optional files of an older corpus of this name, which a new one may lack."""
    for ending in (REJECTED, REMOVED):
        prefix.with_name(prefix.name + ending).unlink(missing_ok=True)


def _settings(job: Job, facts: Facts) -> dict[str, Any]:
    """Return all settings that the bytes of the corpus depend on, for a resumed build to match."""
    return {
        "format": token_files.FORMAT,
        "unit": UNIT,
        "tokenizer": _tokenizer(job, facts),
        "document": {
            "parts": job.reading.parts,
            "lines": job.reading.by_line,
            "max_bytes": job.reading.max_bytes,
            "ignored_keys": job.reading.ignored,
            "sentences": job.language,
            "keep_newlines": job.keep_newlines,
        },
        "eod": facts.eod if job.append_eod else None,
        "dtype": facts.dtype,
        "inputs": [source.describe() for source in job.sources],
    }


def _tokenizer(job: Job, facts: Facts) -> dict[str, Any]:
    spec = job.spec
    name = LIBRARIES.get(job.spec.kind, facts.engine)
    try:
        library = f"{name} {version(name)}"
    except PackageNotFoundError:
        library = name
    out: dict[str, Any] = {
        "kind": spec.kind,
        "files": [Path(file).name for file in spec.files],
        "sha256": spec.sha256,
        "library": library,
        "special_names_are_text": spec.plain,
    }
    if spec.kind == "bert":
        out["lower_case"] = spec.lower_case
    if spec.kind == "tiktoken":
        out |= {"pattern": spec.pattern, "special_tokens": dict(spec.special_tokens)}
        out |= {"num_special_tokens": spec.num_special_tokens, "vocab_size": spec.vocab_size}
    return out


def _grow(draft: Draft, pool: Pool, job: Job, limits: Limits, progress: Progress) -> None:
    """Process the remaining units, and commit their results in order."""
    # a worker cuts tables, so that this process does not load pyarrow
    units = plan(job.sources, job.reading, lambda source: pool.ask(_tables, source))
    remaining = _remaining(units, draft, progress)
    for unit, result in pool.each(Worker.run, remaining, lambda u: job.sources[u[0].source].name):
        try:
            draft.commit(result)
        except ConfigError:  # no run can resume this: the file or the settings must change
            draft.remove()
            raise
        progress(unit, draft.totals)
        _refuse_many_rejects(draft, limits.max_rejects)
    _refuse_many_rejects(draft, limits.max_rejects)


def _remaining(units: Iterator[Unit], draft: Draft, progress: Progress) -> Iterator[Unit]:
    """Report the units that are in the draft, and yield those after them."""
    for unit in islice(units, draft.units):
        progress(unit, draft.totals)
    yield from units


def _refuse_many_rejects(draft: Draft, limit: int) -> None:
    rejected = draft.totals.sum("rejected")
    if rejected > limit:
        # the draft stays: the same command with a larger limit resumes it
        rule = (
            f"{rejected} records are left out so far, of {draft.totals.sum('records')}:"
            f" {draft.folder / REJECTS}"
        )
        first = "; ".join(line.strip() for line in draft.last_rejects())
        fix = f"correct them, or max_rejects={2 * rejected}"
        raise CorruptInput.of(
            "MT621", "max_rejects", limit, f"{rule}; {first}", fix, "command line"
        )


def _complete(draft: Draft, job: Job, facts: Facts) -> None:
    """Write the index and the manifest, and mark the draft as finished."""
    totals = draft.totals
    folder = draft.folder
    if changed := next((source.name for source in job.sources if source.is_changed), None):
        draft.remove()
        rule = "cannot be tokenized because it changed while it was read"
        raise ConfigError.of(
            "MT601", "input", changed, rule, "run again when it is complete", "command line"
        )
    if not totals.sum("documents"):
        rule = f"the inputs have no document; {totals.sum('rejected')} records are left out"
        if first := draft.last_rejects(1):
            rule += f", as {first[0].strip()}"
        draft.remove()
        raise ConfigError.of(
            "MT601", "input", None, rule, "name files with documents, or key=NAME", "command line"
        )
    with disk(folder):
        draft.sync()
        _index(folder, np.dtype(facts.dtype), totals)
        if not totals.sum("rejected"):
            (folder / REJECTS).unlink()
        # the index has their numbers now
        for name in (LENGTHS, SEQUENCES):
            (folder / name).unlink()
        data = token_files.dump(_manifest(draft, job, facts))
        with open(folder / "manifest.json", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.done()


def _index(folder: Path, dtype: np.dtype, totals: Totals) -> None:
    """Write the index; document indices are only needed if a document is not one sequence."""
    lengths = _mapped(folder / LENGTHS)
    sequences = _mapped(folder / SEQUENCES)
    index = folder / "tokens.idx"
    documents: np.ndarray | None = None
    if totals.sum("empty") or totals.sum("sequences") != totals.sum("documents"):
        # in a file, as the indices of a billion documents have 8 GB
        path = folder / "documents"
        documents = np.memmap(path, "<i8", "w+", shape=(len(sequences) + 1,))
        place = 0
        documents[0] = place
        for first in range(0, len(sequences), 1 << 20):
            part = sequences[first : first + (1 << 20)]
            documents[first + 1 : first + 1 + len(part)] = np.cumsum(part, dtype=np.int64) + place
            place += int(part.sum(dtype=np.int64))
        # the map stays until the index is written, and no draft of it remains
        path.unlink()
    write_index(index, lengths, dtype, documents)
    durable.sync(index)


def _mapped(path: Path) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, "<i4", "r") if path.stat().st_size else np.empty(0, np.int32)


def _manifest(draft: Draft, job: Job, facts: Facts) -> dict[str, Any]:
    import hashlib

    totals = draft.totals
    with open(draft.folder / "tokens.idx", "rb") as file:
        index = hashlib.file_digest(file, "sha256").hexdigest()
    sizes = {name: (draft.folder / name).stat().st_size for name in (BIN, "tokens.idx")}
    inputs = [
        {"file": source.name, "bytes": source.size, **counts}
        for source, counts in zip(job.sources, totals.of, strict=True)
    ]
    settings = _settings(job, facts)
    return {
        "format": token_files.FORMAT,
        "documents": totals.sum("documents"),
        "sequences": totals.sum("sequences"),
        "tokens": totals.sum("tokens"),
        "rejected": totals.sum("rejected"),
        "largest_id": totals.largest,
        "vocab_size": facts.vocab_size,
        "unk": facts.unk,
        "eod": settings["eod"],
        "dtype": facts.dtype,
        "tokenizer": settings["tokenizer"],
        "document": settings["document"],
        "inputs": inputs,
        "files": {
            ".bin": {"bytes": sizes[BIN], "sha256": draft.sha256.hexdigest()},
            ".idx": {"bytes": sizes["tokens.idx"], "sha256": index},
        },
    }
