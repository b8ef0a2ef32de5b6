"""Verdicts of `prove` on the dropout masks of ranks, and the runs for which it compares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain.launching.prove import draws
from mtrain.loading.configuration import load
from mtrain.train.verify.dropout_compare import MASKS, wrong_masks

WORDS = ("model=llama_tiny", "data=mock", "cluster=local", "model.hidden_dropout=0.1")
ROW = "decoder.layers.0.mlp.linear_fc2"
NORM = "decoder.layers.0"


def mask(module: str, drawn: str, *, split: bool = False, axes: int = 3) -> dict[str, Any]:
    return {"module": module, "drawn": drawn, "split": split, "axes": axes}


def said(
    folder: Path, layout: str, axis: str, *ranks: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    for rank, masks in enumerate(ranks):
        coords = {"pp": 0, "dp": 0, "cp": 0, "tp": 0, axis: rank}
        (folder / MASKS.format(rank)).write_text(
            json.dumps({"rank": rank, "coords": coords, "masks": masks})
        )
    return wrong_masks(folder, load([*WORDS, *layout.split()], environment={}, to_run=False).run)


@pytest.mark.parametrize("more", [[], [mask(NORM, "b")]])
def test_dropout_rarer_on_one_rank_is_named(tmp_path: Path, more: list[dict[str, Any]]) -> None:
    both = [mask(NORM, "a")]
    ((module, what),) = said(
        tmp_path, "parallel=tp2", "tp", [*both, mask(ROW, "c"), *more], [*both, *more]
    )
    assert module == ROW
    assert f"drop {2 + len(more)} and {1 + len(more)} times" in what


def test_dropout_may_differ_for_other_documents(tmp_path: Path) -> None:
    uneven = "parallel=dp2 parallel.hybrid_context_parallel=true data.packed=true "
    uneven += "parallel.max_seqlen_per_dp_cp_rank=1024 parallel.overlap_grad_reduce=false"
    one = [mask(NORM, "a"), mask(NORM, "b")]
    two = [mask(NORM, "c")]
    assert said(tmp_path, uneven, "dp", one, two) == []
    assert len(said(tmp_path, "parallel=dp2", "dp", one, two)) == 1


@pytest.mark.parametrize(("split", "wrong"), [(True, "a"), (False, "b")])
def test_dropout_of_split_features_is_independent(tmp_path: Path, split: bool, wrong: str) -> None:
    for drawn in "ab":
        found = said(
            tmp_path,
            "parallel=tp2",
            "tp",
            [mask(ROW, "a", split=split)],
            [mask(ROW, drawn, split=split)],
        )
        assert [module for module, _ in found] == [ROW] * (drawn == wrong)


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        ("parallel=tp2 peft=lora peft.dropout=0.1", True),
        ("parallel=tp2 peft=lora", False),
        ("peft.kind=null", False),
    ],
)
def test_dropout_of_adapters_is_compared(words: str, drawn: bool) -> None:
    run = load([*WORDS[:3], *words.split()], environment={}, to_run=False).run
    assert draws(run) is drawn
