"""The rank at fault follows from what ranks sent; samples are traced to their documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mtrain.data.samples.blend import Blend
from mtrain.data.samples.origin import origin
from mtrain.data.samples.token_stream import Samples
from mtrain.data.store.indexed import IndexedDataset, IndexedWriter
from mtrain.train.suspects.blame import Dispute, culprit, roots


def test_suspect_steps_root_sends_first_difference() -> None:
    # rank 1 sends other bits into "b"; rank 0 passes them on in "c", and rank 2 never hears of them
    heard = [
        [("a", False), ("b", False), ("c", True), ("rank 0:loss", True)],
        [("a", False), ("b", True), ("rank 1:loss", True)],
        [("a", False), ("rank 2:loss", False)],
    ]
    assert roots(heard) == [1]
    assert roots([[("a", False)], [("a", False)]]) == []
    # a reduction that fails itself: nobody sent other bits
    assert roots([[("a", False), ("rank 0:sum", True)], [("a", False), ("rank 1:sum", True)]]) == [
        0,
        1,
    ]


def test_suspect_steps_culprit_is_in_most_disputes() -> None:
    # three replicas: 1 is in both disputes
    assert culprit([Dispute(0, 1, 1.0, 1.1), Dispute(1, 2, 1.1, 1.0)], 4.0) == 1
    # two replicas: the same two ranks in both
    inf = float("inf")
    assert culprit([Dispute(0, 1, 1.0, inf), Dispute(1, 0, 9e30, 1.0)], 4.0) == 1
    assert culprit([Dispute(0, 1, 1.0, 1.1), Dispute(1, 0, 1.1, 1.0)], 4.0) is None
    assert culprit([Dispute(0, 1, 1.0, inf), Dispute(1, 0, 1.0, inf)], 4.0) is None
    assert culprit([], 4.0) is None


def test_suspect_steps_origin_names_documents(tmp_path: Path) -> None:
    parts = []
    for name in ("a", "b"):
        with IndexedWriter(tmp_path / name, np.dtype("<u2")) as writer:
            writer.add(np.arange(60), np.array([10, 3, 7, 40]))
        dataset = IndexedDataset(tmp_path / name)
        parts.append(Samples(dataset, range(4), 8, 1, False, 60_000))
    # tokens 8 to 16 are of the first three documents
    assert origin(parts[0], 1) == f"{tmp_path / 'a'}: documents 0, 1, 2"
    assert origin(parts[1], 5) == f"{tmp_path / 'b'}: document 3"
    blend = Blend(parts, [1.0, 1.0], 1)
    places = [blend.places([number]) for number in range(8)]
    wanted = [origin(parts[int(part[0])], int(index[0])) for part, index in places]
    assert [origin(blend, number) for number in range(8)] == wanted
    assert {text.partition(":")[0] for text in wanted} == {str(tmp_path / n) for n in "ab"}
