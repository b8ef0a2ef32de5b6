"""Time to open a corpus of very many documents, and to read its first global batch.

    python benchmarks/open_corpus.py [--documents 1e8] [--tokens 0] [--order keyed] [--folder
    FOLDER] [--out FILE]

The corpus is written if it does not exist. Its documents have 0 to 3 tokens; with --tokens, so many
on average, of a lognormal distribution, in a sparse file. Each of six processes opens it as a run
does, reads the first global batch of 256 samples, and reports its seconds and its reads from the
disk. The index of 1e8 documents has 2 GB. Every other process starts cold: its files are dropped
from the page cache (Linux), and with `--order documents`, which packs whole documents by first fit,
the cached packing is removed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import psutil


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=float, default=1e8)
    parser.add_argument("--order", choices=("keyed", "megatron", "documents"), default="keyed")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mtrain-open-corpus"))
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    prefix = (
        options.folder
        / f"documents-{int(options.documents)}{f'-{options.tokens}' * (options.tokens > 0)}"
    )
    if not prefix.with_name(f"{prefix.name}.idx").exists():
        make(prefix, int(options.documents), options.tokens)
    context = multiprocessing.get_context("spawn")
    seconds = list[dict[str, Any]]()
    for trial in range(6):
        if cold := trial % 2 == 0 and hasattr(os, "posix_fadvise"):
            forget(prefix)
            for found in (options.folder / "cache").glob("documents-*"):
                shutil.rmtree(found) if found.is_dir() else found.unlink()
        with context.Pool(1) as pool:
            seconds.append({"cold": cold, **pool.apply(opened, (str(prefix), options.order))})
    result = {
        "documents": int(options.documents),
        "order": options.order,
        "cores": os.cpu_count(),
        "seconds": seconds,
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def make(prefix: Path, documents: int, tokens: int) -> None:
    """Write the corpus, and its index last."""
    import numpy as np

    from mtrain.data.store.indexed import write_index

    prefix.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    lengths = random.integers(0, 4, documents, dtype=np.int32)
    if tokens:
        lengths = random.standard_normal(documents, np.float32)
        lengths = np.minimum(np.exp(lengths + np.log(tokens) - 0.5), 1 << 20).astype(np.int32)
    total = int(lengths.sum(dtype=np.int64))
    some = 1 << 24
    with open(prefix.with_name(f"{prefix.name}.bin"), "wb") as file:
        if tokens:
            file.truncate(2 * total)
        for first in range(0, 0 if tokens else total, some):
            file.write(np.arange(first, min(first + some, total)).astype("<u2").tobytes())
    draft = prefix.with_name(f"{prefix.name}.draft")
    write_index(draft, lengths, np.dtype("<u2"))
    draft.rename(prefix.with_name(f"{prefix.name}.idx"))


def forget(prefix: Path) -> None:
    """Drop the files of a corpus from the page cache."""
    for suffix in (".bin", ".idx"):
        with open(prefix.with_name(f"{prefix.name}{suffix}"), "rb") as file:
            # the kernel drops only pages that are on the disk
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opened(prefix: str, order: str) -> dict[str, Any]:
    """Return the seconds until the corpus is open and until its first batch is read, after the
    imports.
    """
    from mtrain.config.schema.data import DataConfig
    from mtrain.data import WholeDocuments, open_splits, prepare
    from mtrain.data.batch import GlobalBatches, document_collator

    cache = str(Path(prefix).parent / "cache")
    whole = {"packed": True, "packed_by": "first_fit"} if order == "documents" else {"order": order}
    data = DataConfig.model_validate(
        {"kind": "indexed", "path": prefix, "seq_length": 4096, "cache_dir": cache, **whole}
    )
    before = psutil.Process().io_counters().read_bytes
    begun = time.perf_counter()
    splits = open_splits(data, 65_536, 1, prepare(data), requested=(100_000, 1000, 100))
    opened_after = time.perf_counter() - begun
    form = document_collator(splits.train) if isinstance(splits.train, WholeDocuments) else None
    GlobalBatches(splits.train, 256, 4, 0, 1, form).microbatches(0)
    first = time.perf_counter() - begun
    read = psutil.Process().io_counters().read_bytes - before
    counts = splits.train.describe()
    full = 1 - counts.get("padding", 0) / (counts["samples"] * 4096)
    return {
        "full": round(full, 4),
        "open_s": round(opened_after, 3),
        "first_batch_s": round(first, 3),
        "read_mb": round(read / 1e6, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
