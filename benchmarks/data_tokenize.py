"""`data tokenize` against megatron-core's builder with the same tokenizer, document by document.

It prints MB of JSONL per second and per CPU second, ratios, and the peak memory of all processes;
then the time to write an `.idx` of many documents against megatron-core's writer. Documents are
pieces of the text files and sources of this Python installation. The builder and each engine take
turns, and the best round of each counts. Our file must begin with the tokens of the builder's.

    python benchmarks/data_tokenize.py --out benchmarks/results/data_tokenize_cpu.json
    python benchmarks/data_tokenize.py --mb 2000 --rounds 1 --engines tokenizers
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mtrain.data.store.indexed import write_index
from mtrain.data.text import tokenizer as bpe

LAUNCH = Path(__file__).resolve().parents[1] / "launch.py"
VOCAB = 32000


def texts() -> list[str]:
    """Return the text files and sources of this Python installation."""
    out = []
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(root).rglob("*")):
            if (
                path.suffix in (".py", ".md", ".rst", ".txt")
                and path.is_file()
                and path.stat().st_size < 1 << 20
            ):
                try:
                    out.append(path.read_text(encoding="utf-8"))
                except UnicodeDecodeError:
                    continue
                if len(out) >= 8000:
                    return out
    return out


def make(folder: Path, megabytes: int, baseline: int) -> tuple[Path, Path, Path]:
    """Write the documents, the first ones for the baseline, and a tokenizer; return the files."""
    held = [text for text in texts() if len(text) > 200]
    rng = random.Random(1)
    tokenizer = folder / "tokenizer.json"
    source = folder / "docs.jsonl"
    less = folder / "less.jsonl"
    bpe.train_bpe(iter(held), VOCAB).save(str(tokenizer))
    size = 0
    with open(source, "w") as file, open(less, "w") as few:
        while size < megabytes * 1_000_000:
            text = rng.choice(held)
            at = rng.randrange(len(text))
            line = json.dumps({"text": text[at : at + rng.randrange(200, 8000)]}) + "\n"
            file.write(line)
            if size < baseline * 1_000_000:
                few.write(line)
            size += len(line)
    return source, less, tokenizer


def with_builder(source: Path, tokenizer: Path, prefix: Path) -> dict[str, float]:
    """Return the rate of megatron-core's builder, a document at a time, without imports."""
    import tokenizers
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    begin = time.perf_counter()
    cpu = time.process_time()
    builder = IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=DType.optimal_dtype(made.get_vocab_size())
    )
    with open(source, encoding="utf-8") as file:
        for line in file:
            ids = made.encode(json.loads(line)["text"], add_special_tokens=False).ids
            if ids:
                ids.append(0)
            builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(f"{prefix}.idx")
    return _rates(source, time.perf_counter() - begin, time.process_time() - cpu)


def _rates(source: Path, seconds: float, cpu_seconds: float) -> dict[str, float]:
    size = source.stat().st_size / 1e6
    return {"mb_per_s": size / seconds, "mb_per_cpu_s": size / cpu_seconds}


def peak_of(process: subprocess.Popen[str], found: list[int]) -> None:
    """Append the memory of a process and its children to `found`, with shared pages once."""
    while process.poll() is None:
        total = 0
        try:
            for one in [
                psutil.Process(process.pid),
                *psutil.Process(process.pid).children(recursive=True),
            ]:
                total += one.memory_full_info().pss
        except psutil.Error:
            pass
        found.append(total)
        time.sleep(0.1)


def ours(source: Path, tokenizer: Path, prefix: Path, engine: str) -> dict[str, Any]:
    """Return the rate of the whole command, with the start of Python, and its memory."""
    words = [
        "data",
        "tokenize",
        str(source),
        f"out={prefix}",
        f"tokenizer={tokenizer}",
        f"engine={engine}",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    found = list[int]()
    process = subprocess.Popen(
        [sys.executable, str(LAUNCH), *words, "overwrite=true"],
        stdout=subprocess.DEVNULL,
        text=True,
    )
    watch = threading.Thread(target=peak_of, args=(process, found))
    watch.start()
    code = process.wait()
    seconds = time.perf_counter() - begin
    watch.join()
    assert code == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    library = json.loads(prefix.with_name(f"{prefix.name}.manifest.json").read_text())["tokenizer"][
        "library"
    ]
    return {**_rates(source, seconds, cpu), "peak_mib": max(found) / (1 << 20), "library": library}


def measured(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measure the builder and each engine in turn; return the best of each, and ratios."""
    # the builder gets fewer documents: it is slow, and its rate does not depend on their number
    source, less, tokenizer = make(folder, given.mb, given.baseline_mb)
    theirs = list[dict[str, float]]()
    engines = given.engines.split(",")
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for _ in range(given.rounds):
        theirs.append(with_builder(less, tokenizer, folder / "theirs"))
        for engine in engines:
            found[engine].append(ours(source, tokenizer, folder / engine, engine))
            assert begins_alike(folder / "theirs.bin", folder / f"{engine}.bin")
    best = {name: max(one[name] for one in theirs) for name in theirs[0]}
    out: dict[str, Any] = {"jsonl_bytes": source.stat().st_size, "builder": best, "engines": {}}
    for engine, held in found.items():
        top: dict[str, Any] = {name: max(one[name] for one in held) for name in held[0]}
        top["ratio"] = top["mb_per_s"] / best["mb_per_s"]
        top["ratio_per_cpu_s"] = top["mb_per_cpu_s"] / best["mb_per_cpu_s"]
        out["engines"][engine] = top
    return out


def begins_alike(shorter: Path, longer: Path) -> bool:
    """Return whether a file begins with all of another."""
    with open(longer, "rb") as file:
        return file.read(shorter.stat().st_size) == shorter.read_bytes()


def indexes(folder: Path, documents: int) -> dict[str, float]:
    """Return the seconds to write the index of many documents."""
    from megatron.core.datasets.indexed_dataset import _IndexWriter

    lengths = np.random.default_rng(0).integers(1, 2000, documents).astype(np.int32)
    begin = time.perf_counter()
    write_index(folder / "ours.idx", lengths, np.dtype(np.uint16))
    mine = time.perf_counter() - begin
    listed = lengths.tolist()
    places = list(range(documents + 1))
    begin = time.perf_counter()
    with _IndexWriter(str(folder / "theirs.idx"), np.uint16) as writer:
        writer.write(listed, None, places)
    theirs = time.perf_counter() - begin
    assert (folder / "ours.idx").read_bytes() == (folder / "theirs.idx").read_bytes()
    return {"documents": documents, "ours_s": mine, "theirs_s": theirs, "ratio": theirs / mine}


def main() -> None:
    """Measure, print, and write the result to a file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--baseline-mb", type=int, default=10)
    parser.add_argument("--engines", default="tokenizers,gigatoken")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--documents", type=int, default=10_000_000, help="documents of the index; 0: no index"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as scratch:
        found = measured(Path(scratch), given)
        index = indexes(Path(scratch), given.documents) if given.documents else None
    body = {
        "command": f"python benchmarks/data_tokenize.py {' '.join(sys.argv[1:])}".strip(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            name: version(name) for name in ("tokenizers", "megatron-core", "numpy", "pyarrow")
        },
        **found,
        "index": index,
    }
    print(json.dumps(body, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
