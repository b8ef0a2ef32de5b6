"""How long a corpus of very many documents takes to open, and to give the first global batch.

    python benchmarks/open_corpus.py [--documents 1e8] [--order keyed] [--folder FOLDER] [--out FILE]

Makes the corpus, of documents of 0 to 3 tokens, where it is not there. Then each of five processes opens it
as a run does, reads the first global batch of 256 samples, and says how long that took. The index of 1e8 documents
has 2 GB: the first process may read it from the disk, the others have it in memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=float, default=1e8)
    parser.add_argument("--order", choices=("keyed", "megatron"), default="keyed")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mtrain-open-corpus"))
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    prefix = options.folder / f"documents-{int(options.documents)}"
    if not prefix.with_name(f"{prefix.name}.idx").exists():
        make(prefix, int(options.documents))
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        seconds = [pool.apply(opened, (str(prefix), options.order)) for _ in range(5)]
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


def make(prefix: Path, documents: int) -> None:
    """Write the corpus; its index last."""
    import numpy as np

    from mtrain.data.indexed import write_index

    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths = np.random.default_rng(0).integers(0, 4, documents, dtype=np.int32)
    total, some = int(lengths.sum()), 1 << 24
    with open(prefix.with_name(f"{prefix.name}.bin"), "wb") as file:
        for first in range(0, total, some):
            file.write(np.arange(first, min(first + some, total)).astype("<u2").tobytes())
    draft = prefix.with_name(f"{prefix.name}.draft")
    write_index(draft, lengths, np.dtype("<u2"))
    draft.rename(prefix.with_name(f"{prefix.name}.idx"))


def opened(prefix: str, order: str) -> dict[str, Any]:
    """Seconds until the corpus is open, and until the first batch is read, without imports."""
    from mtrain.config.groups import DataConfig
    from mtrain.data import open_splits, prepare
    from mtrain.data.batch import GlobalBatches

    cache = str(Path(prefix).parent / "cache")
    data = DataConfig.model_validate(
        {"kind": "indexed", "path": prefix, "seq_length": 4096, "order": order, "cache_dir": cache}
    )
    begun = time.perf_counter()
    splits = open_splits(data, 65_536, 1, prepare(data), asked=(100_000, 1000, 100))
    opened_after = time.perf_counter() - begun
    GlobalBatches(splits.train, 256, 4, 0, 1).microbatches(0)
    return {"open": round(opened_after, 3), "first_batch": round(time.perf_counter() - begun, 3)}


if __name__ == "__main__":
    raise SystemExit(main())
