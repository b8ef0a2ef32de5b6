"""Settings of Megatron-Bridge's performance recipes that its published tables leave out
(data/bridge_recipes.csv).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "data" / "bridge_recipes.csv"


@dataclass(frozen=True)
class Recipe:
    """The settings of a model on a device, in one precision and release."""

    graphs: frozenset[str] = frozenset()
    """The parts that CUDA graphs capture: attn, mamba, mlp, router, preprocess; or whole, an
    iteration or each layer.
    """
    recompute: tuple[str, ...] = ()
    """The modules that are recomputed."""
    block: int = 0
    """The number of whole layers of each stage that are recomputed instead."""
    flex: bool = False
    """Tokens go to a domain once, by DeepEP or HybridEP."""
    overlaps_experts: bool = False
    """Dispatch of tokens to experts overlaps with the computation of another micro-batch."""
    attention_8_bit: bool = False
    overlaps_tp: bool = False


def recipe(model: str, gpu: str, precision: str, release: str, layout: str) -> Recipe:
    """Return the newest recipe up to a release, or the oldest one; in another precision if there is
    no recipe for this one.

    Tables are published after the recipes of their release: if that recipe has another `layout`
    (tp, pp, virtual stages, ep), the first later one with the layout counts.
    """
    known = [line for line in _lines() if (line["model"], line["gpu"]) == (model, gpu)]
    same = [line for line in known if precision in line["precisions"].split()] or known
    until = [line for line in same if line["release"] <= release] or same[:1]
    later = [line for line in same if line["release"] > release and line["layout"] == layout]
    if until and later and until[-1]["layout"] != layout:
        return _read(later[0])
    return _read(until[-1]) if until else Recipe()


@cache
def _lines() -> tuple[Mapping[str, str], ...]:
    with FILE.open() as lines:
        found = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return tuple(sorted(found, key=lambda line: line["release"]))


def _read(line: Mapping[str, str]) -> Recipe:
    again = line["recompute"]
    block = int(again.removeprefix("block:")) if again.startswith("block:") else 0
    return Recipe(
        graphs=frozenset(filter(None, line["graphs"].split("+"))),
        recompute=() if block or not again else tuple(again.split("+")),
        block=block,
        flex=bool(line["dispatcher"]),
        overlaps_experts=line["overlaps_experts"] == "yes",
        attention_8_bit=line["attention_8_bit"] == "yes",
        overlaps_tp=line["overlaps_tp"] == "yes",
    )
