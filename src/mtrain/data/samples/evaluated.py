"""The samples of an evaluation: each once, while training goes on after the last one."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtrain.data.samples.megatron_order import MegatronBlend, MegatronSamples
from mtrain.data.samples.whole_documents import WholeDocuments


def evaluation_samples(source: Any, wanted: int) -> Any:
    """Return the samples of a split that an evaluation of `wanted` samples reads.

    Megatron's order shuffles all epochs of a small split that the evaluations of a run need
    together; there an evaluation reads one epoch. Otherwise it reads the split itself.
    """
    if isinstance(source, MegatronSamples):
        return source.once() if source.shape.epochs > 1 else source
    return source.once(wanted) if isinstance(source, MegatronBlend) else source


def is_repeated(source: Any, numbers: np.ndarray) -> np.ndarray:
    """Return whether each sample of the numbers int64 [n] also has a smaller number; bool [n].

    In Megatron's order a blend continues after a corpus is exhausted, and repeats its samples.
    """
    if isinstance(source, WholeDocuments) and len(numbers) and source.reaches(int(numbers.max())):
        return np.zeros(len(numbers), np.bool_)  # without `len`, which would pack all parts
    again = np.asarray(numbers >= len(source))
    if isinstance(source, MegatronBlend):
        part, index = source.places(numbers)
        again |= index >= np.array([len(one) for one in source.parts])[part]
    return again


def distinct_samples(source: Any, wanted: int) -> tuple[int, int]:
    """Return how many of the first `wanted` samples of a split are distinct, and the number after
    the last of them.
    """
    if isinstance(source, WholeDocuments) and source.reaches(wanted - 1):
        return wanted, wanted
    most = min(wanted, len(source))
    if not isinstance(source, MegatronBlend):
        return most, most
    kept = np.flatnonzero(~is_repeated(source, np.arange(most, dtype=np.int64)))
    return len(kept), int(kept[-1]) + 1 if len(kept) else 0
