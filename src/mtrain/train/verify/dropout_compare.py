"""A comparison of the dropout of ranks.

Shards of a tensor must drop different elements, copies of a whole tensor the same ones.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtrain.config.schema.parallel import ParallelConfig
from mtrain.config.schema.run import RunConfig

MASKS = "masks_{:05d}.json"
HEADS = 4
"""Axes of attention's probabilities; tensor-parallel ranks have different heads of them."""


def wrong_masks(folder: Path, run: RunConfig) -> list[tuple[str, str]]:
    """Return modules whose dropout is equal on ranks where it must differ, or differs where it must
    be equal, each with a description.
    """
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("masks_*.json"))]
    return [
        problem
        for a, b in itertools.combinations(ranks, 2)
        if a["coords"]["pp"] == b["coords"]["pp"]
        for problem in _of_two(a, b, run.parallel)
    ]


def _of_two(a: dict[str, Any], b: dict[str, Any], p: ParallelConfig) -> Iterator[tuple[str, str]]:
    others = [axis for axis in ("dp", "cp", "tp") if a["coords"][axis] != b["coords"][axis]]
    who = f"ranks {a['rank']} and {b['rank']} ({', '.join(others)})"
    one = a["masks"]
    two = b["masks"]
    # Its ranks run different documents, so their masks cannot be paired to the end.
    uneven = p.hybrid_context_parallel and "dp" in others  # ranks with other numbers of documents
    if len(one) != len(two) and not uneven:
        ends = itertools.zip_longest(one, two)
        x, y = next((x, y) for x, y in ends if not x or not y or x["module"] != y["module"])
        yield (
            (x or y)["module"],
            f"{who} drop {len(one)} and {len(two)} times; what they drop parts here",
        )
        return
    for x, y in zip(one, two, strict=not uneven):
        # Without sequence parallelism, tensor-parallel ranks hold whole copies outside of
        # attention.
        copies = (
            others == ["tp"] and x["axes"] < HEADS and not x["split"] and not p.sequence_parallel
        )
        alike = x["drawn"] == y["drawn"]
        if alike and not copies:
            yield x["module"], f"{who} drop the same of different tokens, features or heads"
        elif copies and not alike:
            yield x["module"], f"{who} hold the same tensor and drop different elements of it"
