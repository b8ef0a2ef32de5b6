"""Packed samples: documents side by side, padded, and nothing of one in another."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain.data.batch import Packing, pack

EOD = 9


def _windows(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_packing_documents_start_at_zero_with_bounds() -> None:
    batch = pack(
        _windows([1, 2, EOD, 3, 4, EOD, 5, 6, 7], [1, 1, 1, 1, 1, 1, 1, EOD, 2]), Packing((EOD,))
    )
    assert batch["tokens"].tolist() == [[1, 2, EOD, 3, 4, EOD, 5, 6, 1, 1, 1, 1, 1, 1, 1, EOD]]
    assert batch["cu_seqlens"].tolist() == [0, 3, 6, 8, 16]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7]]


def test_packing_document_end_has_no_loss() -> None:
    batch = pack(_windows([1, EOD, 3, 4, 5]), Packing((EOD,)))
    assert batch["labels"].tolist() == [[EOD, 3, 4, 5]]
    assert batch["loss_mask"].tolist() == [[1, 0, 1, 1]]


def test_packing_documents_are_padded_and_overflow_dropped() -> None:
    batch = pack(_windows([1, EOD, 3, 4, 5, 6, 7, 8, 8]), Packing((EOD,), multiple=4))
    assert batch["tokens"].tolist() == [[1, EOD, 0, 0, 3, 4, 5, 6]]
    assert batch["loss_mask"].tolist() == [[1, 0, 0, 0, 1, 1, 1, 1]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 8]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, EOD), min_size=17, max_size=17), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 8]),
)
def test_packing_counted_token_keeps_label_and_document(
    rows: list[list[int]], multiple: int
) -> None:
    batch = pack(torch.tensor(rows), Packing((EOD,), multiple))
    tokens, labels, mask = (batch[k][0].tolist() for k in ("tokens", "labels", "loss_mask"))
    bounds = batch["cu_seqlens"].tolist()
    assert len(tokens) == 16 * len(rows)
    assert bounds[0] == 0
    assert bounds[-1] == len(tokens)
    assert all(b > a and (b - a) % multiple == 0 for a, b in itertools.pairwise(bounds))
    assert {0, *range(16, len(tokens) + 1, 16)} <= set(bounds), (
        "a sample's documents stay in its row"
    )
    pairs = {(a, b) for row in rows for a, b in itertools.pairwise(row) if a != EOD}
    for start, stop in itertools.pairwise(bounds):
        inner = [i for i in range(start, stop) if mask[i]]
        assert all((tokens[i], labels[i]) in pairs for i in inner)
        assert EOD not in tokens[start : stop - multiple]
        assert batch["position_ids"][0, start:stop].tolist() == list(range(stop - start))


@pytest.mark.parametrize("multiple", [1, 4])
def test_packing_sample_without_end_is_one_document(multiple: int) -> None:
    batch = pack(_windows([1, 2, 3, 4, 5, 6, 7, 8, 1]), Packing((EOD,), multiple))
    assert batch["cu_seqlens"].tolist() == [0, 8]
    assert batch["loss_mask"].sum() == 8
