"""Orders that Megatron-LM left in its folder of caches (`--data-cache-path`): read, never written,
never unpickled.

Beside three arrays there is a `description.txt`, JSON, that says what they are of. Its hash in
their names holds the tokenizer too, which says nothing about an order; here they are found by what
is said of the rest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.data.orders import Arrays, load
from mtrain.errors import CorruptData

SPLITS = {"train": "train", "validation": "valid", "test": "test"}
"""Our splits -> how Megatron-LM calls them."""
ENDING = "-description.txt"
MAX_FILES = 100_000
MAX_DESCRIPTION = 1 << 20
COMPARED = 1024
"""Samples whose beginning is compared with what their sequences add up to."""


@dataclass(frozen=True)
class Theirs:
    """Where Megatron-LM kept its orders, and what it was told of the split."""

    folder: Path
    shares: tuple[float, float] | None


@dataclass(frozen=True)
class Wanted:
    """The split that an order is wanted of."""

    prefix: Path
    split: str
    seed: int
    seq_length: int
    asked: int | None
    shares: tuple[float, float] | None
    """Where the split begins and ends in the corpus, as shares of it; None: it is all of it."""

    def is_said(self, said: Any) -> bool:
        """Return whether a description is of it."""
        return (
            isinstance(said, dict)
            and said.get("class") == "GPTDataset"
            and said.get("index_split") == SPLITS[self.split]
            and said.get("random_seed") == self.seed
            and said.get("sequence_length") == self.seq_length
            and said.get("num_samples") == self.asked
            and isinstance(said.get("dataset_path"), str)
            and Path(said["dataset_path"]).name == self.prefix.name
            and (said.get("split_matrix") is None) == (self.shares is None)
            and (self.shares is None or _near(said["split_matrix"], self.shares))
        )


def _near(said: Any, shares: tuple[float, float]) -> bool:
    """Return whether one of the shares that are said, of train, validation and test, are these."""
    return isinstance(said, list) and list(shares) in said


def arrays_of(folder: Path, wanted: Wanted, sequences: int, samples: int) -> Arrays | None:
    """`sequences` and `shuffled` as Megatron-LM wrote them; None where the folder has none of this
    split.

    Raises CorruptData for files that do not hold so many sequences and samples.
    """
    for number, path in enumerate(
        sorted(folder.glob(f"*-GPTDataset-{SPLITS[wanted.split]}{ENDING}"))
    ):
        if number >= MAX_FILES:
            return None
        if wanted.is_said(_said(path)):
            return _read(path, sequences, samples)
    return None


def _said(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(MAX_DESCRIPTION))
    except (OSError, ValueError, RecursionError):
        return None


def _read(description: Path, sequences: int, samples: int) -> Arrays:
    base = description.name.removesuffix(ENDING)
    names = {"sequences": "document_index", "places": "sample_index", "shuffled": "shuffle_index"}
    arrays = {}
    for name, theirs in names.items():
        path = description.with_name(f"{base}-{theirs}.npy")
        try:
            arrays[name] = array = load(path)
        except OSError as error:
            raise CorruptData(
                f"{path}: cannot be read: {error.strerror}; remove {description.name}"
            ) from error
        expected = {"sequences": (sequences,), "places": (samples + 1, 2), "shuffled": (samples,)}[
            name
        ]
        if array.shape != expected or array.dtype.kind not in "iu":
            raise CorruptData(
                f"{path}: {array.dtype.name} {list(array.shape)}, and {list(expected)} are needed:"
                f" it is of another corpus or split; remove it with {description.name}"
            )
    return arrays


def compare(arrays: Arrays, lengths: np.ndarray, seq_length: int, stride: int) -> None:
    """Raise CorruptData where samples do not begin where the sequences before them end.

    `starts` has the place in the stream of every `stride`th sequence.
    """
    places = arrays.pop("places")
    order = arrays["sequences"]
    starts = arrays["starts"]
    file = places.filename  # type: ignore[attr-defined]
    for number in (
        np.linspace(0, len(places) - 1, min(COMPARED, len(places))).astype(np.int64).tolist()
    ):
        entry, offset = (int(value) for value in places[number])
        if not 0 <= entry < len(order):
            raise CorruptData(
                f"{file}: sample {number} begins in sequence {entry}, and there are {len(order)}"
            )
        chunk = entry // stride
        before = int(lengths[order[chunk * stride : entry]].astype(np.int64).sum())
        found = int(starts[chunk]) + before + offset
        if found != number * seq_length:
            raise CorruptData(
                f"{file}: sample {number} begins at token {found}, and at {number * seq_length} by"
                " the lengths of the sequences: it is of another corpus; remove it"
            )
