"""Arrays that are computed once, such as orders of samples, in files that every rank maps."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mtrain import strict_json
from mtrain.data.store import cache
from mtrain.data.store.cache import META
from mtrain.errors import CorruptData

SMALL = 1 << 20
"""Orders of fewer numbers are computed in memory, which takes a moment."""
Arrays = dict[str, np.ndarray]
Fill = Callable[[Callable[[str, str, int], np.ndarray]], None]
"""A function that requests arrays by name, dtype and length, and fills them."""


def build_arrays(folder: Path, size: int, fill: Fill) -> Arrays:
    """Return the arrays that `fill` makes, of about `size` numbers, from `folder` if it has them.

    If the folder cannot be written, they are made in memory.
    """
    if size > SMALL:
        with contextlib.suppress(OSError):
            return cache.build_once(
                folder, lambda: _known(folder), lambda building: _write(building, fill)
            )
    made: Arrays = {}

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        made[name] = np.zeros(length, dtype)
        return made[name]

    fill(array)
    return made


def _known(folder: Path) -> Arrays | None:
    """Return the arrays of a folder, or None if it is incomplete."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        arrays = {
            name: load(folder / f"{name}.npy")
            for name in meta["arrays"]
            if f"{name}.npy" in cache.ORDERS
        }
        shapes = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    except (OSError, ValueError, KeyError, TypeError, CorruptData):
        return None
    return arrays if shapes == meta.get("shapes") else None


def _write(folder: Path, fill: Fill) -> None:
    made: dict[str, np.memmap] = {}

    def array(name: str, dtype: str, length: int) -> np.ndarray:
        path = folder / f"{name}.npy"
        made[name] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))
        # a full disk fails here, and not by SIGBUS when the map is written
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        return np.asarray(made[name])  # numpy shuffles only plain arrays at full speed

    fill(array)
    for one in made.values():
        one.flush()
    shapes = [[name, one.dtype.str, len(one)] for name, one in made.items()]
    text = strict_json.dumps({"kind": "order", "arrays": list(made), "shapes": shapes})
    (folder / META).write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> np.ndarray:
    """Return the array of a `.npy` file as a memory map, without unpickling anything.

    Raises CorruptData for a file of another format, or one that is shorter than its header says.
    """
    try:
        # refuses arrays of objects, the only ones that are pickled
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OverflowError, SyntaxError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorruptData(f"{path}: not an array of numbers in numpy's format: {reason}") from error
