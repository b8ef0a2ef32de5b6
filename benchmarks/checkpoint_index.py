"""Commit of a checkpoint of 10,000 ranks without its tensors: indices, files of groups, manifest.

    python benchmarks/checkpoint_index.py --folder /var/tmp --folder /dev/shm

Each rank of Llama 3.1 405B with the distributed optimizer leaves the index of the pieces that it
would write. `whole` is one process that merges all indices into the manifest, as it does up to 256
ranks. With groups, the slowest of the processes that merge 64 indices each is followed by rank 0.
A reader then opens the checkpoint and looks up the pieces of a rank, in the layout that wrote and
in another. Files of pieces are holes. Groups are merged one after the other here, so that each has
the machine to itself. `--open-ms` adds the time that a network disk takes to open a file to each
index that is merged.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mtrain.ckpt import folder, index
from mtrain.config.compose.composer import compose
from mtrain.config.resolve.resolution import Machine, resolve
from mtrain.launching.verdict.regions import Layout

T = TypeVar("T")
MODEL = (
    "model=llama31_405b",
    "data=mock",
    "cluster=h100",
    "precision=bf16",
    "parallel.distributed_optimizer=true",
    "parallel.account_for_embedding_in_pipeline_split=true",
    "parallel.account_for_loss_in_pipeline_split=true",
)
WROTE = ("parallel.tp=8", "parallel.pp=16")
READS = ("parallel.tp=4", "parallel.pp=8")
DTYPES = {"model": "bfloat16", "optim": "float32"}


def layout(words: tuple[str, ...], ranks: int) -> Layout:
    """Return the places of all tensors in a layout."""
    argv = [*MODEL, *words, f"parallel.ranks={ranks}"]
    machine = Machine(cpu_cores=64, memory_bytes=1 << 50)
    return Layout(resolve(compose(argv).run, machine, ranks))


def indices(places: Layout, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the index of each rank's file; of replicas, the first rank writes."""
    seen: set[Any] = set()
    for rank in range(ranks):
        name = folder.shard_name(rank)
        pieces = []
        nbytes = 0
        for read in places.reads(rank, weights_only=False):
            region = read.region
            place = (read.name, region.offset, region.shape, region.flat)
            if place in seen:
                continue
            seen.add(place)
            dtype = DTYPES[read.name.partition("/")[0]]
            nbytes += region.size * (2 if dtype == "bfloat16" else 4)
            pieces.append(
                {
                    "key": read.name,
                    "global_shape": list(places.shapes[read.name]),
                    "dtype": dtype,
                    "offset": list(region.offset),
                    "shape": list(region.shape),
                    "flat": None if region.flat is None else list(region.flat),
                    "file": name,
                    "entry": f"{read.name}@{len(pieces)}",
                }
            )
        facts = {"name": name, "bytes": nbytes, "header_sha256": f"{rank:064x}"}
        yield {"pieces": pieces, "file": facts}


def slow_disk(seconds: float) -> None:
    """Let the reading of an index wait, as on a network disk."""
    real = Path.read_bytes

    def slowly(path: Path) -> bytes:
        time.sleep(seconds)
        return real(path)

    Path.read_bytes = slowly  # type: ignore[method-assign]


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Return seconds and result of a call."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def drafted(root: Path, written: list[dict[str, Any]]) -> Path:
    """Leave the indices of all ranks, and their files as holes, in a draft."""
    draft = folder.draft_of(root, 1)
    draft.mkdir(parents=True)
    (draft / folder.RUN_FILE).write_text("a: 1\n")
    for rank, one in enumerate(written):
        with (draft / one["file"]["name"]).open("wb") as file:
            # no bytes in a RAM file system either
            file.truncate(one["file"]["bytes"])
        index.write(draft, rank, len(written), [one])
    return draft


def committed(root: Path, written: list[dict[str, Any]]) -> tuple[dict[str, float], Path]:
    """Commit a checkpoint; return the seconds of each part, and its path."""
    ranks = len(written)
    draft = drafted(root, written)
    groups = []
    for first in range(0, ranks, index.GROUP):
        if index.of_group(draft, first, ranks) is not None:
            groups.append(timed(lambda first=first: index.gather(draft, first, ranks))[0])
    took = {"slowest_group_s": max(groups), "all_groups_s": sum(groups)} if groups else {}
    took["rank_0_merge_s"], body = timed(lambda: index.merged(draft, ranks))
    body |= {"step": 1, "ranks": ranks, "state": {}}
    final = root / folder.folder_name(1)
    took["rank_0_commit_s"] = timed(lambda: folder.commit(draft, final, body))[0]
    took["commit_s"] = sum(took[key] for key in took if key != "all_groups_s")
    return took, final


def reader(path: Path, places: Layout, rank: int) -> dict[str, float]:
    """Look up the pieces of everything that a rank reads; return seconds, files and MiB."""
    took: dict[str, float] = {}
    took["open_s"], manifest = timed(lambda: folder.read_manifest(path, verify=False))
    held = index.Index(path, manifest)

    def find() -> None:
        for read in places.reads(rank, weights_only=False):
            held.pieces(read.name, read.region)

    took["find_s"] = timed(find)[0]
    took["groups"] = len(held._groups)
    sizes = [manifest["files"][index.group_name(group)]["bytes"] for group in held._groups]
    took["group_mib"] = sum(sizes) / 2**20
    took["manifest_mib"] = (path / folder.MANIFEST).stat().st_size / 2**20
    return took


def main() -> None:
    """Measure in each folder, print the results, and write them to a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=9984)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, action="append", required=True)
    parser.add_argument("--open-ms", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.open_ms:
        slow_disk(args.open_ms / 1e3)
    wrote = layout(WROTE, args.ranks)
    reads = layout(READS, args.ranks)
    written = list(indices(wrote, args.ranks))
    facts: dict[str, Any] = {"ranks": args.ranks, "open_ms": args.open_ms}
    facts["pieces"] = sum(len(one["pieces"]) for one in written)
    print(facts, flush=True)
    rows = []
    for place in args.folder:
        for _ in range(args.rounds):
            for kind in ("whole", "groups"):
                index.MOST_WHOLE = args.ranks if kind == "whole" else 256
                home = Path(tempfile.mkdtemp(prefix="index-", dir=place))
                try:
                    took, path = committed(home, written)
                    row: dict[str, Any] = {"folder": str(place), "kind": kind, **took}
                    last = args.ranks - 1
                    for name, places in (("same", wrote), ("other", reads)):
                        found = [reader(path, places, rank) for rank in (0, last // 2, last)]
                        for key in found[0]:
                            row[f"{name}_{key}"] = statistics.median(one[key] for one in found)
                finally:
                    shutil.rmtree(home, ignore_errors=True)
                rows.append(row)
                shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
                print(json.dumps(shown), flush=True)
    if args.out:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        facts |= {"commit": commit, "command": " ".join(sys.argv), "rows": rows}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
