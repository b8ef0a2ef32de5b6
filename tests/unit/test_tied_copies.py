"""Folders of tied models that hold the head as well: counted as a copy, in every family, and
compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mtrain.config.resolve.resolution import resolve
from mtrain.convert.boxes import boxes_from_family
from mtrain.convert.huggingface.model import tables
from mtrain.convert.match import export_match, match
from mtrain.recipes.huggingface.importer import import_config
from tests.parity_hf.families import CASES
from tests.support.configs import LAPTOP

KINDS = sorted({case.kind for case in CASES.values()})


@pytest.mark.parametrize("kind", KINDS)
def test_tied_copies_head_is_copy_of_embeddings(kind: str, tmp_path: Path) -> None:
    case = next(case for case in CASES.values() if case.kind == kind)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, **case.values, "tie_word_embeddings": True}))
    run = resolve(import_config(file).run, LAPTOP)
    ours = boxes_from_family(run)
    for table in tables(kind, run.model):
        made = export_match(table, run.model, ours)
        plain = {name for step in made.steps for name in step.theirs} | made.copies.keys()
        heads = {copy.name: copy.of for copy in table.copies if not copy.of_mtp}
        assert heads
        assert heads.keys().isdisjoint(plain)
        found = match([table], run.model, ours, plain | heads.keys())
        assert found.copies.items() >= heads.items()
        assert {name for step in found.steps for name in step.theirs} == plain - made.copies.keys()
        # transformers ties the other way round if only the head exists
        (head, of), *_ = heads.items()
        alone = match([table], run.model, ours, plain - {of} | {head})
        assert any(head in step.theirs for step in alone.steps)
        assert of not in alone.copies.values()


def test_tied_copies_compare_across_formats() -> None:
    from mtrain.convert.compare import apart

    one = np.array([[1.5, -2.0]], np.float32).view(np.int32)
    half = np.array([[0x3FC0, 0xC000]], np.uint16).view(np.int16)  # the same in bf16
    assert apart(one, "F32", half, "BF16") == ""
    other = np.array([[1.5, -2.25]], np.float32).view(np.int32)
    assert apart(one, "F32", other, "F32") == "1 of 2 numbers differ, by up to 0.25"
    assert apart(one, "F32", half.T, "BF16") == "shapes [1, 2] and [2, 1]"
