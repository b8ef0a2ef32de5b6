"""Orders in Megatron-LM's cache (`--data-cache-path`): read, never written, never unpickled.

Each order is three arrays and a `description.txt` with JSON. The hash in their names covers the
tokenizer too, which does not affect an order, so they are found by the rest of the description.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.data.store.cache import Arrays, load
from mtrain.errors import CorruptData

# Our splits -> Megatron-LM's names
SPLITS = {"train": "train", "validation": "valid", "test": "test"}
ENDING = "-description.txt"
MAX_FILES = 100_000
MAX_DESCRIPTION = 1 << 20
# Samples whose beginning is compared with the sum of the sequences before it
COMPARED = 1024


@dataclass(frozen=True)
class MegatronCache:
    """The folder with Megatron-LM's orders, and the shares of the split that it used."""

    folder: Path
    shares: tuple[float, float] | None


@dataclass(frozen=True)
class Wanted:
    """The split whose order is wanted."""

    prefix: Path
    split: str
    seed: int
    seq_length: int
    requested: int | None
    shares: tuple[float, float] | None
    """Begin and end of the split as shares of the corpus; None if it is all of it."""

    def matches(self, description: Any) -> bool:
        """Return whether a description belongs to this split."""
        return (
            isinstance(description, dict)
            and description.get("class") == "GPTDataset"
            and description.get("index_split") == SPLITS[self.split]
            and description.get("random_seed") == self.seed
            and description.get("sequence_length") == self.seq_length
            and description.get("num_samples") == self.requested
            and isinstance(description.get("dataset_path"), str)
            # only the name: a corpus may have been mounted elsewhere when the cache was written
            and Path(description["dataset_path"]).name == self.prefix.name
            and (description.get("split_matrix") is None) == (self.shares is None)
            and (self.shares is None or _contains(description["split_matrix"], self.shares))
        )


def _contains(split_matrix: Any, shares: tuple[float, float]) -> bool:
    """Return whether a row of a split matrix has these shares."""
    return isinstance(split_matrix, list) and list(shares) in split_matrix


def arrays_of(folder: Path, wanted: Wanted, sequences: int, samples: int) -> Arrays | None:
    """Return `sequences` and `shuffled` as Megatron-LM wrote them; None without such a cache.

    Raises CorruptData for files that do not hold so many sequences and samples.
    """
    for number, path in enumerate(
        sorted(folder.glob(f"*-GPTDataset-{SPLITS[wanted.split]}{ENDING}"))
    ):
        if number >= MAX_FILES:
            return None
        if wanted.matches(_description(path)):
            return _read(path, sequences, samples)
    return None


def _description(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(MAX_DESCRIPTION))
    except (OSError, ValueError, RecursionError):
        return None


def _read(description: Path, sequences: int, samples: int) -> Arrays:
    base = description.name.removesuffix(ENDING)
    names = {"sequences": "document_index", "places": "sample_index", "shuffled": "shuffle_index"}
    shapes = {"sequences": (sequences,), "places": (samples + 1, 2), "shuffled": (samples,)}
    arrays = {}
    for name, megatron_name in names.items():
        path = description.with_name(f"{base}-{megatron_name}.npy")
        try:
            array = load(path)
            arrays[name] = array
        except OSError as error:
            raise CorruptData(
                f"{path}: cannot be read: {error.strerror}; remove {description.name}"
            ) from error
        if array.shape != shapes[name] or array.dtype.kind not in "iu":
            raise CorruptData(
                f"{path}: {array.dtype.name} {list(array.shape)}, and {list(shapes[name])} are"
                " needed: it is of another corpus or split; remove it with"
                f" {description.name}"
            )
    return arrays


def compare(arrays: Arrays, lengths: np.ndarray, seq_length: int, stride: int) -> None:
    """Raise CorruptData for samples that do not begin where the sequences before them end.

    `starts` has the place in the stream of every `stride`th sequence.
    """
    # the places of samples can be computed, and these would take 16 bytes a sample
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
        # from the nearest known start, so that at most `stride` lengths are added up
        chunk = entry // stride
        before = int(lengths[order[chunk * stride : entry]].astype(np.int64).sum())
        found = int(starts[chunk]) + before + offset
        if found != number * seq_length:
            raise CorruptData(
                f"{file}: sample {number} begins at token {found}, and at {number * seq_length} by"
                " the lengths of the sequences: it is of another corpus; remove it"
            )
