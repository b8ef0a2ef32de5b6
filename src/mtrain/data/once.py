"""Which samples of a split an evaluation looks at: training goes on behind the last one, and a
measurement does not.

Needs no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mtrain.data.megatron_order import MegatronBlend, MegatronSamples
from mtrain.data.whole_documents import WholeDocuments


def evaluated(source: Any, wanted: int) -> Any:
    """Return the samples of a split as an evaluation of `wanted` of them reads it.

    It is the split itself, but in Megatron's order, which shuffles all epochs of a small split that
    the evaluations of a run need together: there an evaluation reads one epoch.
    """
    if isinstance(source, MegatronSamples):
        return source.once() if source.shape.epochs > 1 else source
    return source.once(wanted) if isinstance(source, MegatronBlend) else source


def repeated(source: Any, numbers: np.ndarray) -> np.ndarray:
    """Which samples of a split, by their numbers int64 [n], are there under a smaller number, too;
    bool [n].

    In Megatron's order a blend goes on when a corpus has given all that it has, whose samples then
    come again.
    """
    if isinstance(source, WholeDocuments) and len(numbers) and source.reaches(int(numbers.max())):
        return np.zeros(len(numbers), np.bool_)  # the length of all is not known, and need not be
    found = np.asarray(numbers >= len(source))
    if isinstance(source, MegatronBlend):
        part, index = source.places(numbers)
        found |= index >= np.array([len(one) for one in source.parts])[part]
    return found


def first_once(source: Any, wanted: int) -> tuple[int, int]:
    """Return how many of the first `wanted` samples of a split are no repetitions, and the number
    behind the last one.
    """
    if isinstance(source, WholeDocuments) and source.reaches(wanted - 1):
        return wanted, wanted
    most = min(wanted, len(source))
    if not isinstance(source, MegatronBlend):
        return most, most
    kept = np.flatnonzero(~repeated(source, np.arange(most, dtype=np.int64)))
    return len(kept), int(kept[-1]) + 1 if len(kept) else 0
